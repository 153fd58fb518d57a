"""The ways in which rows move on CPU; `padding_cpu` says which one when.

Each way is made once from a plan and a case, and then called with contiguous tensors, which it sees as elements of
`case.word` bytes, `case.words` of them a row. What it prepares depends on the structure and the case alone.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from njt.kernels import pages
from njt.kernels.padding_filler import element_bytes
from njt.kernels.padding_plan import Plan, index, spread

aten = torch.ops.aten

WORDS = {
    16: torch.complex128,
    8: torch.int64,
    4: torch.int32,
    2: torch.int16,
    1: torch.uint8,
}


class Case(NamedTuple):
    """What the choice of a way looks at."""

    size: tuple[int, ...]  # of the result
    plain: bool  # of a dtype and rank that torch's own copies take
    batch: int
    used: int  # rows in use, all planes together
    planes: int  # sizes of the dims before the rows, multiplied
    total: int  # packed rows of one plane
    width: int
    row_bytes: int
    word: (
        int  # bytes of the widest element that divides a row, and that both tensors are aligned to
    )
    left: bool
    whole: bool  # no gaps, nothing cut, no rows behind the last offset
    first: bool  # nothing was prepared for such a call yet
    threads: int

    @property
    def words(self) -> int:
        return self.row_bytes // self.word

    @property
    def padded_bytes(self) -> int:
        return self.batch * self.planes * self.width * self.row_bytes

    @property
    def segment_bytes(self) -> int:
        return self.used * self.row_bytes // max(self.batch * self.planes, 1)


def flat(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor as its words."""
    return x.view(-1).view(dtype)


# packed to padded: each is called with contiguous values, the rectangle or None, and the filler


class Pad:
    """What all ways share: sizes, and the words they move."""

    def __init__(self, plan: Plan, case: Case) -> None:
        self.plan, self.case, self.dtype = plan, case, WORDS[case.word]

    def __call__(self, values: Tensor, padded: Tensor | None, padding: Any) -> Tensor:
        raise NotImplementedError


class FillAndScatter(Pad):
    """The filler everywhere, then one indexed copy of all words (`by_word`) or of all rows."""

    def __init__(self, plan: Plan, case: Case, by_word: bool) -> None:
        super().__init__(plan, case)
        self.source, self.place, self.words = *_rows(plan, case), case.words
        if by_word and self.words > 1:
            self.source = None if self.source is None else spread(self.source, self.words)
            self.place, self.words = spread(self.place, self.words), 1
        used = self.place.shape[0]  # rows behind the last offset belong to no segment
        self.used = None if used * self.words == case.planes * case.total * case.words else used

    def __call__(self, values: Tensor, padded: Tensor | None, padding: Any) -> Tensor:
        if padded is None and not any(element_bytes(padding, values.dtype)):
            padded = pages.zeros(self.case.size, values.dtype)
        else:
            padded = pages.empty(self.case.size, values.dtype) if padded is None else padded
            padded.fill_(padding)
        source, target = flat(values, self.dtype), flat(padded, self.dtype)
        if self.words > 1:
            source, target = source.view(-1, self.words), target.view(-1, self.words)
        if self.source is not None:
            source = source.index_select(0, self.source)
        elif self.used is not None:
            source = source[: self.used]
        put = target.scatter_ if self.words == 1 else target.index_copy_
        put(0, self.place, source)
        return padded


class Windows(Pad):
    """Narrow rows: `width` rows from the start of each segment on, as one run; then the filler over what is too much.

    No row is looked at by itself. One plane only.
    """

    def __init__(self, plan: Plan, case: Case) -> None:
        super().__init__(plan, case)
        width, last = case.width, case.total - case.width
        starts = plan.starts + plan.sizes - width if case.left else plan.starts
        self.starts = starts.clamp(0, last)
        self.windows, self.step = (last + 1, width * case.words), case.words
        kept = plan.sizes.clamp(max=width)[:, None]
        t = torch.arange(width, device="cpu")
        used = (t >= width - kept) if case.left else (t < kept)
        mask = used.view(torch.uint8).neg()[:, :, None].expand(-1, -1, case.row_bytes)
        self.mask = _longest_words(mask.contiguous())
        # windows that would begin or end outside: their rows, one by one
        sizes = torch.where(starts == self.starts, 0, plan.sizes)
        rows, place = index(plan.starts, sizes, width, case.left)
        self.edge = spread(rows, case.words), spread(place, case.words)
        self.filler: tuple[bytes, Tensor] | None = None

    def __call__(self, values: Tensor, padded: Tensor | None, padding: Any) -> Tensor:
        padded = pages.empty(self.case.size, values.dtype) if padded is None else padded
        source, target = flat(values, self.dtype), flat(padded, self.dtype)
        windows = source.as_strided(self.windows, (self.step, 1))
        torch.index_select(windows, 0, self.starts, out=target.view(-1, self.windows[1]))
        words = flat(padded, self.mask.dtype)
        words.bitwise_and_(self.mask)
        filler = element_bytes(padding, padded.dtype)
        if any(filler):
            words.bitwise_or_(self._fillers(filler))
        rows, place = self.edge
        if rows.shape[0]:
            target.scatter_(0, place, source.index_select(0, rows))
        return padded

    def _fillers(self, filler: bytes) -> Tensor:
        if self.filler is None or self.filler[0] != filler:
            once = torch.tensor(list(filler), dtype=torch.uint8, device="cpu")
            unused = self.mask.view(torch.uint8).view(-1, len(filler)).bitwise_not()
            self.filler = filler, _longest_words(unused.bitwise_and_(once))
        return self.filler[1]


class Blocks(Pad):
    """One copy and one fill a segment: every byte is written once."""

    def __init__(self, plan: Plan, case: Case) -> None:
        super().__init__(plan, case)
        self.cuts: list[int] | None = None
        if case.planes == 1 and case.whole:
            self.sizes = [n for _, n in plan.segments]
            free = [case.width - n for n in self.sizes]
            pairs = zip(free, self.sizes) if case.left else zip(self.sizes, free)
            self.cuts = [n for pair in pairs for n in pair]

    def __call__(self, values: Tensor, padded: Tensor | None, padding: Any) -> Tensor:
        case = self.case
        padded = pages.empty(case.size, values.dtype) if padded is None else padded
        source, target = flat(values, self.dtype), flat(padded, self.dtype)
        if self.cuts is not None:
            used = target.view(-1, case.words).split_with_sizes(self.cuts)[case.left :: 2]
            for into, rows in zip(used, source.view(-1, case.words).split_with_sizes(self.sizes)):
                into.copy_(rows)
            unused = padded.view(case.batch * case.width, -1).split_with_sizes(self.cuts)
            for free in unused[1 - case.left :: 2]:
                free.fill_(padding)
            return padded
        packed = source.view(case.planes, case.total, case.words)
        whole = target.view(case.batch, case.planes, case.width, case.words)
        blank = padded.view(case.batch, case.planes, case.width, -1)
        for b, (start, length) in enumerate(self.plan.segments):
            n = min(length, case.width)
            skip = length - n if case.left else 0
            at, free_at = (case.width - n, 0) if case.left else (0, n)
            whole[b].narrow(1, at, n).copy_(packed.narrow(1, start + skip, n))
            if n < case.width:
                blank[b].narrow(1, free_at, case.width - n).fill_(padding)
        return padded


class Aten(Pad):
    """torch's own copy, which costs least for a handful of small segments."""

    def __call__(self, values: Tensor, padded: Tensor | None, padding: Any) -> Tensor:
        offsets, width = self.plan.read[0], self.case.width
        if not values.is_floating_point() and int(float(padding)) != padding:
            # it would go through a float that does not hold it
            return Blocks(self.plan, self.case)(values, padded, padding)
        out = aten._jagged_to_padded_dense_forward.default(values, [offsets], [width], padding)
        return out if padded is None else padded.copy_(out)


# padded to packed: each is called with the contiguous rectangle and the packed rows or None


class Unpad:
    """What all ways share: sizes, and the words they move."""

    def __init__(self, plan: Plan, case: Case) -> None:
        self.plan, self.case, self.dtype = plan, case, WORDS[case.word]

    def __call__(self, padded: Tensor, packed: Tensor | None) -> Tensor:
        raise NotImplementedError


class Gather(Unpad):
    """One indexed read of all words (`by_word`) or of all rows."""

    def __init__(self, plan: Plan, case: Case, by_word: bool) -> None:
        super().__init__(plan, case)
        target, self.place = _rows(plan, case)
        self.words = case.words
        if target is None:
            target = torch.arange(self.place.shape[0], device="cpu")
        self.target = None if case.whole else target
        if by_word and self.words > 1:
            self.place = spread(self.place, self.words)
            self.target = None if self.target is None else spread(self.target, self.words)
            self.words = 1

    def __call__(self, padded: Tensor, packed: Tensor | None) -> Tensor:
        packed = pages.empty(self.case.size, padded.dtype) if packed is None else packed
        source, target = flat(padded, self.dtype), flat(packed, self.dtype)
        if self.words > 1:
            source, target = source.view(-1, self.words), target.view(-1, self.words)
        if self.target is None:
            torch.index_select(source, 0, self.place, out=target)
            return packed
        packed.zero_()
        put = target.scatter_ if self.words == 1 else target.index_copy_
        put(0, self.target, source.index_select(0, self.place))
        return packed


class Chunks(Unpad):
    """Narrow rows of long segments: several rows as one piece, then those pieces again that cross an end."""

    def __init__(self, plan: Plan, case: Case) -> None:
        super().__init__(plan, case)
        place = _rows(plan, case)[1]
        # more rows a piece are fewer pieces, but more rows in those that cross an end (5 us, 1.8 us per 1000)
        rows = min(max(math.isqrt(5 * plan.mean), 8), 64)
        count, end = place.shape[0], case.batch * case.planes * case.width - rows
        self.pieces = count // rows
        self.windows, self.step = (end + 1, rows * case.words), case.words
        self.place = place[::rows][: self.pieces].clamp(max=end)
        found = (self.place[:, None] + torch.arange(rows, device="cpu")).flatten()
        wrong = torch.ones_like(place, dtype=torch.bool)
        torch.ne(found, place[: found.shape[0]], out=wrong[: found.shape[0]])
        again = wrong.nonzero().flatten()
        self.again = spread(again, case.words), spread(place[again], case.words)

    def __call__(self, padded: Tensor, packed: Tensor | None) -> Tensor:
        packed = pages.empty(self.case.size, padded.dtype) if packed is None else packed
        source, target = flat(padded, self.dtype), flat(packed, self.dtype)
        windows = source.as_strided(self.windows, (self.step, 1))
        pieces = target[: self.pieces * self.windows[1]].view(self.pieces, self.windows[1])
        torch.index_select(windows, 0, self.place, out=pieces)
        rows, place = self.again
        target.scatter_(0, rows, source.index_select(0, place))
        return packed


class BlocksBack(Unpad):
    """One copy a segment."""

    def __call__(self, padded: Tensor, packed: Tensor | None) -> Tensor:
        case = self.case
        packed = pages.empty(case.size, padded.dtype) if packed is None else packed
        target = flat(packed, self.dtype).view(case.planes, case.total, case.words)
        source = flat(padded, self.dtype).view(case.batch, case.planes, case.width, case.words)
        if not case.whole:
            packed.zero_()
        for b, (start, length) in enumerate(self.plan.segments):
            n = min(length, case.width)
            at = case.width - n if case.left else 0
            skip = length - n if case.left else 0
            target.narrow(1, start + skip, n).copy_(source[b].narrow(1, at, n))
        return packed


class AtenBack(Unpad):
    """torch's own copy, which costs least for a handful of small segments."""

    def __call__(self, padded: Tensor, packed: Tensor | None) -> Tensor:
        offsets, total = self.plan.read[0], self.case.total
        out = aten._padded_dense_to_jagged_forward.default(padded, [offsets], total)
        return out if packed is None else packed.copy_(out)


def _rows(plan: Plan, case: Case) -> tuple[Tensor | None, Tensor]:
    """`Plan.rows` for all planes: packed rows as (planes, total), padded rows as (batch, planes, width)."""
    source, place = plan.rows(case.width, case.left)
    if case.planes == 1:
        return source, place
    plane = torch.arange(case.planes, device="cpu")[:, None]
    segment = place // case.width if case.width else place
    t = place - segment * case.width
    place = ((segment * case.planes + plane) * case.width + t).flatten()
    if source is None and not case.whole:
        source = torch.arange(t.shape[0], device="cpu")
    return None if source is None else (source + plane * case.total).flatten(), place


def _longest_words(raw: Tensor) -> Tensor:
    """Contiguous bytes as flat 8-byte words, if they are so many."""
    flat = raw.view(-1)
    return flat.view(torch.int64) if flat.shape[0] % 8 == 0 else flat
