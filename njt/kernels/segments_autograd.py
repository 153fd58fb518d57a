"""Gradients of `torch.ops.njt.segment_*`: compositions of the same operators, so that each can be differentiated again.

Importing it registers them.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from njt.kernels import derivatives
from njt.kernels.segments_index import segment_ids, segment_lengths
from njt.kernels.segments_ops import (
    INDEX_SCANS,
    LIBRARY,
    broadcast,
    mask_gaps,
    recurrence,
    reduce,
    scan,
    shift,
    ties,
)

__all__: list[str] = []


def _ids(ids: Tensor | None, offsets: Tensor, lengths: Tensor | None, total: Any) -> Tensor:
    return segment_ids(offsets, lengths, total) if ids is None else ids


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
    values, output = saved
    if name in ("amax", "amin"):
        return ties(grad, values, output.detach(), *place), *[None] * 6
    ids = _ids(ids, offsets, lengths, total)
    place = (offsets, lengths, ids, dim, max_seqlen)
    values = mask_gaps(values, offsets, lengths, ids, dim)
    if name == "logsumexp":
        weight = (values - broadcast(output, *place, total)).exp()
        return broadcast(grad, *place, total) * weight, *[None] * 6
    before = shift(scan(values, *place, "cumprod"), offsets, ids, dim, 1)
    after = shift(scan(values, *place, "cumprod", reverse=True), offsets, ids, dim, 1, True)
    return broadcast(grad, *place, total) * (before * after).conj(), *[None] * 6


def _ties_setup(ctx, inputs, output):
    _, values, best, offsets, lengths, ids, dim, max_seqlen = inputs
    _save_place(ctx, offsets, lengths, ids, dim, max_seqlen, values, best)


def _ties_backward(ctx, grad):
    place, (values, best) = _place(ctx)
    weight = ties(torch.ones_like(best), values, best, *place)
    return reduce(grad * weight, *place, "sum"), *[None] * 7


def _ties_jvp(ctx, tangent, *rest):
    """Linear in the gradient, which alone has a tangent that counts."""
    place, (values, best) = _place(ctx)
    if tangent is None:
        return torch.zeros_like(values)
    return ties(tangent, values, best, *place)


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
        return scan(grad, *place, "cumsum", reverse=back), *none
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
            before * recurrence(grad, after, *place, reverse=back), offsets, lengths, ids, dim
        ), *none
    lowest = torch.finfo(grad.dtype).min
    total = torch.zeros_like(grad)
    for sign in (
        1,
        -1,
    ):  # exp(x) * sum over later rows of g * exp(-out), in logarithms, each sign apart
        chosen = sign * grad > 0
        log_grad = torch.where(chosen, torch.where(chosen, sign * grad, 1).log(), lowest)
        later = scan(
            torch.where(chosen, log_grad - output, lowest), *place, "logcumsumexp", reverse=back
        )
        total = total + sign * (values + later).exp()
    return mask_gaps(total, offsets, lengths, ids, dim), *none


def _recurrence_setup(ctx, inputs, output):
    _, decay, offsets, lengths, ids, dim, max_seqlen, ctx.reverse = inputs
    _save_place(ctx, offsets, lengths, ids, dim, max_seqlen, decay, output)


def _recurrence_backward(ctx, grad):
    place, (decay, output) = _place(ctx)
    offsets, lengths, ids, dim, max_seqlen = place
    ids = _ids(ids, offsets, lengths, grad.shape[dim])
    place, back = (offsets, lengths, ids, dim, max_seqlen), not ctx.reverse
    to_values = recurrence(
        grad, shift(decay, offsets, ids, dim, 0, back).conj(), *place, reverse=back
    )
    to_decay = to_values * shift(output, offsets, ids, dim, 0, ctx.reverse).conj()
    return to_values, to_decay, *[None] * 6


def _sort_setup(ctx, inputs, output):
    ctx.mark_non_differentiable(output)


def _sort_backward(ctx, grad):
    return [None] * 7


def _scan_jvp(ctx, tangent, *rest):
    """logcumsumexp by its recurrence, whose backward splits signs; the others by their backward."""
    place, saved = _place(ctx)
    if ctx.name != "logcumsumexp":
        return _scan_pushed(ctx, tangent, *rest)
    offsets, lengths, ids, dim, max_seqlen = place
    ids = _ids(ids, offsets, lengths, tangent.shape[dim])
    place = (offsets, lengths, ids, dim, max_seqlen)
    values, output, tangent = (mask_gaps(t, offsets, lengths, ids, dim) for t in (*saved, tangent))
    before = shift(output, offsets, ids, dim, -torch.inf, ctx.reverse)
    share = (values - output).exp() * tangent
    return recurrence(share, (before - output).exp(), *place, reverse=ctx.reverse)


_scan_pushed = derivatives.pushed(_scan_backward)
register = partial(derivatives.register, LIBRARY)
register("segment_reduce", _reduce_backward, _reduce_setup, mapped=[0])
register("segment_ties", _ties_backward, _ties_setup, mapped=[0, 1, 2], jvp=_ties_jvp)
register("segment_broadcast", _broadcast_backward, _broadcast_setup, mapped=[0])
register("segment_softmax", _softmax_grad, _softmax_setup, mapped=[0])
register("segment_softmax_backward", _softmax_backward_grad, _softmax_backward_setup, mapped=[0, 1])
register("segment_scan", _scan_backward, _scan_setup, mapped=[0], jvp=_scan_jvp)
register("segment_recurrence", _recurrence_backward, _recurrence_setup, mapped=[0, 1])
register("segment_sort", _sort_backward, _sort_setup, mapped=[0])
