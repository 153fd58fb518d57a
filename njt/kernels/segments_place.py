"""Place: what a segment operator is told besides its values, kept together for formulas made of several operators."""

from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from njt.kernels import segments_ops as ops
from njt.kernels.segments_index import known_gapless, segment_ids, segment_lengths

__all__ = ["Place", "Where", "at_index", "place_of", "take_rows"]


class Where(TypedDict, total=False):
    """What every function takes by keyword besides values and offsets."""

    lengths: Tensor | None  # (B,) where there are gaps
    dim: int  # of values, where the ragged dim lies; 0 if left out
    max_seqlen: int | None  # no segment is longer, where the host knows such a number
    ids: Tensor | None  # of `segment_ids`, where the caller keeps it


@dataclass(frozen=True)
class Place:
    """Offsets (B + 1,), lengths (B,) where there are gaps, ids (total,) where known, ragged dim, bound on a segment."""

    offsets: Tensor
    lengths: Tensor | None
    ids: Tensor | None
    dim: int
    max_seqlen: int | None

    @property
    def args(self) -> tuple[Tensor, Tensor | None, Tensor | None, int, int | None]:
        return self.offsets, self.lengths, self.ids, self.dim, self.max_seqlen

    @property
    def known_ids(self) -> Tensor:
        """The ids, after `with_ids`."""
        assert self.ids is not None
        return self.ids

    def with_ids(self, values: Tensor) -> "Place":
        """The ids computed, so that several operators share them."""
        if self.ids is not None:
            return self
        return replace(self, ids=segment_ids(self.offsets, self.lengths, values.shape[self.dim]))

    def reduce(self, values: Tensor, name: str) -> Tensor:
        return ops.reduce(values, *self.args, name)

    def broadcast(self, per_segment: Tensor, values: Tensor) -> Tensor:
        return ops.broadcast(per_segment, *self.args, values.shape[self.dim])

    def softmax(self, values: Tensor, log: bool) -> Tensor:
        return ops.softmax(values, *self.args, log)

    def scan(self, values: Tensor, name: str) -> Tensor:
        return ops.scan(values, *self.args, name)

    def without_gaps(self, values: Tensor) -> Tensor:
        return ops.mask_gaps(values, self.offsets, self.lengths, self.ids, self.dim)

    def along(self, per_row: Tensor, values: Tensor) -> Tensor:
        """A (total,) tensor shaped to broadcast against values."""
        return per_row.view(*[1] * self.dim, -1, *[1] * (values.dim() - self.dim - 1))


def place_of(values: Tensor, offsets: Tensor, **where: Unpack[Where]) -> Place:
    dim = where.get("dim", 0)
    if not -values.dim() <= dim < values.dim():
        raise IndexError(f"got dim {dim} for values of {values.dim()} dims; expected one of them.")
    return Place(
        offsets,
        where.get("lengths"),
        where.get("ids"),
        dim % values.dim(),
        where.get("max_seqlen"),
    )


def number(n: float, x: Tensor) -> float:
    """`n` for torch.where beside `x`: among bools it must be one, or int64 comes out."""
    return bool(n) if x.dtype == torch.bool else n


def take_rows(values: Tensor, index: Tensor, place: Place) -> Tensor:
    """values at `index` (an index in its own segment for each entry, shaped like values); 0 in gaps.

    The gradient goes to the taken entries.
    """
    total = values.shape[place.dim]
    if total == 0:
        return values
    place = place.with_ids(values)
    last = place.offsets.shape[0] - 2
    if last < 0:
        return torch.zeros_like(values)
    starts = place.offsets.long()[place.known_ids.clamp(max=last)]
    taken = values.gather(place.dim, (index + place.along(starts, values)).clamp(0, total - 1))
    if known_gapless(place.offsets, place.lengths, total):
        return taken
    used = ops.row_mask(values, place.offsets, place.known_ids, place.dim)
    return torch.where(used, taken, number(0, taken))


def at_index(values: Tensor, index: Tensor, place: Place, empty: float) -> Tensor:
    """(B, *pre, *post): values at `index` (an index in the segment for each entry), `empty` in empty segments."""
    total = values.shape[place.dim]
    if total == 0:
        out = values.new_full(index.shape, empty)
        # no row to take: an empty sum still ties the result to its input
        return out + values.sum(place.dim) if values.requires_grad else out
    column = [-1, *[1] * (index.dim() - 1)]
    sizes = segment_lengths(place.offsets, place.lengths).view(column)
    rows = (index.clamp(min=0) + place.offsets[:-1].view(column)).clamp(max=total - 1)
    taken = values.movedim(place.dim, 0).gather(0, rows)
    return torch.where(sizes > 0, taken, number(empty, taken))
