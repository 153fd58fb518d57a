"""Whether offsets and lengths make sense, and fit the rows they point into; on the host, read once.

May import _compat and errors only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from njt import _compat, errors

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
    expected = "offsets that start at 0 and never fall"
    advice = "Build them from lengths: F.pad(lengths.cumsum(0), (1, 0))."
    came = f"offsets {errors._lengths_text(starts)} with lengths {errors._lengths_text(host)}"
    ends = [s + n for s, n in zip(starts, host)]
    fault = None
    if structure.lengths is None:
        if starts[0] != 0:
            fault = f"offsets starting at {starts[0]}"
        elif min(host, default=0) < 0:
            fault = f"falling offsets {errors._lengths_text(starts)}"
    elif min(starts[:-1], default=0) < 0 or min(host, default=0) < 0:
        fault, expected = f"negative {came}", "offsets and lengths of 0 or more"
        advice = "Check how they were counted."
    elif any(end > start for end, start in zip(ends, starts[1:-1])):
        fault, expected = came, "components one behind the other, none of them beginning in another"
        advice = "Cut the lengths: torch.minimum(lengths, offsets.diff())."
    if fault is not None:
        structure._host = structure._min = structure._max = None
        raise errors.bad_shape(op, fault, expected, advice)
    return max(ends, default=0)


def check_bounds(structure: Structure, min_seqlen: Any, max_seqlen: Any, op: str) -> None:
    """Compares bounds that were given with the lengths, which are on the host.

    Raises:
        ValueError: a bound that is none.
    """
    known = structure.known_host_lengths
    lengths = _compat.unseen(structure.seqlens.tolist) if known is None else known
    longest, shortest = max(lengths, default=0), min(lengths, default=0)
    if max_seqlen is not None and max_seqlen < longest:
        raise errors.bad_value(
            op,
            f"max_seqlen={max_seqlen} with a component of length {longest}",
            f"at least {longest}",
            "Leave it out, or pass int(lengths.max()).",
        )
    if min_seqlen is not None and not 0 <= min_seqlen <= shortest:
        raise errors.bad_value(
            op,
            f"min_seqlen={min_seqlen} with a component of length {shortest}",
            f"a number in 0..{shortest}",
            "Leave it out, or pass int(lengths.min()).",
        )
