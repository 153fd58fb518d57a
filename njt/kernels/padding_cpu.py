"""Both copies on CPU: the table of conditions that picks a way, and the way there.

values (*pre, total_length, *post), offsets (B + 1,) <-> padded (B, *pre, width, *post). Arguments were checked, but
for the numbers in offsets and lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from njt.kernels import pages
from njt.kernels.padding_plan import Plan, plan_of
from njt.kernels.padding_ways import (
    Aten,
    AtenBack,
    Blocks,
    BlocksBack,
    Case,
    Chunks,
    FillAndScatter,
    Gather,
    Windows,
)

# an index of every word pays while it stays in the cache, and on few threads: by word, torch uses one
_INDEX_ENTRIES = 1 << 21
_ROW_WORDS = 8


# dtypes that torch's own copies know and keep bit for bit
_ATEN_DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.float16)

Line: TypeAlias = tuple[str, Callable[[Case], bool], Callable[[Plan, Case], Any]]
Table: TypeAlias = tuple[Line, ...]


def _handful(c: Case) -> bool:
    return c.plain and c.whole and not c.left and c.batch <= 4 and c.padded_bytes <= 1 << 20


def _by_word(c: Case) -> bool:
    return c.words == 1 or (c.words <= _ROW_WORDS and c.used * c.words <= _INDEX_ENTRIES)


def _few_segments(c: Case) -> bool:
    """At the first call: whether copies segment by segment (3 us each) come before an index is made."""
    return c.first and c.batch * c.planes * 3 < 30 + c.used / 250


# The first way whose condition holds. Measured on one thread, `benchmarks/conversion.py`.
PAD: Table = (
    ("aten", _handful, Aten),
    ("blocks", lambda c: c.segment_bytes >= 1 << 17 or _few_segments(c), Blocks),
    (
        "windows",
        lambda c: (
            c.word <= 4
            and c.words <= 8
            and c.planes == 1
            and c.total >= c.width > 0
            and c.padded_bytes <= min(8 << 20, 16 * c.used * c.row_bytes)
        ),
        Windows,
    ),
    (
        "words",
        lambda c: _by_word(c) and (c.threads <= 2 or c.used * c.words < 1 << 16),
        partial(FillAndScatter, by_word=True),
    ),
    ("rows", lambda c: True, partial(FillAndScatter, by_word=False)),
)
UNPAD: Table = (
    ("aten", _handful, AtenBack),
    ("blocks", lambda c: c.segment_bytes >= 1 << 20 or _few_segments(c), BlocksBack),
    (
        "chunks",
        lambda c: (
            c.row_bytes <= 4
            and c.whole
            and not c.first
            and c.used >= 32 * c.batch * c.planes
            and c.batch * c.planes * c.width >= 64
        ),
        Chunks,
    ),
    ("words", _by_word, partial(Gather, by_word=True)),
    ("rows", lambda c: True, partial(Gather, by_word=False)),
)


def packed_to_padded(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    width: int,
    padding: Any,
    values_dim: int,
    left: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Implementation of njt::packed_to_padded; `out` is contiguous and of the result's shape.

    Raises:
        RuntimeError: offsets or lengths that leave the rows.
    """
    plan, shape = plan_of(offsets, lengths), values.shape
    plan.check("packed_to_padded", shape[values_dim])
    source = values.contiguous()
    key = (shape, source.dtype, width, values_dim, left, _misfit(source, out), True)
    way = plan.recipes.get(key)
    if way is None:
        size = (plan.batch, *shape[:values_dim], width, *shape[values_dim + 1 :])
        if 0 in size or 0 in shape:
            padded = pages.empty(size, values.dtype) if out is None else out
            return padded.fill_(padding)
        way = _make(PAD, plan, key, size)
    return way(source, out, padding)  # type: ignore[no-any-return]


def padded_to_packed(
    padded: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    total_length: int,
    values_dim: int,
    left: bool,
    partial: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Implementation of njt::padded_to_packed; `out` is contiguous and of the result's shape.

    Raises:
        RuntimeError: `total_length` is not the last offset (`partial`: is less), or segments leave it.
    """
    plan = plan_of(offsets, lengths)
    if not partial:
        plan.check_total("padded_to_packed", total_length)
    plan.check("padded_to_packed", total_length)
    source, inner = padded.contiguous(), padded.shape[1:]
    key = (inner, source.dtype, total_length, values_dim, left, _misfit(source, out), False)
    way = plan.recipes.get(key)
    if way is None:
        size = (*inner[:values_dim], total_length, *inner[values_dim + 1 :])
        if 0 in size or 0 in inner:
            packed = pages.empty(size, padded.dtype) if out is None else out
            return packed.zero_()
        way = _make(UNPAD, plan, key, size)
    return way(source, out)  # type: ignore[no-any-return]


def _misfit(source: Tensor, out: Tensor | None) -> int:
    """How far addresses are from multiples of 16; fresh memory never is."""
    misfit = source.data_ptr() | int(source.storage_offset()) * source.element_size()
    if out is not None:
        misfit |= out.data_ptr() | int(out.storage_offset()) * out.element_size()
    return misfit & 15


def _make(table: Table, plan: Plan, key: Any, size: tuple[int, ...]) -> Any:
    """What moves rows in calls with this key, kept from the second such call on."""
    shape, dtype, rows, d, left, misfit, padding = key
    total, width = (shape[d], rows) if padding else (rows, shape[d])
    planes = math.prod(shape[:d])
    row_bytes = math.prod(shape[d + 1 :]) * dtype.itemsize
    together = row_bytes | misfit | 16
    case = Case(
        size=size,
        plain=d == 0 and len(shape) == 2 and dtype in _ATEN_DTYPES,
        batch=plan.batch,
        used=plan.count * planes,
        planes=planes,
        total=total,
        width=width,
        row_bytes=row_bytes,
        word=together & -together,
        left=left,
        whole=plan.gapless and plan.longest <= width and plan.last == total,
        first=key not in plan.recipes,
        threads=torch.get_num_threads(),
    )
    way = choose(table, case)[2](plan, case)
    plan.keep(key, None if case.first else way)
    return way


def choose(table: Table, case: Case) -> Line:
    """The first line of a table whose condition holds."""
    return next(line for line in table if line[1](case))
