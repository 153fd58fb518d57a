"""Splitting into pieces that are views: features, runs of components, and rows of every component."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from njt import dims, errors
from njt.ops.pieces import components_between
from njt.registry import declare_named
from njt.rules.reduction import one_node
from njt.rules.restructured import packed, seen
from njt.structure import Structure
from njt.tensor import NestedTensor


class Split:
    """`f(x, how, dim=0)` that cuts one dim into views.

    Batch dim: pieces with fewer components. Ragged dim: every component is cut as a dense tensor would be,
    into as many pieces as the others; refused in a graph, which can't know how many. Gaps: stay. Ragged dim
    elsewhere than 1: any.

    Attributes:
        dense: the torch function, for features.
        places: f(how, size) -> (start, length) of each piece of a dim of that size.
    """

    def __init__(
        self,
        dense: Callable[..., Any],
        places: Callable[[Any, int], list[tuple[int, int]]],
        *aliases: str,
    ) -> None:
        self.dense = dense
        self.places = places
        self.aliases = aliases

    def __call__(self, x: Any, how: Any = None, dim: int = 0, **named: Any) -> Any:
        for name in self.aliases:
            how = named.pop(name, how)
        dim = dims.canonical(dim, x.dim())
        structure = x._structure
        if dim == 0:
            places = self.places(how, structure.batch_size)
            return tuple(components_between(x, slice(a, a + n)) for a, n in places)
        if dim != x._ragged_dim:
            return tuple(seen(p, x) for p in self.dense(packed(x), how, dim=dim - 1))
        if structure.is_traced:
            raise errors.no_ragged_dim(self.dense.__name__, x, dim)
        each = [self.places(how, n) for n in structure.host_lengths()] or [self.places(how, 0)]
        return self._rows(x, each, how)

    def _rows(
        self, x: NestedTensor, places: list[list[tuple[int, int]]], how: Any
    ) -> tuple[Tensor, ...]:
        """Piece k of every component, the other rows of which are gaps."""
        counts = {len(ps) for ps in places}
        if len(counts) != 1:
            raise errors.bad_shape(
                self.dense.__name__.strip("_"),
                f"{how} along the ragged dim of {errors.describe(x)}, which gives {sorted(counts)} pieces",
                "as many pieces of every component",
                "Use x.unbind(), or njt.to_padded_tensor(x, padding) first.",
            )
        structure, pieces = x._structure, []
        begins = structure.host_offsets()
        for piece in zip(*places):
            piece = piece[: structure.batch_size]
            starts = [b + a for b, (a, _) in zip(begins, piece)]
            host = [n for _, n in piece]
            offsets = torch.tensor(
                [*starts, begins[-1]], dtype=structure.offsets.dtype, device=x.device
            )
            rows = torch.tensor(host, dtype=structure.offsets.dtype, device=x.device)
            pieces.append(
                seen(packed(x), x, structure=Structure.find(offsets, rows, host_lengths=host))
            )
        return tuple(pieces)


def _places_by(dense: Callable[..., Any]) -> Callable[[Any, int], list[tuple[int, int]]]:
    """Where dense torch would begin each piece of a dim, and how long it would be; errors included."""

    def places(how: Any, size: int) -> list[tuple[int, int]]:
        pieces = dense(torch.empty(size, device="meta"), how)
        return [(p.storage_offset(), p.shape[0]) for p in pieces]

    return places


def _at_indices(x: Tensor, how: int | Sequence[int] | Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    return torch.tensor_split(x, how.tolist() if isinstance(how, Tensor) else how, dim=dim)


for _name, _split in {
    "chunk": Split(torch.chunk, _places_by(torch.chunk), "chunks"),
    "split": Split(
        torch.split, _places_by(torch.split), "split_size", "split_size_or_sections", "split_sizes"
    ),
    "split_with_sizes": Split(
        torch.split_with_sizes, _places_by(torch.split_with_sizes), "split_sizes"
    ),
    "tensor_split": Split(
        _at_indices, _places_by(_at_indices), "indices_or_sections", "indices", "sections",
        "tensor_indices_or_sections",
    ),
    "unsafe_chunk": Split(torch.chunk, _places_by(torch.chunk), "chunks"),
    "unsafe_split": Split(torch.split, _places_by(torch.split), "split_size"),
}.items():  # fmt: skip
    declare_named(_name, one_node(_name, _split))
for _name, _dim in {"hsplit": 1, "vsplit": 0, "dsplit": 2}.items():

    def _along(x: Any, how: Any = None, *, _dim: int = _dim, **named: Any) -> Any:
        how = next(iter(named.values()), how)
        return torch.tensor_split(x, how, dim=_dim)

    declare_named(_name, one_node(_name, _along))
