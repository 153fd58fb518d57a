"""Gathering and scattering by an index of the operand's own rank, and by a list in one feature dim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from njt import bridge, dims, errors
from njt.kernels import segments
from njt.registry import declare_named
from njt.rules.reduction import in_place, one_node
from njt.rules.restructured import inner_dim
from njt.tensor import NestedTensor


@dataclass(frozen=True)
class Along:
    """`f(x, dim, index, *more)` where index and further tensors are nested.

    Batch dim: refused. Ragged dim: entries count from the start of each component. Gaps: never read.
    Ragged dim elsewhere than 1: any.

    Attributes:
        dense: the torch function.
        like_index: the result has the rows of the index, as for gather; else those of `x`.
        lists: the index is dense, a list for one feature dim.
    """

    dense: Callable[..., Any]
    like_index: bool = False
    lists: bool = False

    def __call__(self, x: Any, dim: int, index: Any, *more: Any, **named: Any) -> Tensor:
        op = self.dense.__name__
        if not isinstance(x, NestedTensor):
            raise errors.bad_type(
                op,
                f"{errors.describe(x)} with a nested operand",
                "a nested tensor first",
                "Pad them.",
            )
        dim = dims.canonical(dim, x.dim())
        d = x._ragged_dim - 1
        ragged = dim == x._ragged_dim
        if dim == 0:
            raise errors.no_batch_dim(op, x, 0)
        if ragged and self.lists:
            raise errors.no_ragged_dim(op, x, dim)
        index = self._index(op, x, index, ragged)
        source = index if isinstance(index, NestedTensor) and ragged else x
        inner_index = index
        if isinstance(index, NestedTensor):
            inner_index = bridge.compact_values(index)
            if ragged:
                inner_index = self._shifted(x, index, inner_index, d)
        inner = [self._operand(op, a, source) for a in more]
        named = {k: self._operand(op, a, source) for k, a in named.items()}
        out = self.dense(bridge.compact_values(x), dim - 1, inner_index, *inner, **named)
        lead = source if self.like_index else x
        structure, rows = lead._structure, lead._values.shape[d]
        return bridge.wrap(bridge.spread(out, structure, rows, d), structure, d + 1, x)

    def _index(self, op: str, x: NestedTensor, index: Any, ragged: bool) -> Any:
        if self.lists:
            return index
        if not isinstance(index, NestedTensor):
            raise errors.bad_type(
                op,
                f"{errors.describe(x)} with {errors.describe(index)} for an index",
                "a nested index",
                "Make it nested with the offsets of x.",
            )
        if index._ragged_dim != x._ragged_dim or index.dim() != x.dim():
            raise errors.different_ragged_dims(op, x, index)
        return index if ragged else self._aligned(op, index, x)

    def _aligned(self, op: str, a: NestedTensor, x: NestedTensor) -> NestedTensor:
        if a._structure is x._structure:
            return a
        aligned = bridge.align(a, x, op)
        if not isinstance(aligned, NestedTensor):
            raise errors.different_structures(op, x, a)
        return aligned

    def _operand(self, op: str, a: Any, x: NestedTensor) -> Any:
        if not isinstance(a, NestedTensor):
            return a
        return bridge.compact_values(self._aligned(op, a, x))

    def _shifted(self, x: NestedTensor, index: NestedTensor, inner: Tensor, d: int) -> Tensor:
        """Row numbers in the packed rows of `x` for row numbers in its components."""
        begins = x._structure.compact().offsets[:-1].to(inner.dtype)
        counts = x._structure.seqlens.to(inner.dtype)
        there = index._structure.compact()
        rows = inner.shape[d]
        shape = [1] * inner.dim()
        shape[d] = -1
        limit = segments.broadcast(counts, there.offsets, rows, lengths=None, dim=0).view(shape)
        if (
            not there.is_traced
            and inner.device.type == "cpu"
            and bool(((inner < 0) | (inner >= limit)).any())
        ):
            raise IndexError(
                f"an index is out of bounds for dimension {d + 1} of {errors.describe(x)}"
            )
        return inner + segments.broadcast(begins, there.offsets, rows, lengths=None, dim=0).view(
            shape
        )


for _name in ("scatter", "scatter_add", "scatter_reduce"):
    _dense = getattr(torch, _name)
    declare_named(_name, one_node(_name, Along(_dense)))
    declare_named(_name + "_", in_place(_name + "_", Along(_dense)))
declare_named("gather", one_node("gather", Along(torch.gather, like_index=True)))
for _name in ("index_fill", "index_add", "index_copy"):
    _dense = getattr(torch, _name)
    declare_named(_name, one_node(_name, Along(_dense, lists=True)))
    declare_named(_name + "_", in_place(_name + "_", Along(_dense, lists=True)))


def _take_along_dim(x: Any, indices: Any, dim: int | None = None) -> Tensor:
    if dim is None:
        raise errors.bad_type(
            "take_along_dim",
            f"no dim for {errors.describe(x)}",
            "dim=",
            "Name the dim to take along.",
        )
    dim = dims.canonical(dim, x.dim())
    if isinstance(indices, NestedTensor) and dim != x._ragged_dim:
        size = [-1 if d in (0, x._ragged_dim, dim) else x.shape[d] for d in range(x.dim())]
        indices = indices.expand(size)
    return torch.gather(x, dim, indices)


declare_named("take_along_dim", one_node("take_along_dim", _take_along_dim))


def _masked_scatter(x: Any, mask: Any, source: Tensor) -> Tensor:
    """Fills the marked elements one after the other, in the order of the components' rows."""
    mask = torch.logical_and(torch.ones_like(x, dtype=torch.bool), mask)
    source = bridge.compact_values(source) if isinstance(source, NestedTensor) else source
    d = x._ragged_dim - 1
    structure = x._structure
    values, chosen = bridge.compact_values(x), bridge.compact_values(mask)
    if d:  # component by component, each in its own order
        raise errors.no_ragged_dim("masked_scatter", x, d + 1)
    out = bridge.spread(values.masked_scatter(chosen, source), structure, x._values.shape[d], d)
    return bridge.wrap(out, structure, d + 1, x)


declare_named("masked_scatter", one_node("masked_scatter", _masked_scatter))
declare_named("masked_scatter_", in_place("masked_scatter_", _masked_scatter))


def _into_features(dense: Callable[..., Any], dims_at: tuple[int, ...]) -> Callable[..., Any]:
    """A copy with some features overwritten; dims are named at `dims_at` of the arguments after src."""

    def scatter(x: Any, src: Tensor, *args: Any, **named: Any) -> Tensor:
        op, inner = dense.__name__, list(args)
        for at in dims_at:
            if at < len(inner):
                inner[at] = inner_dim(op, x, inner[at])
        for key in ("dim", "dim1", "dim2"):
            if key in named:
                named[key] = inner_dim(op, x, named[key])
        if isinstance(src, NestedTensor):
            src = bridge.values(src if src._structure is x._structure else bridge.align(src, x, op))
        out = dense(bridge.values(x), src, *inner, **named)
        return bridge.wrap(out, x._structure, x._ragged_dim, x)

    return one_node(dense.__name__, scatter)


for _dense, _dims_at in (
    (torch.select_scatter, (0,)),
    (torch.slice_scatter, (0,)),
    (torch.diagonal_scatter, (1, 2)),
):
    declare_named(_dense.__name__, _into_features(_dense, _dims_at))
