"""Whether offsets and lengths make sense, and fit the rows they point into; on the host, read once.

May import errors only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from njt import errors

if TYPE_CHECKING:
    from njt.structure import Structure


def validate(structure: Structure, rows: int | None, op: str) -> None:
    """`Structure.validate` of one that is not traced."""
    structure._refresh()
    if structure._total is None:
        structure._total = _checked_total(structure, op)
    total = structure._total
    if rows is None:
        return
    if structure.lengths is None and total != rows:
        raise errors.bad_shape(
            op,
            f"offsets ending at {total} for {rows} rows of values",
            "offsets that end at the number of rows",
            "Cut the values to the rows in use, or pass lengths= to leave gaps.",
        )
    if structure.lengths is not None and total > rows:
        raise errors.bad_shape(
            op,
            f"offsets and lengths reaching row {total} of {rows}",
            "components inside the values",
            "Check that offsets[b] + lengths[b] stays within values.",
        )


def _checked_total(structure: Structure, op: str) -> int:
    """The row after the last one in use; checks order, start and bounds on the way."""
    starts, host = structure.host_offsets(), structure.host_lengths()
    fault = None
    if structure.lengths is None:
        if starts[0] != 0:
            fault = f"offsets starting at {starts[0]}"
        elif min(host, default=0) < 0:
            fault = f"falling offsets {errors._lengths_text(starts)}"
    elif min(starts[:-1], default=0) < 0 or min(host, default=0) < 0:
        fault = (
            f"negative offsets {errors._lengths_text(starts)} or lengths "
            f"{errors._lengths_text(host)}"
        )
    if fault is not None:
        structure._host = structure._min = structure._max = None
        raise errors.bad_shape(
            op,
            fault,
            "offsets that start at 0 and never fall",
            "Build them from lengths: F.pad(lengths.cumsum(0), (1, 0)).",
        )
    return max((s + n for s, n in zip(starts, host)), default=0)
