"""Segment kernels as plain torch calls: any device, any dtype, no value read back (the bucketed ones excepted).

Where a device has no faster kernel of its own, these run. Below autograd, on real tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from njt.kernels.segments_bucketed import bucketed
from njt.kernels.segments_index import known_gapless, positions, segment_ids, segment_lengths

__all__ = [
    "lowest",
    "recurrence",
    "reduce",
    "scan",
    "scan_bucketed",
    "softmax",
    "softmax_backward",
    "sort",
    "sort_bucketed",
    "ties",
]


def lowest(dtype: torch.dtype) -> float | int | bool:
    """What amax of nothing is."""
    if dtype == torch.bool:
        return False
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> float | int | bool:
    """What amin of nothing is."""
    if dtype == torch.bool:
        return True
    return torch.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add up in."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def _ids(ids: Tensor | None, offsets: Tensor, lengths: Tensor | None, total: int) -> Tensor:
    return segment_ids(offsets, lengths, total) if ids is None else ids


def _along(per_row: Tensor, ndim: int) -> Tensor:
    return per_row.view(-1, *[1] * (ndim - 1))


def reduce(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    ids: Tensor | None,
    dim: int,
    name: str,
    own: Callable,
) -> Tensor:
    """(B, *pre, *post). `own` is the device's reduction, for those that are made of others."""
    B, T = offsets.shape[0] - 1, values.shape[dim]
    dtype = values.dtype
    if name == "mean":
        sizes = segment_lengths(offsets, lengths).view(-1, *[1] * (values.dim() - 1))
        return (own(values.to(wide(dtype)), offsets, lengths, ids, dim, None, "sum") / sizes).to(
            dtype
        )
    ids = _ids(ids, offsets, lengths, T)
    if name == "logsumexp":
        x = values.to(wide(dtype))
        top = own(x, offsets, lengths, ids, dim, None, "amax")
        top = torch.where(top.isfinite(), top, 0)
        rows = x.movedim(dim, 0)
        exps = (rows - _take(top, ids)).exp()
        return (own(exps, offsets, lengths, ids, 0, None, "sum").log() + top).to(dtype)
    # one slot more than segments, where gaps go
    rows = values.movedim(dim, 0)
    if name == "sum":
        out = rows.new_zeros(B + 1, *rows.shape[1:], dtype=wide(dtype))
        return out.index_add_(0, ids, rows.to(out.dtype))[:B].to(dtype)
    if dtype == torch.bool:
        return reduce(values.to(torch.uint8), offsets, lengths, ids, dim, name, own).to(torch.bool)
    if dtype.is_complex:  # only prod comes here; no scatter for complex
        block = bucketed(
            lambda x, _: x.prod(1), values, offsets, lengths=lengths, dim=dim, padding=1
        )
        assert isinstance(block, Tensor)
        return block
    start = {"amax": lowest, "amin": highest, "prod": lambda _: 1}[name](dtype)
    out = rows.new_full(
        (B + 1, *rows.shape[1:]), start, dtype=wide(dtype) if name == "prod" else dtype
    )
    index = _along(ids, rows.dim()).expand_as(rows)
    return out.scatter_reduce_(0, index, rows.to(out.dtype), name)[:B].to(dtype)


def _take(per_segment: Tensor, ids: Tensor) -> Tensor:
    """(total, *rest): any segment's entry in gaps; what comes of it is not used."""
    if per_segment.shape[0] == 0:
        return per_segment.new_zeros(len(ids), *per_segment.shape[1:])
    return per_segment.index_select(0, ids.clamp(max=per_segment.shape[0] - 1))


def softmax(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    ids: Tensor | None,
    dim: int,
    log: bool,
    own: Callable,
    spread: Callable,
) -> Tensor:
    T = values.shape[dim]
    ids = _ids(ids, offsets, lengths, T)
    x = values.to(wide(values.dtype))
    x = x - spread(
        own(x, offsets, lengths, ids, dim, None, "amax"), offsets, lengths, ids, dim, None, T
    )
    exps = x.exp()
    total = own(exps, offsets, lengths, ids, dim, None, "sum")
    if log:
        out = x.sub_(spread(total.log_(), offsets, lengths, ids, dim, None, T))
    else:
        out = exps.div_(spread(total, offsets, lengths, ids, dim, None, T))
    return _zero_gaps(out, offsets, lengths, ids, dim).to(values.dtype)


def _zero_gaps(x: Tensor, offsets: Tensor, lengths: Tensor | None, ids: Tensor, dim: int) -> Tensor:
    if known_gapless(offsets, lengths, x.shape[dim]):
        return x
    return torch.where(_along(ids < offsets.shape[0] - 1, x.dim() - dim), x, x.new_zeros(()))


def softmax_backward(
    grad: Tensor,
    output: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    ids: Tensor | None,
    dim: int,
    log: bool,
    own: Callable,
    spread: Callable,
) -> Tensor:
    T = grad.shape[dim]
    ids = _ids(ids, offsets, lengths, T)
    g, y = grad.to(wide(grad.dtype)), output.to(wide(output.dtype))
    inner = g if log else g * y
    total = spread(
        own(inner, offsets, lengths, ids, dim, None, "sum"), offsets, lengths, ids, dim, None, T
    )
    out = g - y.exp() * total if log else y * (g - total)
    return _zero_gaps(out, offsets, lengths, ids, dim).to(output.dtype)


def ties(
    grad: Tensor,
    values: Tensor,
    output: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    ids: Tensor | None,
    dim: int,
    own: Callable,
    spread: Callable,
) -> Tensor:
    """(*pre, total, *post): each segment's gradient shared evenly by the rows that equal its output."""
    T = values.shape[dim]
    ids = _ids(ids, offsets, lengths, T)
    equal = values == spread(output, offsets, lengths, ids, dim, None, T)
    equal = _zero_gaps(equal, offsets, lengths, ids, dim)
    count = own(equal.to(torch.float32), offsets, lengths, ids, dim, None, "sum")
    share = (grad / count).to(values.dtype)
    return spread(share, offsets, lengths, ids, dim, None, T).mul_(equal)


_BLOCK_SCANS: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "cummax": lambda x: x.cummax(1).indices,
    "cummin": lambda x: x.cummin(1).indices,
}


def scan_bucketed(
    values: Tensor, offsets: Tensor, lengths: Tensor | None, dim: int, name: str, reverse: bool
) -> Tensor:
    """Scans on padded blocks: what follows a segment in its block cannot reach back into it."""
    dense = _BLOCK_SCANS[name]
    x = values.to(wide(values.dtype)) if name in ("cumsum", "cumprod", "logcumsumexp") else values

    def forward(block: Tensor, mask: Tensor) -> Tensor:
        return dense(block)

    def backward(block: Tensor, mask: Tensor) -> Tensor:
        # reversed inside each segment, and back again: row i of n is row n - 1 - i
        n = mask.sum(1, keepdim=True)
        step = torch.arange(mask.shape[1], device=mask.device)
        index = (
            torch.where(mask, n - 1 - step, step)
            .view(*mask.shape, *[1] * (block.dim() - 2))
            .expand_as(block)
        )
        done = dense(block.gather(1, index)).gather(1, index)
        if name not in ("cummax", "cummin"):
            return done
        return n.view(-1, *[1] * (done.dim() - 1)) - 1 - done  # an index counts from the front

    out = bucketed(
        backward if reverse else forward, x, offsets, lengths=lengths, dim=dim, keeps_rows=True
    )
    assert isinstance(out, Tensor)
    return out if name in ("cummax", "cummin") else out.to(values.dtype)


def _doubling(
    state: tuple[Tensor, ...], combine: Callable, place: Tensor, longest: int, reverse: bool
) -> tuple[Tensor, ...]:
    """Inclusive scan over dim 0 by doubled strides: log2(longest) steps, sums as a tree."""
    step = 1
    while step < min(longest, place.shape[0]):
        n = place.shape[0] - step
        early = slice(0, n) if not reverse else slice(step, None)
        late = slice(step, None) if not reverse else slice(0, n)
        joined = combine(tuple(s[early] for s in state), tuple(s[late] for s in state))
        reach = _along(place[late] >= step, state[0].dim())
        moved = []
        for s, j in zip(state, joined, strict=True):
            s = s.clone()
            s[late] = torch.where(reach, j, s[late])
            moved.append(s)
        state = tuple(moved)
        step *= 2
    return state


def _places(offsets: Tensor, lengths: Tensor | None, ids: Tensor, reverse: bool) -> Tensor:
    """Rows of the same segment before each row, or after it; 0 in gaps."""
    place = positions(offsets, ids)
    B = offsets.shape[0] - 1
    if not reverse or B == 0:
        return place
    sizes = segment_lengths(offsets, lengths).long()[ids.clamp(max=B - 1)]
    return torch.where(ids < B, sizes - 1 - place, 0)


def _pick_later(prefer: Callable[[Tensor, Tensor], Tensor]) -> Callable:
    def combine(early: tuple[Tensor, ...], late: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x, i), (y, j) = early, late
        # a tie goes to the later row and NaN stays, as in the dense operators
        takes_late = (
            (prefer(y, x) & ~x.isnan()) | y.isnan() if x.is_floating_point() else prefer(y, x)
        )
        return torch.where(takes_late, y, x), torch.where(takes_late, j, i)

    return combine


_COMBINE: dict[str, Callable] = {
    "cumsum": lambda a, b: (a[0] + b[0],),
    "cumprod": lambda a, b: (a[0] * b[0],),
    "logcumsumexp": lambda a, b: (torch.logaddexp(a[0], b[0]),),
    "cummax": _pick_later(torch.ge),
    "cummin": _pick_later(torch.le),
}


def scan(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    ids: Tensor | None,
    dim: int,
    max_seqlen: Any,
    name: str,
    reverse: bool,
) -> Tensor:
    T = values.shape[dim]
    ids = _ids(ids, offsets, lengths, T)
    place = _places(offsets, lengths, ids, reverse)
    rows = values.movedim(dim, 0)
    state: tuple[Tensor, ...] = (rows.to(wide(values.dtype)),)
    if name in ("cummax", "cummin"):
        state = (rows, _along(positions(offsets, ids), rows.dim()).expand_as(rows))
    out = _doubling(state, _COMBINE[name], place, T if max_seqlen is None else max_seqlen, reverse)[
        -1
    ]
    out = _zero_gaps(out, offsets, lengths, ids, 0).movedim(0, dim)
    return out.contiguous() if name in ("cummax", "cummin") else out.to(values.dtype).contiguous()


def recurrence(
    values: Tensor,
    decay: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    ids: Tensor | None,
    dim: int,
    max_seqlen: Any,
    reverse: bool,
) -> Tensor:
    """y[t] = x[t] + decay[t] * y[t - 1] inside each segment, or with y[t + 1] in reverse."""
    T = values.shape[dim]
    ids = _ids(ids, offsets, lengths, T)
    place = _places(offsets, lengths, ids, reverse)
    state = (
        decay.to(wide(values.dtype)).movedim(dim, 0),
        values.to(wide(values.dtype)).movedim(dim, 0),
    )
    out = _doubling(
        state,
        lambda early, late: (early[0] * late[0], late[0] * early[1] + late[1]),
        place,
        T if max_seqlen is None else max_seqlen,
        reverse,
    )[1]
    return _zero_gaps(out, offsets, lengths, ids, 0).movedim(0, dim).to(values.dtype).contiguous()


def sort_bucketed(
    values: Tensor, offsets: Tensor, lengths: Tensor | None, dim: int, descending: bool
) -> Tensor:
    """Indices in the segment, stable. Padding sorts last, and after its equals, because it comes later."""
    dtype = values.dtype
    last = torch.nan if dtype.is_floating_point else highest(dtype)
    padding = lowest(dtype) if descending else last
    out = bucketed(
        lambda block, _: block.sort(dim=1, descending=descending, stable=True).indices,
        values,
        offsets,
        lengths=lengths,
        dim=dim,
        padding=padding,
        keeps_rows=True,
    )
    assert isinstance(out, Tensor)
    return out


def sort(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    ids: Tensor | None,
    dim: int,
    descending: bool,
) -> Tensor:
    """Indices in the segment, by two stable sorts of all rows: by value, then by segment."""
    rows = values.movedim(dim, 0)
    ids = _ids(ids, offsets, lengths, rows.shape[0])
    by_value = rows.sort(dim=0, descending=descending, stable=True).indices
    by_segment = ids[by_value].sort(dim=0, stable=True).indices
    source = by_value.gather(0, by_segment)
    place = ids.sort(stable=True).indices  # the row that the i-th row by segment goes to
    out = torch.zeros_like(source).index_copy_(0, place, positions(offsets, ids)[source])
    return out.movedim(0, dim).contiguous()
