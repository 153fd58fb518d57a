"""The last resort: the operator on every component in a loop, always right and slow.

Batch dim: each component is seen with a batch dim of 1, so that `dim` arguments keep their meaning. Ragged
dim: whatever the operator does to it. Gaps: never seen. It reports itself once per operator.
May import bridge, tensor, structure, errors.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from njt import bridge, errors, tensor
from njt.structure import Structure
from njt.tensor import NestedTensor

# functions of nested tensors that run other operators: what is missing is missing in those
_NOT_OPERATORS = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}

FALLBACKS: Counter[str] = Counter()


def report() -> str:
    """Which operators ran per component so far in this process, and how often.

    >>> print(njt.report())
    no operator ran per component
    """
    if not FALLBACKS:
        return "no operator ran per component"
    return "\n".join(f"{name}: {count} calls" for name, count in FALLBACKS.most_common())


def per_component(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    missing: errors.Undeclared,
) -> Any:
    """`func` of every component, put together again; differentiable.

    Raises:
        errors.Undeclared: a graph is being recorded, where a loop would be unrolled and wrong.
        RuntimeError: the batch is empty, or results don't fit together.
    """
    nested = _nested_in(args) + _nested_in(tuple(kwargs.values()))
    name = bridge.name_of(func)
    if func in _NOT_OPERATORS or not nested or any(bridge.is_traced(x) for x in nested):
        raise missing
    x = nested[0]
    if not FALLBACKS[name]:
        warnings.warn(
            f"{name}() has no rule for nested tensors and runs once per component, which is slow; "
            f"njt.report() counts such calls.",
            stacklevel=4,
        )
    FALLBACKS[name] += 1
    batch = x._structure.batch_size
    if batch == 0:
        raise errors.bad_shape(
            name, errors.describe(x), "at least one component", "Skip the call for an empty batch."
        )
    parts = {id(y): [c.unsqueeze(0) for c in y.unbind()] for y in nested}
    outs = []
    for i in range(batch):
        here = [_swapped(a, parts, i) for a in args]
        outs.append(func(*here, **{k: _swapped(a, parts, i) for k, a in kwargs.items()}))
    return _joined(name, x, outs)


def _nested_in(args: tuple[Any, ...]) -> list[NestedTensor]:
    found: list[NestedTensor] = []
    for a in args:
        if isinstance(a, NestedTensor):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found.extend(e for e in a if isinstance(e, NestedTensor))
    return found


def _swapped(a: Any, parts: dict[int, list[Tensor]], i: int) -> Any:
    if isinstance(a, NestedTensor):
        return parts[id(a)][i]
    if isinstance(a, (list, tuple)):
        return type(a)([_swapped(e, parts, i) for e in a])
    return a


def _joined(name: str, x: NestedTensor, outs: list[Any]) -> Any:
    first = outs[0]
    if isinstance(first, (list, tuple)):
        columns = [_joined(name, x, [o[k] for o in outs]) for k in range(len(first))]
        return type(first)(columns)
    if not isinstance(first, Tensor):
        if all(o == first for o in outs):
            return first
        raise errors.bad_shape(name, "a number per component", "tensors", "Loop over x.unbind().")
    if any(o.dim() == 0 or o.shape[0] != 1 for o in outs):
        raise errors.bad_shape(
            name,
            f"results {[tuple(o.shape) for o in outs[:3]]} of components with a batch dim of 1",
            "that batch dim first in each result",
            "Loop over x.unbind() and combine the results.",
        )
    d = _ragged_in(x, outs)
    if d is None:
        return torch.cat(outs)
    packed = torch.cat([o.squeeze(0) for o in outs], dim=d - 1)
    lengths = tuple(o.shape[d] for o in outs)
    structure = x._structure.compact()
    if lengths != x._structure.host_lengths():
        structure = Structure.from_lengths(lengths, packed.device)
    return bridge.wrap(packed, structure, d, x)


def _ragged_in(x: NestedTensor, outs: list[Tensor]) -> int | None:
    """The dim of the results that varies; for equal sizes, where the components' lengths are."""
    rank = outs[0].dim()
    varying = [d for d in range(1, rank) if len({o.shape[d] for o in outs}) > 1]
    if varying:
        return varying[0]
    lengths = x._structure.host_lengths()
    like = [d for d in range(1, rank) if tuple(o.shape[d] for o in outs) == lengths]
    if not like:
        return None
    return x._ragged_dim if x._ragged_dim in like else like[0]


tensor._hooks["undeclared"] = per_component
