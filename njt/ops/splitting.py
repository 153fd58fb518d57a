"""Splitting into pieces that are views: features, runs of components, and rows of every component."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from njt import dims, errors
from njt.ops.indexing import components_between
from njt.registry import declare_named
from njt.rules.reduction import one_node
from njt.rules.restructured import packed, seen
from njt.structure import Structure
from njt.tensor import NestedTensor


class Split:
    """`f(x, how, dim=0)` that cuts one dim into views.

    Batch dim: pieces with fewer components. Ragged dim: every component is cut as a dense tensor would be,
    into as many pieces as the others; refused in a graph, which can't know how many. Gaps: stay. Ragged dim elsewhere than 1: any.

    Attributes:
        dense: the torch function, for features.
        lengths: f(how, size) -> lengths of the pieces of a dim of that size.
    """

    def __init__(
        self, dense: Callable[..., Any], lengths: Callable[[Any, int], list[int]], *aliases: str
    ) -> None:
        self.dense = dense
        self.lengths = lengths
        self.aliases = aliases

    def __call__(self, x: Any, how: Any = None, dim: int = 0, **named: Any) -> Any:
        for name in self.aliases:
            how = named.pop(name, how)
        dim = dims.canonical(dim, x.dim())
        structure = x._structure
        if dim == 0:
            return self._runs(x, self.lengths(how, structure.batch_size))
        if dim != x._ragged_dim:
            return tuple(seen(p, x) for p in self.dense(packed(x), how, dim=dim - 1))
        if structure.is_traced:
            raise errors.no_ragged_dim(self.dense.__name__, x, dim)
        return self._rows(x, [self.lengths(how, n) for n in structure.host_lengths()], how)

    def _runs(self, x: NestedTensor, lengths: list[int]) -> tuple[Tensor, ...]:
        ends = list(accumulate(lengths, initial=0))
        return tuple(components_between(x, slice(a, b)) for a, b in pairwise(ends))

    def _rows(self, x: NestedTensor, lengths: list[list[int]], how: Any) -> tuple[Tensor, ...]:
        """Piece k of every component, the other rows of which are gaps."""
        name = self.dense.__name__.strip("_")
        counts = {len(ns) for ns in lengths}
        if len(counts) != 1:
            raise errors.bad_shape(
                name,
                f"{how} along the ragged dim of {errors.describe(x)}, which gives {sorted(counts)} pieces",
                "as many pieces of every component",
                "Use x.unbind(), or njt.to_padded_tensor(x, padding) first.",
            )
        structure = x._structure
        starts, pieces = list(structure.host_offsets()), []
        for ns in zip(*lengths):
            offsets = torch.tensor(starts, dtype=structure.offsets.dtype, device=x.device)
            rows = torch.tensor(ns, dtype=structure.offsets.dtype, device=x.device)
            piece = Structure.find(offsets, rows, host_lengths=ns)
            pieces.append(seen(packed(x), x, structure=piece))
            starts[:-1] = [a + n for a, n in zip(starts, ns)]
        return tuple(pieces)


def _lengths_by(dense: Callable[..., Any]) -> Callable[[Any, int], list[int]]:
    """The lengths that dense torch would cut a dim into, errors included."""

    def lengths(how: Any, size: int) -> list[int]:
        return [p.shape[0] for p in dense(torch.empty(size, device="meta"), how)]

    return lengths


def _at_indices(x: Tensor, how: int | Sequence[int] | Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    return torch.tensor_split(x, how.tolist() if isinstance(how, Tensor) else how, dim=dim)


for _name, _split in {
    "chunk": Split(torch.chunk, _lengths_by(torch.chunk), "chunks"),
    "split": Split(
        torch.split, _lengths_by(torch.split), "split_size", "split_size_or_sections", "split_sizes"
    ),
    "split_with_sizes": Split(
        torch.split_with_sizes, _lengths_by(torch.split_with_sizes), "split_sizes"
    ),
    "tensor_split": Split(
        _at_indices, _lengths_by(_at_indices), "indices_or_sections", "indices", "sections",
        "tensor_indices_or_sections",
    ),
    "unsafe_chunk": Split(torch.chunk, _lengths_by(torch.chunk), "chunks"),
    "unsafe_split": Split(torch.split, _lengths_by(torch.split), "split_size"),
}.items():  # fmt: skip
    declare_named(_name, one_node(_name, _split))
for _name, _dim in {"hsplit": 1, "vsplit": 0, "dsplit": 2}.items():

    def _along(x: Any, how: Any = None, *, _dim: int = _dim, **named: Any) -> Any:
        how = next(iter(named.values()), how)
        return torch.tensor_split(x, how, dim=_dim)

    declare_named(_name, one_node(_name, _along))
