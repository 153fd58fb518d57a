"""The segment operators `torch.ops.njt.segment_*`: schema, fake and the choice of implementation.

values (*pre, total, *post), ragged dim at `dim`; per segment (B, *pre, *post). The caller has checked its arguments.
"""

from typing import Any

import torch
from torch import Tensor

from njt.kernels import segments_cpu, segments_cuda, segments_torch
from njt.kernels.segments_index import known_gapless, segment_ids

__all__ = [
    "INDEX_SCANS",
    "LIBRARY",
    "broadcast",
    "mask_gaps",
    "recurrence",
    "reduce",
    "row_mask",
    "scan",
    "shift",
    "softmax",
    "sort_indices",
    "ties",
]

LIBRARY = torch.library.Library("njt", "FRAGMENT")
_AT = "Tensor offsets, Tensor? lengths, Tensor? ids, int dim, SymInt? max_seqlen"
LIBRARY.define(f"segment_reduce(Tensor values, {_AT}, str name) -> Tensor")
LIBRARY.define(f"segment_broadcast(Tensor per_segment, {_AT}, SymInt total) -> Tensor")
LIBRARY.define(f"segment_ties(Tensor grad, Tensor values, Tensor output, {_AT}) -> Tensor")
LIBRARY.define(f"segment_softmax(Tensor values, {_AT}, bool log) -> Tensor")
LIBRARY.define(f"segment_softmax_backward(Tensor grad, Tensor output, {_AT}, bool log) -> Tensor")
LIBRARY.define(f"segment_scan(Tensor values, {_AT}, str name, bool reverse) -> Tensor")
LIBRARY.define(f"segment_recurrence(Tensor values, Tensor decay, {_AT}, bool reverse) -> Tensor")
LIBRARY.define(f"segment_sort(Tensor values, {_AT}, bool descending) -> Tensor")

INDEX_SCANS = ("cummax", "cummin")  # scans whose result is the index of a row in its segment


# ---- callers' doors -------------------------------------------------------------------------------
# `place` is offsets, lengths, ids, dim, max_seqlen, as in the schemas
def reduce(x: Tensor, *place_and_name: Any) -> Tensor:
    """(B, *pre, *post): the name is sum, mean, amax, amin, prod or logsumexp."""
    return torch.ops.njt.segment_reduce(x, *place_and_name)


def broadcast(per_segment: Tensor, *place_and_total: Any) -> Tensor:
    """(*pre, total, *post): each segment's entry at each of its rows, and 0 in gaps."""
    return torch.ops.njt.segment_broadcast(per_segment, *place_and_total)


def ties(grad: Tensor, x: Tensor, output: Tensor, *place: Any) -> Tensor:
    """(*pre, total, *post): each segment's gradient shared evenly by the rows that equal its output."""
    return torch.ops.njt.segment_ties(grad, x, output, *place)


def softmax(x: Tensor, *place_and_log: Any) -> Tensor:
    return torch.ops.njt.segment_softmax(x, *place_and_log)


def scan(x: Tensor, *place_and_name: Any, reverse: bool = False) -> Tensor:
    return torch.ops.njt.segment_scan(x, *place_and_name, reverse)


def recurrence(x: Tensor, decay: Tensor, *place: Any, reverse: bool = False) -> Tensor:
    return torch.ops.njt.segment_recurrence(x, decay, *place, reverse)


def sort_indices(x: Tensor, *place_and_descending: Any) -> Tensor:
    return torch.ops.njt.segment_sort(x, *place_and_descending)


# ---- pieces of the formulas -----------------------------------------------------------------------------------------
def _ids(ids: Tensor | None, offsets: Tensor, lengths: Tensor | None, total: Any) -> Tensor:
    return segment_ids(offsets, lengths, total) if ids is None else ids


def _along(per_row: Tensor, dim: int, ndim: int) -> Tensor:
    """A (total,) tensor shaped to broadcast against (*pre, total, *post)."""
    return per_row.view(*[1] * dim, -1, *[1] * (ndim - dim - 1))


def row_mask(x: Tensor, offsets: Tensor, ids: Tensor, dim: int) -> Tensor:
    """True on rows of segments, shaped to broadcast against `x`."""
    return _along(ids < offsets.shape[0] - 1, dim, x.dim())


def mask_gaps(
    x: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    ids: Tensor | None,
    dim: int,
    fill: float = 0,
) -> Tensor:
    """`x` with `fill` in gaps, so that no formula meets what lies there; `x` itself where there is no gap."""
    total = x.shape[dim]
    if known_gapless(offsets, lengths, total):
        return x
    return torch.where(row_mask(x, offsets, _ids(ids, offsets, lengths, total), dim), x, fill)


def shift(
    x: Tensor, offsets: Tensor, ids: Tensor, dim: int, fill: float, reverse: bool = False
) -> Tensor:
    """Each row's predecessor in its segment (successor with `reverse`), and `fill` where there is none."""
    total = x.shape[dim]
    if total == 0:
        return x
    edge = ids.narrow(0, 0, 1) * 0 - 1
    neighbours = torch.cat([ids[1:], edge]) if reverse else torch.cat([edge, ids[:-1]])
    return torch.where(
        _along(ids == neighbours, dim, x.dim()), x.roll(-1 if reverse else 1, dim), fill
    )


# ---- implementations ------------------------------------------------------------------------------------------------
def _reduce_cpu(values, offsets, lengths, ids, dim, max_seqlen, name):
    if name in ("sum", "mean") and values.is_floating_point():
        return segments_cpu.segment_sum(values, offsets, lengths, dim, name == "mean")
    return segments_torch.reduce(values, offsets, lengths, ids, dim, name, _reduce_cpu)


def _reduce_cuda(values, offsets, lengths, ids, dim, max_seqlen, name):
    own = segments_cuda.reduce(values, offsets, lengths, dim, max_seqlen, name)
    if own is not None:
        return own
    return segments_torch.reduce(values, offsets, lengths, ids, dim, name, _reduce_cuda)


def _broadcast(per_segment, offsets, lengths, ids, dim, max_seqlen, total):
    B = offsets.shape[0] - 1
    if B == 0:
        return per_segment.new_zeros(
            *per_segment.shape[1 : dim + 1], total, *per_segment.shape[dim + 1 :]
        )
    found = _ids(ids, offsets, lengths, total)
    if known_gapless(offsets, lengths, total):
        return per_segment.movedim(0, dim).index_select(dim, found)
    rows = per_segment.movedim(0, dim).index_select(dim, found.clamp(max=B - 1))
    return torch.where(_along(found < B, dim, rows.dim()), rows, rows.new_zeros(()))


def _broadcast_cuda(per_segment, offsets, lengths, ids, dim, max_seqlen, total):
    own = segments_cuda.broadcast(per_segment, offsets, lengths, dim, max_seqlen, total)
    if own is not None:
        return own
    return _broadcast(per_segment, offsets, lengths, ids, dim, max_seqlen, total)


def _softmax(values, offsets, lengths, ids, dim, max_seqlen, log):
    own = segments_cpu.softmax(values, offsets, lengths, ids, dim, log)
    if own is not None:
        return own
    return segments_torch.softmax(values, offsets, lengths, ids, dim, log, _reduce_cpu, _broadcast)


def _softmax_cuda(values, offsets, lengths, ids, dim, max_seqlen, log):
    own = segments_cuda.softmax(values, offsets, lengths, dim, max_seqlen, log)
    if own is not None:
        return own
    return segments_torch.softmax(
        values, offsets, lengths, ids, dim, log, _reduce_cuda, _broadcast_cuda
    )


def _softmax_backward(grad, output, offsets, lengths, ids, dim, max_seqlen, log):
    own = segments_cpu.softmax_backward(grad, output, offsets, lengths, ids, dim, log)
    if own is not None:
        return own
    return segments_torch.softmax_backward(
        grad, output, offsets, lengths, ids, dim, log, _reduce_cpu, _broadcast
    )


def _softmax_backward_cuda(grad, output, offsets, lengths, ids, dim, max_seqlen, log):
    own = segments_cuda.softmax_backward(grad, output, offsets, lengths, dim, max_seqlen, log)
    if own is not None:
        return own
    return segments_torch.softmax_backward(
        grad, output, offsets, lengths, ids, dim, log, _reduce_cuda, _broadcast_cuda
    )


def _ties(grad, values, output, offsets, lengths, ids, dim, max_seqlen):
    return segments_torch.ties(
        grad, values, output, offsets, lengths, ids, dim, _reduce_cpu, _broadcast
    )


def _ties_cuda(grad, values, output, offsets, lengths, ids, dim, max_seqlen):
    own = segments_cuda.ties(grad, values, output, offsets, lengths, dim, max_seqlen)
    if own is not None:
        return own
    return segments_torch.ties(
        grad, values, output, offsets, lengths, ids, dim, _reduce_cuda, _broadcast_cuda
    )


def _scan(values, offsets, lengths, ids, dim, max_seqlen, name, reverse):
    own = segments_cpu.scan(values, offsets, lengths, dim, name, reverse)
    if own is not None:
        return own
    return segments_torch.scan_bucketed(values, offsets, lengths, dim, name, reverse)


def _scan_cuda(values, offsets, lengths, ids, dim, max_seqlen, name, reverse):
    own = segments_cuda.scan(values, offsets, lengths, dim, max_seqlen, name, reverse)
    if own is not None:
        return own
    return segments_torch.scan(values, offsets, lengths, ids, dim, max_seqlen, name, reverse)


def _recurrence(values, decay, offsets, lengths, ids, dim, max_seqlen, reverse):
    return segments_torch.recurrence(values, decay, offsets, lengths, ids, dim, max_seqlen, reverse)


def _recurrence_cuda(values, decay, offsets, lengths, ids, dim, max_seqlen, reverse):
    own = segments_cuda.scan(
        values, offsets, lengths, dim, max_seqlen, "recurrence", reverse, decay
    )
    if own is not None:
        return own
    return segments_torch.recurrence(values, decay, offsets, lengths, ids, dim, max_seqlen, reverse)


def _sort(values, offsets, lengths, ids, dim, max_seqlen, descending):
    if values.device.type == "cpu":
        return segments_torch.sort_bucketed(values, offsets, lengths, dim, descending)
    return segments_torch.sort(values, offsets, lengths, ids, dim, descending)


for _name, _cpu, _cuda in (
    ("segment_reduce", _reduce_cpu, _reduce_cuda),
    ("segment_broadcast", _broadcast, _broadcast_cuda),
    ("segment_softmax", _softmax, _softmax_cuda),
    ("segment_softmax_backward", _softmax_backward, _softmax_backward_cuda),
    ("segment_ties", _ties, _ties_cuda),
    ("segment_scan", _scan, _scan_cuda),
    ("segment_recurrence", _recurrence, _recurrence_cuda),
    ("segment_sort", _sort, _sort),
):
    LIBRARY.impl(_name, _cpu, "CPU")
    LIBRARY.impl(_name, _cuda, "CUDA")


# ---- fake -----------------------------------------------------------------------------------------------------------
@torch.library.register_fake("njt::segment_reduce", lib=LIBRARY)
def _(values, offsets, lengths, ids, dim, max_seqlen, name):
    return values.new_empty(offsets.shape[0] - 1, *values.shape[:dim], *values.shape[dim + 1 :])


@torch.library.register_fake("njt::segment_broadcast", lib=LIBRARY)
def _(per_segment, offsets, lengths, ids, dim, max_seqlen, total):
    return per_segment.new_empty(
        *per_segment.shape[1 : dim + 1], total, *per_segment.shape[dim + 1 :]
    )


@torch.library.register_fake("njt::segment_ties", lib=LIBRARY)
def _(grad, values, output, offsets, lengths, ids, dim, max_seqlen):
    return values.new_empty(values.shape)


@torch.library.register_fake("njt::segment_softmax", lib=LIBRARY)
def _(values, offsets, lengths, ids, dim, max_seqlen, log):
    return values.new_empty(values.shape)


@torch.library.register_fake("njt::segment_softmax_backward", lib=LIBRARY)
def _(grad, output, offsets, lengths, ids, dim, max_seqlen, log):
    return output.new_empty(output.shape)


@torch.library.register_fake("njt::segment_scan", lib=LIBRARY)
def _(values, offsets, lengths, ids, dim, max_seqlen, name, reverse):
    return values.new_empty(
        values.shape, dtype=torch.int64 if name in INDEX_SCANS else values.dtype
    )


@torch.library.register_fake("njt::segment_recurrence", lib=LIBRARY)
def _(values, decay, offsets, lengths, ids, dim, max_seqlen, reverse):
    return values.new_empty(values.shape)


@torch.library.register_fake("njt::segment_sort", lib=LIBRARY)
def _(values, offsets, lengths, ids, dim, max_seqlen, descending):
    return values.new_empty(values.shape, dtype=torch.int64)
