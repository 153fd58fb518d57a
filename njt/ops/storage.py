"""What users ask about a tensor's memory and elements, answered by the values.

The wrapper itself owns no memory. In a graph the questions go their usual way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from njt import _compat, bridge, errors, structure, tensor
from njt.ops.metadata import _numel
from njt.registry import declare_function, implements_function
from njt.tensor import NestedTensor


@implements_function(torch.Tensor.numel, torch.Tensor.nelement, torch.numel)
def numel(input: Any) -> Any:
    """How many elements the components have; gaps are not counted."""
    return _numel(input)


def _of_values(method: Callable[..., Any]) -> Callable[..., Any]:
    def ask(x: Any, *args: Any, **options: Any) -> Any:
        # a compiler that describes its inputs wants the wrapper's own answer, beside those of its parts
        if x._structure.is_traced or _compat.compiler_at_work() or _compat.asked_by_describer():
            with _compat.no_torch_function():
                return method(x, *args, **options)
        return method(x._values.detach(), *args, **options)

    return ask


for _method in (
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.storage_offset,
    torch.Tensor.is_shared,
    torch.Tensor.is_pinned,
    torch.Tensor.element_size,
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
    torch.is_conj,
    torch.is_neg,
):
    declare_function(_of_values(_method), _method)


@implements_function(torch.Tensor.nbytes.__get__)  # type: ignore[attr-defined]
def _nbytes(x: Any) -> int:
    return numel(x) * x._values.element_size()


@implements_function(torch.Tensor.share_memory_)
def _share_memory_(x: Any) -> Any:
    for inner in (x._values, x._structure.offsets, x._structure.lengths):
        if inner is not None:
            inner.detach().share_memory_()
    return x


@implements_function(torch.Tensor.record_stream)
def _record_stream(x: Any, s: Any) -> None:
    for inner in (x._values, x._structure.offsets, x._structure.lengths):
        if inner is not None and inner.device.type != "cpu":
            inner.record_stream(s)


@implements_function(torch.Tensor.tolist)
def _tolist(x: Any) -> list[Any]:
    return [c.tolist() for c in x.detach().unbind()]


def _single(op: str, x: NestedTensor) -> Tensor:
    if numel(x) != 1:
        raise errors.bad_shape(
            op,
            f"{errors.describe(x)} of {numel(x)} elements",
            "one element",
            "Index an element, x[i, j], or reduce first: x.any(), x.sum().",
        )
    return bridge.compact_values(x).detach().reshape(())


def _as_number(method: Callable[..., Any]) -> Callable[..., Any]:
    name = method.__name__.strip("_")
    return lambda x: method(_single(name, x))


for _method in (
    torch.Tensor.item,
    torch.Tensor.__bool__,
    torch.Tensor.__float__,
    torch.Tensor.__int__,
    torch.Tensor.__index__,
    torch.Tensor.__complex__,
):
    declare_function(_as_number(_method), _method)


def _no_other_memory(name: str) -> Callable[..., Any]:
    def refuse(x: Any, *args: Any, **options: Any) -> Any:
        raise errors.unsupported(
            name,
            errors.describe(x),
            "a tensor that owns one piece of memory",
            "Build a new one over other values: njt.nested_tensor_from_jagged(values, offsets).",
        )

    return refuse


for _name in ("set_", "resize_", "resize_as_", "apply_", "map_", "map2_"):
    if hasattr(torch.Tensor, _name):
        declare_function(_no_other_memory(_name), getattr(torch.Tensor, _name))


def _packs_numpy(x: Any, *args: Any, **options: Any) -> Any:
    raise errors.bad_type(
        "numpy",
        errors.describe(x),
        "a dense tensor",
        "Use x.values().numpy(), or [c.numpy() for c in x].",
    )


declare_function(_packs_numpy, torch.Tensor.numpy, torch.Tensor.__array__)


@implements_function(torch.equal, torch.Tensor.equal)
def _equal(input: Any, other: Any) -> bool:
    """Equal lengths and equal elements."""
    if not (isinstance(input, NestedTensor) and isinstance(other, NestedTensor)):
        return False
    if not input.is_same_size(other):
        return False
    return torch.equal(bridge.compact_values(input), bridge.compact_values(other))


# what `torch.load(weights_only=True)` may call
torch.serialization.add_safe_globals([tensor._rebuild, structure._rebuild, NestedTensor])
