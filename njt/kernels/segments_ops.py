"""The segment operators `torch.ops.njt.segment_*`: schema, fake, autograd and the choice of implementation.

values (*pre, total, *post), ragged dim at `dim`; per segment (B, *pre, *post). Backward formulas are compositions of
the same operators, so that each can be differentiated again. The caller has checked its arguments.
"""

from typing import Any

import torch
from torch import Tensor

from njt.kernels import segments_cpu, segments_torch
from njt.kernels.segments_index import known_gapless, positions, segment_ids, segment_lengths

__all__ = [
    "broadcast",
    "mask_gaps",
    "recurrence",
    "reduce",
    "row_mask",
    "scan",
    "shift",
    "softmax",
    "sort_indices",
]

_njt = torch.library.Library("njt", "FRAGMENT")
_AT = "Tensor offsets, Tensor? lengths, Tensor? ids, int dim, SymInt? max_seqlen"
_njt.define(f"segment_reduce(Tensor values, {_AT}, str name) -> Tensor")
_njt.define(f"segment_broadcast(Tensor per_segment, {_AT}, SymInt total) -> Tensor")
_njt.define(f"segment_softmax(Tensor values, {_AT}, bool log) -> Tensor")
_njt.define(f"segment_softmax_backward(Tensor grad, Tensor output, {_AT}, bool log) -> Tensor")
_njt.define(f"segment_scan(Tensor values, {_AT}, str name, bool reverse) -> Tensor")
_njt.define(f"segment_recurrence(Tensor values, Tensor decay, {_AT}, bool reverse) -> Tensor")
_njt.define(f"segment_sort(Tensor values, {_AT}, bool descending) -> Tensor")

INDEX_SCANS = ("cummax", "cummin")  # scans whose result is the index of a row in its segment


# ---- callers' doors -------------------------------------------------------------------------------------------------
def reduce(
    x: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    ids: Tensor | None,
    dim: int,
    max_seqlen: Any,
    name: str,
) -> Tensor:
    """(B, *pre, *post): `name` is sum, mean, amax, amin, prod or logsumexp."""
    return torch.ops.njt.segment_reduce(x, offsets, lengths, ids, dim, max_seqlen, name)


def broadcast(
    per_segment: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    ids: Tensor | None,
    dim: int,
    max_seqlen: Any,
    total: Any,
) -> Tensor:
    """(*pre, total, *post): each segment's entry at each of its rows, and 0 in gaps."""
    return torch.ops.njt.segment_broadcast(
        per_segment, offsets, lengths, ids, dim, max_seqlen, total
    )


def softmax(
    x: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    ids: Tensor | None,
    dim: int,
    max_seqlen: Any,
    log: bool,
) -> Tensor:
    return torch.ops.njt.segment_softmax(x, offsets, lengths, ids, dim, max_seqlen, log)


def scan(
    x: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    ids: Tensor | None,
    dim: int,
    max_seqlen: Any,
    name: str,
    reverse: bool = False,
) -> Tensor:
    return torch.ops.njt.segment_scan(x, offsets, lengths, ids, dim, max_seqlen, name, reverse)


def recurrence(
    x: Tensor,
    decay: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    ids: Tensor | None,
    dim: int,
    max_seqlen: Any,
    reverse: bool = False,
) -> Tensor:
    return torch.ops.njt.segment_recurrence(
        x, decay, offsets, lengths, ids, dim, max_seqlen, reverse
    )


def sort_indices(
    x: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    ids: Tensor | None,
    dim: int,
    max_seqlen: Any,
    descending: bool,
) -> Tensor:
    return torch.ops.njt.segment_sort(x, offsets, lengths, ids, dim, max_seqlen, descending)


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


def _softmax(values, offsets, lengths, ids, dim, max_seqlen, log):
    reduce_ = _reduce_cpu if values.device.type == "cpu" else _reduce_cuda
    return segments_torch.softmax(values, offsets, lengths, ids, dim, log, reduce_, _broadcast)


def _softmax_backward(grad, output, offsets, lengths, ids, dim, max_seqlen, log):
    reduce_ = _reduce_cpu if grad.device.type == "cpu" else _reduce_cuda
    return segments_torch.softmax_backward(
        grad, output, offsets, lengths, ids, dim, log, reduce_, _broadcast
    )


def _scan(values, offsets, lengths, ids, dim, max_seqlen, name, reverse):
    if values.device.type == "cpu":
        return segments_torch.scan_bucketed(values, offsets, lengths, dim, name, reverse)
    return segments_torch.scan(values, offsets, lengths, ids, dim, max_seqlen, name, reverse)


def _recurrence(values, decay, offsets, lengths, ids, dim, max_seqlen, reverse):
    return segments_torch.recurrence(values, decay, offsets, lengths, ids, dim, max_seqlen, reverse)


def _sort(values, offsets, lengths, ids, dim, max_seqlen, descending):
    if values.device.type == "cpu":
        return segments_torch.sort_bucketed(values, offsets, lengths, dim, descending)
    return segments_torch.sort(values, offsets, lengths, ids, dim, descending)


for _name, _cpu, _cuda in (
    ("segment_reduce", _reduce_cpu, _reduce_cuda),
    ("segment_broadcast", _broadcast, _broadcast),
    ("segment_softmax", _softmax, _softmax),
    ("segment_softmax_backward", _softmax_backward, _softmax_backward),
    ("segment_scan", _scan, _scan),
    ("segment_recurrence", _recurrence, _recurrence),
    ("segment_sort", _sort, _sort),
):
    _njt.impl(_name, _cpu, "CPU")
    _njt.impl(_name, _cuda, "CUDA")


# ---- fake -----------------------------------------------------------------------------------------------------------
@torch.library.register_fake("njt::segment_reduce", lib=_njt)
def _(values, offsets, lengths, ids, dim, max_seqlen, name):
    return values.new_empty(offsets.shape[0] - 1, *values.shape[:dim], *values.shape[dim + 1 :])


@torch.library.register_fake("njt::segment_broadcast", lib=_njt)
def _(per_segment, offsets, lengths, ids, dim, max_seqlen, total):
    return per_segment.new_empty(
        *per_segment.shape[1 : dim + 1], total, *per_segment.shape[dim + 1 :]
    )


@torch.library.register_fake("njt::segment_softmax", lib=_njt)
def _(values, offsets, lengths, ids, dim, max_seqlen, log):
    return values.new_empty(values.shape)


@torch.library.register_fake("njt::segment_softmax_backward", lib=_njt)
def _(grad, output, offsets, lengths, ids, dim, max_seqlen, log):
    return output.new_empty(output.shape)


@torch.library.register_fake("njt::segment_scan", lib=_njt)
def _(values, offsets, lengths, ids, dim, max_seqlen, name, reverse):
    return values.new_empty(
        values.shape, dtype=torch.int64 if name in INDEX_SCANS else values.dtype
    )


@torch.library.register_fake("njt::segment_recurrence", lib=_njt)
def _(values, decay, offsets, lengths, ids, dim, max_seqlen, reverse):
    return values.new_empty(values.shape)


@torch.library.register_fake("njt::segment_sort", lib=_njt)
def _(values, offsets, lengths, ids, dim, max_seqlen, descending):
    return values.new_empty(values.shape, dtype=torch.int64)


# ---- autograd -------------------------------------------------------------------------------------------------------
def _save_place(ctx, offsets, lengths, ids, dim, max_seqlen, *more):
    ctx.save_for_backward(offsets, lengths, ids, *more)
    ctx.dim, ctx.max_seqlen = dim, max_seqlen


def _place(ctx):
    """offsets, lengths, ids, dim, max_seqlen of the forward, in the order of every operator; then the saved rest."""
    offsets, lengths, ids, *more = ctx.saved_tensors
    return (offsets, lengths, ids, ctx.dim, ctx.max_seqlen), more


def _reduce_setup(ctx, inputs, output):
    values, offsets, lengths, ids, dim, max_seqlen, name = inputs
    ctx.name, ctx.total = name, values.shape[dim]
    _save_place(
        ctx,
        offsets,
        lengths,
        ids,
        dim,
        max_seqlen,
        *(() if name in ("sum", "mean") else (values, output)),
    )


def _reduce_backward(ctx, grad):
    place, saved = _place(ctx)
    offsets, lengths, ids, dim, max_seqlen = place
    name, total = ctx.name, ctx.total
    if name == "sum":
        return broadcast(grad, *place, total), *[None] * 6
    if name == "mean":
        # an empty segment has no row to give a gradient to, and 0 / 0 would show in the second one
        sizes = segment_lengths(offsets, lengths).clamp(min=1).view(-1, *[1] * (grad.dim() - 1))
        return broadcast(grad / sizes, *place, total), *[None] * 6
    ids = _ids(ids, offsets, lengths, total)
    place = (offsets, lengths, ids, dim, max_seqlen)
    values, output = saved
    values = mask_gaps(values, offsets, lengths, ids, dim)
    if name in ("amax", "amin"):
        ties = values == broadcast(output.detach(), *place, total)
        ties = ties & row_mask(ties, offsets, ids, dim)
        count = reduce(ties.to(torch.float32), *place, "sum")
        return ties * broadcast(grad / count.to(grad.dtype), *place, total), *[None] * 6
    if name == "logsumexp":
        weight = (values - broadcast(output, *place, total)).exp()
        return broadcast(grad, *place, total) * weight, *[None] * 6
    before = shift(scan(values, *place, "cumprod"), offsets, ids, dim, 1)
    after = shift(scan(values, *place, "cumprod", True), offsets, ids, dim, 1, True)
    return broadcast(grad, *place, total) * (before * after).conj(), *[None] * 6


def _broadcast_setup(ctx, inputs, output):
    _, offsets, lengths, ids, dim, max_seqlen, _ = inputs
    _save_place(ctx, offsets, lengths, ids, dim, max_seqlen)


def _broadcast_backward(ctx, grad):
    place, _ = _place(ctx)
    return reduce(grad, *place, "sum"), *[None] * 6


def _softmax_setup(ctx, inputs, output):
    _, offsets, lengths, ids, dim, max_seqlen, ctx.log = inputs
    _save_place(ctx, offsets, lengths, ids, dim, max_seqlen, output)


def _softmax_grad(ctx, grad):
    place, (output,) = _place(ctx)
    grad = torch.ops.njt.segment_softmax_backward(grad, output, *place, ctx.log)
    return grad, *[None] * 6


def _softmax_backward_setup(ctx, inputs, output):
    grad, y, offsets, lengths, ids, dim, max_seqlen, ctx.log = inputs
    _save_place(ctx, offsets, lengths, ids, dim, max_seqlen, grad, y)


def _softmax_backward_grad(ctx, cotangent):
    place, (grad, y) = _place(ctx)
    offsets, lengths, ids, dim, max_seqlen = place
    total = y.shape[dim]
    ids = _ids(ids, offsets, lengths, total)
    place = (offsets, lengths, ids, dim, max_seqlen)
    grad, y, cotangent = (mask_gaps(t, offsets, lengths, ids, dim) for t in (grad, y, cotangent))

    def spread_sum(t: Tensor) -> Tensor:
        return broadcast(reduce(t, *place, "sum"), *place, total)

    if ctx.log:  # g - exp(y) * sum(g)
        p = mask_gaps(y.exp(), offsets, lengths, ids, dim)
        to_grad = cotangent - spread_sum(cotangent * p)
        to_y = -cotangent * p * spread_sum(grad)
    else:  # y * (g - sum(g * y))
        inner = spread_sum(grad * y)
        weight = spread_sum(cotangent * y)
        to_grad = y * (cotangent - weight)
        to_y = cotangent * (grad - inner) - grad * weight
    return mask_gaps(to_grad, offsets, lengths, ids, dim), to_y, *[None] * 6


def _scan_setup(ctx, inputs, output):
    values, offsets, lengths, ids, dim, max_seqlen, ctx.name, ctx.reverse = inputs
    _save_place(
        ctx,
        offsets,
        lengths,
        ids,
        dim,
        max_seqlen,
        *(() if ctx.name == "cumsum" else (values, output)),
    )
    if ctx.name in INDEX_SCANS:
        ctx.mark_non_differentiable(output)


def _scan_backward(ctx, grad):
    place, saved = _place(ctx)
    offsets, lengths, ids, dim, max_seqlen = place
    back, none = not ctx.reverse, [None] * 7
    if ctx.name in INDEX_SCANS:
        return None, *none
    if ctx.name == "cumsum":
        return scan(grad, *place, "cumsum", back), *none
    values, output = saved
    ids = _ids(ids, offsets, lengths, values.shape[dim])
    place = (offsets, lengths, ids, dim, max_seqlen)
    values, output, grad = (
        mask_gaps(t, offsets, lengths, ids, dim) for t in (values, output, grad)
    )
    if (
        ctx.name == "cumprod"
    ):  # d out[i] / d x[k] = (product before k) * (product of k + 1 .. i): no division
        before = shift(output, offsets, ids, dim, 1, ctx.reverse).conj()
        after = shift(values, offsets, ids, dim, 0, back).conj()
        return mask_gaps(
            before * recurrence(grad, after, *place, back), offsets, lengths, ids, dim
        ), *none
    lowest = torch.finfo(grad.dtype).min
    total = torch.zeros_like(grad)
    for sign in (
        1,
        -1,
    ):  # exp(x) * sum over later rows of g * exp(-out), in logarithms, each sign apart
        chosen = sign * grad > 0
        log_grad = torch.where(chosen, torch.where(chosen, sign * grad, 1).log(), lowest)
        later = scan(torch.where(chosen, log_grad - output, lowest), *place, "logcumsumexp", back)
        total = total + sign * (values + later).exp()
    return mask_gaps(total, offsets, lengths, ids, dim), *none


def _recurrence_setup(ctx, inputs, output):
    values, decay, offsets, lengths, ids, dim, max_seqlen, ctx.reverse = inputs
    _save_place(ctx, offsets, lengths, ids, dim, max_seqlen, decay, output)


def _recurrence_backward(ctx, grad):
    place, (decay, output) = _place(ctx)
    offsets, lengths, ids, dim, max_seqlen = place
    ids = _ids(ids, offsets, lengths, grad.shape[dim])
    place, back = (offsets, lengths, ids, dim, max_seqlen), not ctx.reverse
    to_values = recurrence(grad, shift(decay, offsets, ids, dim, 0, back).conj(), *place, back)
    to_decay = to_values * shift(output, offsets, ids, dim, 0, ctx.reverse).conj()
    return to_values, to_decay, *[None] * 6


def _sort_setup(ctx, inputs, output):
    ctx.mark_non_differentiable(output)


def _sort_backward(ctx, grad):
    return [None] * 7


for _name, _backward, _setup in (
    ("segment_reduce", _reduce_backward, _reduce_setup),
    ("segment_broadcast", _broadcast_backward, _broadcast_setup),
    ("segment_softmax", _softmax_grad, _softmax_setup),
    ("segment_softmax_backward", _softmax_backward_grad, _softmax_backward_setup),
    ("segment_scan", _scan_backward, _scan_setup),
    ("segment_recurrence", _recurrence_backward, _recurrence_setup),
    ("segment_sort", _sort_backward, _sort_setup),
):
    torch.library.register_autograd(f"njt::{_name}", _backward, setup_context=_setup, lib=_njt)
