"""What C++ and the compilers ask a nested tensor about itself, answered from stored fields."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from njt import _compat, bridge, errors, registry, tensor
from njt._compat import OpOverload
from njt.registry import implements
from njt.structure import Structure
from njt.tensor import NestedTensor

aten, prim = torch.ops.aten, torch.ops.prim


class Field:
    """A question that one look at the tensor answers."""

    def __init__(self, read: Any) -> None:
        self.read = read

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.read(*args, **kwargs)


def _is_contiguous(x: NestedTensor, memory_format: Any = torch.contiguous_format) -> bool:
    return not x._structure.has_gaps and x._values.is_contiguous()


def _numel(x: NestedTensor) -> Any:
    if not x._structure.has_gaps:
        return x._values.numel()
    per_row = 1
    for d, n in enumerate(x._values.shape):
        per_row = per_row if d == x._ragged_dim - 1 else per_row * n
    return per_row * x._structure.total_length


tensor._hooks["numel"] = _numel


def _same_storage_numel(a: Tensor, b: Tensor) -> bool:
    if not (isinstance(a, NestedTensor) and isinstance(b, NestedTensor)):
        return False
    return a._values.numel() == b._values.numel()


def _is_same_size(a: Any, b: Any) -> bool:
    nested = [x for x in (a, b) if isinstance(x, NestedTensor)]
    if len(nested) < 2 or a._ragged_dim != b._ragged_dim or a.dim() != b.dim():
        return False
    r = a._ragged_dim - 1
    rest_a = (*a._values.shape[:r], *a._values.shape[r + 1 :])
    rest_b = (*b._values.shape[:r], *b._values.shape[r + 1 :])
    return rest_a == rest_b and bool(a._structure.same_lengths(b._structure))


def _sizes_on_host(x: NestedTensor) -> Tensor:
    """(B, dims of a component), what torch's strided nested tensors keep; C++ asks for it in messages."""
    shape = list(x._values.shape)
    d = x._ragged_dim - 1
    return torch.tensor(
        [[*shape[:d], n, *shape[d + 1 :]] for n in x._structure.host_lengths()], dtype=torch.int64
    ).reshape(x._structure.batch_size, len(shape))


def _strides_on_host(x: NestedTensor) -> Tensor:
    steps = torch.tensor(x._values.stride(), dtype=torch.int64)
    return steps.expand(x._structure.batch_size, -1).clone()


LINES = {
    aten._nested_tensor_size.default: _sizes_on_host,
    aten._nested_tensor_strides.default: _strides_on_host,
    # torch differentiates `values` by a view over these three; a tensor of ours among them brings that
    # call to `_view_from_buffer`, which knows the structure
    aten._nested_tensor_storage_offsets.default: lambda x: x.with_values(x._values.detach()),
    aten.sym_size.default: lambda x: x._size,
    aten.sym_stride.default: lambda x: x._strides,
    aten.sym_storage_offset.default: lambda x: x._values.storage_offset(),
    aten.sym_numel.default: _numel,
    aten.numel.default: _numel,
    aten.dim.default: lambda x: len(x._size),
    aten.sym_is_contiguous.default: _is_contiguous,
    aten.is_contiguous.default: _is_contiguous,
    aten.is_contiguous.memory_format: _is_contiguous,
    aten.is_non_overlapping_and_dense.default: lambda x: False,
    aten._has_same_storage_numel.default: _same_storage_numel,
    aten.is_same_size.default: _is_same_size,
    prim.layout.default: lambda x: torch.jagged,
    prim.device.default: lambda x: x._values.device,
    aten._nested_get_offsets.default: lambda x: x._structure.offsets,
    aten._nested_get_lengths.default: lambda x: x._structure.lengths,
    aten._nested_get_ragged_idx.default: lambda x: x._ragged_dim,
    aten._nested_get_min_seqlen.default: lambda x: x._structure.extent,
    aten._nested_get_max_seqlen.default: lambda x: x._structure.extent,
    aten._nested_get_jagged_dummy.default: lambda x: bridge._dummy(),
}
for _overload, _read in LINES.items():
    registry.declare(_overload, Field(_read))


@implements(aten.size.default, aten.stride.default)
def _in_a_warning(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Sizes and strides as numbers, for one text: torch takes no nested gradient to lie in memory as its leaf does."""
    if not _compat.adding_up_a_gradient():
        raise errors.SizesAsNumbers(func)
    # it would slow down no optimizer of nested tensors, which only see values
    warnings.filterwarnings(
        "ignore", rf"grad and param do not obey[^\[]*\[[^\]]*{_compat.NO_NUMBER}", UserWarning
    )
    x = args[0]
    found = x._size if func is aten.size.default else x._strides
    return [n if isinstance(n, int) else _compat.NO_NUMBER for n in found]


@implements(aten._nested_get_values.default, aten.values.default)
def _values(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    # as the backward of `_nested_view_from_jagged`, this hands a gradient to the base of a view
    x = args[0]
    if bridge.running_backward() and "_scratch" not in x.__dict__:
        return bridge.masked_for_backward(x).detach()
    return x._values.detach()


@implements(aten._nested_view_from_jagged.default)
def _view_from_jagged(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NestedTensor:
    values, offsets, _, lengths, ragged_dim, _, extent = (*args, *(None,) * 7)[:7]
    structure = Structure.find(offsets, lengths, extent=extent)
    return NestedTensor(bridge.stored(values), structure, 1 if ragged_dim is None else ragged_dim)


@implements(aten._nested_view_from_buffer.default)
def _view_from_buffer(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NestedTensor:
    packed, like = args[0], args[3]
    return like.with_values(packed.detach())
