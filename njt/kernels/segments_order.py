"""Order inside segments: sort and what is read off sorted rows, flip and roll.

values (*pre, total, *post), ragged dim at `dim`; signatures as in `segments`. Traceable, differentiable to the index.
"""

import math
from typing import Unpack

import torch
from torch import Tensor

from njt.kernels import segments_ops as ops
from njt.kernels.segments_index import known_gapless, positions, segment_lengths
from njt.kernels.segments_place import Place, Where, at_index, number, place_of, take_rows

__all__ = [
    "argsort",
    "flip",
    "kthvalue",
    "median",
    "mode",
    "nanmedian",
    "quantile",
    "roll",
    "sort",
    "topk",
]


def _sorted(values: Tensor, place: Place, descending: bool = False) -> tuple[Tensor, Tensor]:
    index = ops.sort_indices(values.detach(), *place.args, descending)
    return take_rows(values, index, place), index


def sort(
    values: Tensor, offsets: Tensor, descending: bool = False, **where: Unpack[Where]
) -> tuple[Tensor, Tensor]:
    """(values, indices in the segment), stable; nan is the greatest.

    >>> sort(torch.tensor([3.0, 1.0, 2.0, 0.0]), torch.tensor([0, 2, 4]))[0]
    tensor([1., 3., 0., 2.])
    """
    place = place_of(values, offsets, **where).with_ids(values)
    return _sorted(values, place, descending)


def argsort(
    values: Tensor, offsets: Tensor, descending: bool = False, **where: Unpack[Where]
) -> Tensor:
    """Indices in the segment that sort it, stable."""
    place = place_of(values, offsets, **where)
    return ops.sort_indices(values.detach(), *place.args, descending)


def topk(
    values: Tensor, offsets: Tensor, k: int, largest: bool = True, **where: Unpack[Where]
) -> tuple[Tensor, Tensor]:
    """(values, indices), (B, k, *pre, *post) each, in order.

    A segment of fewer than k rows has index -1 and value 0 in the rest.
    """
    place = place_of(values, offsets, **where).with_ids(values)
    order = ops.sort_indices(values.detach(), *place.args, largest)
    picked, indices = [], []
    for i in range(k):
        rank = torch.full_like(segment_lengths(offsets, place.lengths), i)
        index = _at_rank(order, rank, place)
        indices.append(index)
        picked.append(torch.where(index >= 0, at_index(values, index, place, 0), number(0, values)))
    return torch.stack(picked, 1), torch.stack(indices, 1)


def _at_rank(order: Tensor, rank: Tensor, place: Place) -> Tensor:
    """(B, *pre, *post): the index at `rank` (B,) of each sorted segment, -1 where it has no such row."""
    shape = (rank.shape[0], *order.shape[: place.dim], *order.shape[place.dim + 1 :])
    column = (-1, *[1] * (len(shape) - 1))
    ranks = rank.long().view(column).expand(shape)
    index = at_index(order, ranks, place, -1)
    sizes = segment_lengths(place.offsets, place.lengths).view(column)
    return torch.where((ranks >= 0) & (ranks < sizes), index, -1)


def kthvalue(
    values: Tensor, offsets: Tensor, k: int, **where: Unpack[Where]
) -> tuple[Tensor, Tensor]:
    """(values, indices) of the k-th least entry, from 1; a segment of fewer rows gives 0 and -1."""
    place = place_of(values, offsets, **where).with_ids(values)
    order = ops.sort_indices(values.detach(), *place.args, False)
    index = _at_rank(order, torch.full_like(segment_lengths(offsets, place.lengths), k - 1), place)
    return torch.where(index >= 0, at_index(values, index, place, 0), number(0, values)), index


def _middle(values: Tensor, place: Place, skip_nan: bool) -> tuple[Tensor, Tensor]:
    place = place.with_ids(values)
    order = ops.sort_indices(values.detach(), *place.args, False)
    sizes = segment_lengths(place.offsets, place.lengths).long()
    sizes = sizes.view(-1, *[1] * (values.dim() - 1))
    shape = (sizes.shape[0], *values.shape[: place.dim], *values.shape[place.dim + 1 :])
    empty = torch.nan if values.is_floating_point() else 0
    if values.is_floating_point():  # nan sorts last: as many rows as are not nan come before
        nans = place.reduce(values.detach().isnan().to(torch.int64), "sum")
        known = sizes - nans
        rank = (known - 1).clamp(min=0) // 2
        if not skip_nan:
            rank = torch.where(nans > 0, known, rank)
    else:
        rank = ((sizes - 1).clamp(min=0) // 2).expand(shape)
    index = torch.where(sizes > 0, at_index(order, rank, place, -1), -1)
    return at_index(values, index, place, empty), index


def median(values: Tensor, offsets: Tensor, **where: Unpack[Where]) -> tuple[Tensor, Tensor]:
    """(values, indices) of the lower median, nan if there is one.

    An empty segment gives nan (0 for integers) and -1.
    """
    return _middle(values, place_of(values, offsets, **where), False)


def nanmedian(values: Tensor, offsets: Tensor, **where: Unpack[Where]) -> tuple[Tensor, Tensor]:
    """(values, indices) of the lower median of what is not nan."""
    return _middle(values, place_of(values, offsets, **where), True)


def mode(values: Tensor, offsets: Tensor, **where: Unpack[Where]) -> tuple[Tensor, Tensor]:
    """(values, indices) of the commonest entry, the least of equally common ones; the index of its last occurrence."""
    place = place_of(values, offsets, **where).with_ids(values)
    ordered, order = _sorted(values.detach(), place)
    spot = place.along(positions(offsets, place.known_ids), values).expand_as(values)
    previous = ops.shift(ordered, offsets, place.known_ids, place.dim, 0)
    begins = (spot == 0) | (ordered != previous)
    marks = torch.where(begins, spot, 0)
    run = spot - take_rows(marks, place.scan(marks, "cummax"), place)
    longest = place.broadcast(place.reduce(run, "amax"), run)
    far = torch.iinfo(torch.int64).max
    rank = place.reduce(torch.where(run == longest, spot, far), "amin")
    empty = rank == far
    index = torch.where(empty, -1, at_index(order, torch.where(empty, 0, rank), place, -1))
    return at_index(values, index, place, 0), index


def quantile(values: Tensor, offsets: Tensor, q: float, **where: Unpack[Where]) -> Tensor:
    """The q-quantile of each segment, linear between the two nearest entries; nan if there is one, or nothing."""
    if not values.is_floating_point():
        raise RuntimeError(
            f"quantile(): got values of {values.dtype}; expected a floating dtype. Convert them: x.float()."
        )
    place = place_of(values, offsets, **where).with_ids(values)
    ordered, _ = _sorted(values, place)
    sizes = segment_lengths(offsets, place.lengths).view(-1, *[1] * (values.dim() - 1))
    shape = (sizes.shape[0], *values.shape[: place.dim], *values.shape[place.dim + 1 :])
    rank = ((sizes - 1).clamp(min=0).double() * q).expand(shape)
    low, high = rank.floor().long(), rank.ceil().long()
    below, above = at_index(ordered, low, place, math.nan), at_index(ordered, high, place, math.nan)
    out = torch.lerp(below, above, (rank - low).to(values.dtype))
    nans = place.reduce(values.detach().isnan().to(torch.int64), "sum")
    return torch.where(nans > 0, torch.nan, out)


def _moved(values: Tensor, source: Tensor, place: Place) -> Tensor:
    """Rows taken from `source` (total,), an index into all rows; 0 in gaps."""
    rows = values.index_select(place.dim, source)
    if known_gapless(place.offsets, place.lengths, values.shape[place.dim]):
        return rows
    return torch.where(
        ops.row_mask(values, place.offsets, place.known_ids, place.dim), rows, number(0, rows)
    )


def _spots(values: Tensor, place: Place) -> tuple[Tensor, Tensor, Tensor]:
    """For each row: its segment's first row, its segment's size, its index in the segment (gaps: 0, 1, 0)."""
    last = place.offsets.shape[0] - 2
    mine, inside = place.known_ids.clamp(max=last), place.known_ids <= last
    sizes = segment_lengths(place.offsets, place.lengths).long()[mine]
    starts = place.offsets.long()[mine]
    zero = torch.zeros_like(starts)
    return (
        torch.where(inside, starts, zero),
        torch.where(inside, sizes, zero + 1),
        positions(place.offsets, place.known_ids),
    )


def flip(values: Tensor, offsets: Tensor, **where: Unpack[Where]) -> Tensor:
    """Each segment in reverse order."""
    place = place_of(values, offsets, **where).with_ids(values)
    if offsets.shape[0] == 1:
        return torch.zeros_like(values)
    start, size, spot = _spots(values, place)
    return _moved(values, start + size - 1 - spot, place)


def roll(values: Tensor, offsets: Tensor, shifts: int, **where: Unpack[Where]) -> Tensor:
    """Each segment moved on by `shifts` rows, what falls off its end coming in at its beginning."""
    place = place_of(values, offsets, **where).with_ids(values)
    if offsets.shape[0] == 1:
        return torch.zeros_like(values)
    start, size, spot = _spots(values, place)
    return _moved(values, start + (spot - shifts).remainder(size), place)
