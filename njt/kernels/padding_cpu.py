"""Both copies on CPU: rows moved as wide words through one cached index, or block by block where rows are many.

values (*pre, total_length, *post), offsets (B + 1,) <-> padded (B, *pre, width, *post). Arguments were checked.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# bytes of an average segment from which one copy a segment is as fast as one gather of all rows (measured:
# the gather is 1.4 to 10 times faster from 8 KiB to 270 KiB, the two are alike at 1 MiB)
_BLOCK_BYTES = 1 << 19
_WORDS = ((16, torch.complex128), (8, torch.int64), (4, torch.int32), (2, torch.int16))


def packed_to_padded(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    width: int,
    padding: float,
    values_dim: int,
    left: bool,
) -> Tensor:
    """Implementation of njt::packed_to_padded.

    Raises:
        RuntimeError: offsets or lengths that leave the rows.
    """
    plan = _plan(offsets, lengths)
    plan.check("packed_to_padded", values.shape[values_dim])
    batch, shape = offsets.shape[0] - 1, values.shape
    size = [batch, *shape[:values_dim], width, *shape[values_dim + 1 :]]
    padded = values.new_empty(size)
    if not padded.numel():
        return padded
    if values_dim or _row_bytes(values) * max(plan.mean, 1) >= _BLOCK_BYTES:
        _fill_blocks(padded, values, plan, width, padding, values_dim, left)
        return padded
    padded.fill_(padding)
    rows, place = plan.rows(width, left)
    source, target = _wide(values.contiguous()), _wide(padded.flatten(0, 1))
    if rows is None and source.shape[0] > place.shape[0]:
        source = source[: place.shape[0]]  # rows behind the last offset belong to no segment
    if rows is not None:
        source = source.index_select(0, rows)
    target.index_copy_(0, place, source)
    return padded


def padded_to_packed(
    padded: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    total_length: int,
    values_dim: int,
    left: bool,
) -> Tensor:
    """Implementation of njt::padded_to_packed.

    Raises:
        RuntimeError: `total_length` is not the last offset, or segments leave it.
    """
    plan = _plan(offsets, lengths)
    if plan.last is not None and plan.last != total_length:
        raise RuntimeError(
            f"padded_to_packed(): got total_length {total_length} for offsets ending at {plan.last}. "
            f"Expected the last offset. Leave it out, or pass the sum of the lengths."
        )
    plan.check("padded_to_packed", total_length)
    inner, width = padded.shape[1:], padded.shape[values_dim + 1]
    size = [*inner[:values_dim], total_length, *inner[values_dim + 1 :]]
    whole = lengths is None and plan.longest <= width
    if values_dim or _row_bytes(padded[:1].flatten(0, 1)) * max(plan.mean, 1) >= _BLOCK_BYTES:
        packed = padded.new_empty(size) if whole else padded.new_zeros(size)
        for b, (start, length) in enumerate(plan.segments):
            n = min(length, width)
            first = width - length if left else 0
            skip = max(-first, 0)
            if n:
                packed.narrow(values_dim, start + skip, n).copy_(
                    padded[b].narrow(values_dim, max(first, 0), n)
                )
        return packed
    rows, place = plan.rows(width, left)
    source = _wide(padded.contiguous().flatten(0, 1))
    if whole:
        return source.index_select(0, place).view(padded.dtype).view(size)
    packed = padded.new_zeros(size)
    if rows is None:
        rows = torch.arange(total_length)
    _wide(packed).index_copy_(0, rows, source.index_select(0, place))
    return packed


def _fill_blocks(
    padded: Tensor,
    values: Tensor,
    plan: Plan,
    width: int,
    padding: float,
    values_dim: int,
    left: bool,
) -> None:
    """One copy and one fill a segment: every byte of the result is written once."""
    for b, (start, length) in enumerate(plan.segments):
        n = min(length, width)
        skip = length - n if left else 0
        target, d = padded[b], values_dim
        at, free = (width - n, 0) if left else (0, n)
        target.narrow(d, at, n).copy_(values.narrow(d, start + skip, n))
        if n < width:
            target.narrow(d, free, width - n).fill_(padding)


def _row_bytes(rows: Tensor) -> int:
    return rows[:1].numel() * rows.element_size()


def _wide(rows: Tensor) -> Tensor:
    """(n, *) contiguous rows seen as (n, words) of the widest element that divides a row."""
    flat = rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
    if flat.shape[1] == 0:
        return flat
    size = flat.shape[1] * flat.element_size()
    start = flat.storage_offset() * flat.element_size()
    for width, dtype in _WORDS:
        if size % width == 0 and start % width == 0 and width >= flat.element_size():
            return flat.view(dtype)
    return flat.view(torch.uint8)


class Plan:
    """What offsets and lengths say, read once: segments as numbers, index tensors by width."""

    def __init__(self, offsets: Tensor, lengths: Tensor | None) -> None:
        starts = offsets.tolist()
        sizes = (offsets.diff() if lengths is None else lengths).tolist()
        self.starts, self.segments = starts, list(zip(starts, sizes))
        self.longest = max(sizes, default=0)
        self.count = sum(sizes)
        self.mean = self.count // max(len(sizes), 1)
        self.last = starts[-1] if lengths is None else None
        self.end = max((s + n for s, n in self.segments), default=0)
        self.falls = min(sizes, default=0) < 0
        self.gapless = lengths is None
        self._rows: dict[tuple[int, bool], tuple[Tensor | None, Tensor]] = {}

    def check(self, op: str, rows: int) -> None:
        """Compares with the number of rows that are pointed into, before anything is written."""
        fault = self._fault(rows)
        if fault is not None:
            raise RuntimeError(
                f"{op}(): got {fault} for {rows} rows. Expected offsets that start at 0, never "
                f"fall and stay within the rows. Build them from lengths: F.pad(lengths.cumsum(0), (1, 0))."
            )

    def _fault(self, rows: int) -> str | None:
        if not self.gapless:
            if self.falls or self.end > rows or min(self.starts[:-1], default=0) < 0:
                outside = [(s, s + n) for s, n in self.segments if not 0 <= s <= s + n <= rows]
                return f"a segment of rows {outside[0]}"
            return None
        if self.starts[0] != 0:
            return f"offsets starting at {self.starts[0]}"
        if self.falls:
            return f"falling offsets {self.starts[:12]}"
        return f"offsets reaching row {self.last}" if self.starts[-1] > rows else None

    def rows(self, width: int, left: bool) -> tuple[Tensor | None, Tensor]:
        """For every row in use that the width reaches: its packed row (None: all, in order), its padded row."""
        key = (width, left)
        if key not in self._rows:
            self._rows[key] = self._make(width, left)
        return self._rows[key]

    def _make(self, width: int, left: bool) -> tuple[Tensor | None, Tensor]:
        starts, sizes = torch.tensor(self.segments, dtype=torch.int64).reshape(-1, 2).unbind(1)
        kept = sizes.clamp(max=width)
        before = kept.cumsum(0) - kept
        segment = torch.repeat_interleave(kept)
        t = torch.arange(segment.shape[0]) - before[segment]
        skipped = (sizes - kept) if left else torch.zeros_like(sizes)
        shift = (width - kept) if left else torch.zeros_like(sizes)
        place = segment * width + t + shift[segment]
        if self.gapless and self.longest <= width:
            return None, place
        return starts[segment] + skipped[segment] + t, place


# plans live as long as the offsets tensor they were read from, and as long as nobody writes to it
_PLANS = WeakIdKeyDictionary()


def _plan(offsets: Tensor, lengths: Tensor | None) -> Plan:
    versions = (_version(offsets), 0 if lengths is None else _version(lengths))
    plans = _PLANS.setdefault(offsets, {})
    found = plans.get(id(lengths))
    if found is None or found[0] != versions or found[1] is not lengths:
        found = plans[id(lengths)] = (versions, lengths, Plan(offsets, lengths))
    return found[2]


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
