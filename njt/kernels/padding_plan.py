"""What offsets and lengths say, read once on the host: numbers, checks, and row indices by width.

A plan lives as long as the offsets tensor that it was read from, and holds while that tensor holds the same
numbers: they are compared at every call, so that no way of writing to offsets goes unnoticed.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor

# spelled out in every factory: a default device is none of our business
_CPU = torch.device("cpu")
_KEPT = 16  # recipes a plan keeps: shapes vary little for one structure


class Plan:
    """Segments as index tensors and a few numbers; `recipes` is where the copies keep what they prepared."""

    def __init__(self, offsets: Tensor, lengths: Tensor | None) -> None:
        self.gapless = lengths is None
        self.read = offsets.clone(), None if lengths is None else lengths.clone()
        whole = self.read[0].long()
        self.starts = whole[:-1]
        self.sizes = whole.diff() if self.read[1] is None else self.read[1].long()
        self.batch = self.sizes.shape[0]
        self.first, self.last = int(whole[0]), int(whole[-1])
        self.shortest = self.longest = self.count = self.low = self.end = 0
        if self.batch:
            self.shortest, self.longest = (int(m) for m in self.sizes.aminmax())
            self.count = int(self.sizes.sum())
            self.low = int(self.first if self.gapless else self.starts.min())
            ends = self.last if self.gapless and self.shortest >= 0 else self.starts + self.sizes
            self.end = int(ends if isinstance(ends, int) else ends.max())
        self.mean = self.count // max(self.batch, 1)
        self.sound = self.low == 0 if self.gapless else self.low >= 0
        self.sound = self.sound and self.shortest >= 0 and (self.batch > 0 or self.first == 0)
        self.recipes: dict[Any, Any] = {}
        self._rows: dict[tuple[int, bool], tuple[Tensor | None, Tensor]] = {}

    def check(self, op: str, rows: int) -> None:
        """Compares with the number of rows that are pointed into, before anything is written."""
        if self.sound and self.end <= rows:
            return
        raise RuntimeError(
            f"{op}(): got {self._fault(rows)} for {rows} rows. Expected offsets that start at 0, never "
            f"fall and stay within the rows. Build them from lengths: F.pad(lengths.cumsum(0), (1, 0))."
        )

    def check_total(self, op: str, total: int) -> None:
        """Refuses a total that is not the last offset; gaps leave the total open."""
        if self.gapless and self.last != total:
            raise RuntimeError(
                f"{op}(): got total_length {total} for offsets ending at {self.last}. "
                f"Expected the last offset. Leave it out, or pass the sum of the lengths."
            )

    def _fault(self, rows: int) -> str:
        if not self.gapless:
            ends = (self.starts + self.sizes).tolist()
            pairs = zip(self.starts.tolist(), ends)
            return f"a segment of rows {next((s, e) for s, e in pairs if not 0 <= s <= e <= rows)}"
        if self.first != 0:
            return f"offsets starting at {self.first}"
        if self.shortest < 0:
            return f"falling offsets {self.read[0][:12].tolist()}"
        return f"offsets reaching row {self.last}"

    @functools.cached_property
    def segments(self) -> list[tuple[int, int]]:
        """(start, size) of each segment."""
        return list(zip(self.starts.tolist(), self.sizes.tolist()))

    def rows(self, width: int, left: bool) -> tuple[Tensor | None, Tensor]:
        """For every row in use that the width reaches: its packed row (None: all, in order), its padded row."""
        key = (width, left)
        if key not in self._rows:
            if len(self._rows) >= _KEPT:
                self._rows.clear()
            source, place = index(self.starts, self.sizes, width, left)
            in_order = self.gapless and self.longest <= width
            self._rows[key] = None if in_order else source, place
        return self._rows[key]

    def keep(self, key: Any, recipe: Any) -> None:
        """Keeps what was prepared for calls alike."""
        if len(self.recipes) >= _KEPT:
            self.recipes.clear()
        self.recipes[key] = recipe


def index(starts: Tensor, sizes: Tensor, width: int, left: bool) -> tuple[Tensor, Tensor]:
    """Packed row and padded row of every row that the width reaches, segment by segment."""
    kept = sizes.clamp(max=width)
    ends = kept.cumsum(0)
    count = int(ends[-1]) if ends.shape[0] else 0
    before = ends - kept
    source, place = starts - before, torch.arange(sizes.shape[0], device=_CPU) * width - before
    if left:
        source, place = source + (sizes - kept), place + (width - kept)
    t = torch.arange(count, device=_CPU)
    return tuple(  # type: ignore[return-value]
        torch.repeat_interleave(base, kept, output_size=count).add_(t) for base in (source, place)
    )


def spread(rows: Tensor, words: int) -> Tensor:
    """The index of every word of the rows."""
    return (
        rows if words == 1 else (rows[:, None] * words + torch.arange(words, device=_CPU)).flatten()
    )


_PLANS: dict[int, tuple[weakref.ref[Tensor], list[Plan]]] = {}


def plan_of(offsets: Tensor, lengths: Tensor | None) -> Plan:
    """The plan of these numbers; found again by the offsets tensor."""
    known = _PLANS.get(id(offsets))
    if known is None or known[0]() is not offsets:
        key = id(offsets)
        known = weakref.ref(offsets, lambda ref: _forget(key, ref)), []
        _PLANS[key] = known
    for plan in known[1]:
        if _same(plan.read[0], offsets) and _same(plan.read[1], lengths):
            return plan
    plan = Plan(offsets, lengths)
    known[1][:] = [plan, *known[1][:1]]  # with lengths and without: two are in use at most
    return plan


def _forget(key: int, ref: weakref.ref[Tensor]) -> None:
    known = _PLANS.get(key)
    if known is not None and known[0] is ref:
        del _PLANS[key]


def _same(read: Tensor | None, given: Tensor | None) -> bool:
    if read is None or given is None:
        return read is given
    return read.dtype == given.dtype and torch.equal(read, given)
