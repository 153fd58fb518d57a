"""Operators over the ragged dim of packed rows: the functions that rules name.

values (*pre, total, *post) with the ragged dim at `dim`; offsets (B + 1,) int32 or int64; segment b is rows
[offsets[b], offsets[b + 1]) or, with `lengths`, [offsets[b], offsets[b] + lengths[b]). A result has one entry a
segment, (B, *pre, *post), or one a row, like values. Rows in gaps are never read and are 0 in results.

Every function takes `(values, offsets, <its own arguments>, **where)`, see `Where`. All have the gradients of the dense
operator, can be differentiated twice, and trace with any sizes.
Knows neither Structure nor NestedTensor. Importing it registers the operators `torch.ops.njt.segment_*`.
"""

from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor

from njt.kernels import segments_autograd, segments_cpu  # noqa: F401 registers the gradients
from njt.kernels import segments_ops as ops
from njt.kernels.segments_bucketed import bucketed
from njt.kernels.segments_index import is_eager, positions, row_index, segment_ids, segment_lengths
from njt.kernels.segments_order import (
    argsort,
    flip,
    kthvalue,
    median,
    mode,
    nanmedian,
    quantile,
    roll,
    sort,
    topk,
)
from njt.kernels.segments_place import Place, Where, at_index, place_of, take_rows
from njt.kernels.segments_torch import highest, lowest, wide

__all__ = [
    "all", "amax", "amin", "any", "argmax", "argmin", "argsort", "broadcast", "bucketed", "count_nonzero", "cummax",
    "cummin", "cumprod", "cumsum", "flip", "kthvalue", "linear_recurrence", "log_softmax", "logcumsumexp", "logsumexp",
    "max", "mean", "median", "min", "mode", "nanmean", "nanmedian", "nansum", "positions", "prod", "quantile", "reduce",
    "roll", "row_index", "segment_ids", "softmax", "softmax_backward", "sort", "std", "sum", "topk", "var",
    "vector_norm",
]  # fmt: skip


def _converted(values: Tensor, dtype: torch.dtype | None) -> Tensor:
    return values if dtype is None else values.to(dtype)


def _summable(values: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Integers and bools add up in int64 unless told otherwise, as in the dense operators."""
    if dtype is None and not (values.is_floating_point() or values.is_complex()):
        dtype = torch.int64
    return _converted(values, dtype)


def _check_floating(op: str, values: Tensor) -> None:
    """Numbers that are no integers would be cut to the dtype of the values."""
    if not (values.is_floating_point() or values.is_complex()):
        raise RuntimeError(
            f"{op}(): got values of {values.dtype}; expected a floating or complex dtype. Convert them: x.float()."
        )


def _check_real_floating(op: str, values: Tensor) -> None:
    if not values.is_floating_point():
        raise NotImplementedError(
            f"{op}(): got values of {values.dtype}; expected a floating dtype. Pass dtype=."
        )


def _check_ordered(op: str, values: Tensor) -> None:
    if values.is_complex():
        raise NotImplementedError(
            f"{op}(): got values of {values.dtype}; expected a real dtype, for only those have an order. Pass x.abs()."
        )


# ---- sums -----------------------------------------------------------------------------------------------------------
def sum(
    values: Tensor, offsets: Tensor, *, dtype: torch.dtype | None = None, **where: Unpack[Where]
) -> Tensor:
    """Sum of each segment; 0 for an empty one. Half types add up in fp32 and round once.

    >>> sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2, 3]))
    tensor([3., 0., 4.])
    """
    place = place_of(values, offsets, **where)
    return place.reduce(_summable(values, dtype), "sum")


def mean(
    values: Tensor, offsets: Tensor, *, dtype: torch.dtype | None = None, **where: Unpack[Where]
) -> Tensor:
    """Mean of each segment; nan for an empty one."""
    values = _converted(values, dtype)
    _check_floating("mean", values)
    return place_of(values, offsets, **where).reduce(values, "mean")


def nansum(
    values: Tensor, offsets: Tensor, *, dtype: torch.dtype | None = None, **where: Unpack[Where]
) -> Tensor:
    """Sum of each segment with nan counted as 0."""
    values = _summable(values, dtype)
    kept = torch.where(values.isnan(), 0, values)
    return place_of(values, offsets, **where).reduce(kept, "sum")


def nanmean(
    values: Tensor, offsets: Tensor, *, dtype: torch.dtype | None = None, **where: Unpack[Where]
) -> Tensor:
    """Mean of what is not nan in each segment; nan where there is nothing."""
    values = _converted(values, dtype)
    _check_floating("nanmean", values)
    place = place_of(values, offsets, **where)
    missing = values.isnan()
    total = place.reduce(torch.where(missing, 0, values).to(wide(values.dtype)), "sum")
    return (total / place.reduce((~missing).to(torch.float32), "sum")).to(values.dtype)


def count_nonzero(values: Tensor, offsets: Tensor, **where: Unpack[Where]) -> Tensor:
    """int64: entries that are not 0 in each segment."""
    return place_of(values, offsets, **where).reduce((values != 0).to(torch.int64), "sum")


def prod(
    values: Tensor, offsets: Tensor, *, dtype: torch.dtype | None = None, **where: Unpack[Where]
) -> Tensor:
    """Product of each segment; 1 for an empty one. Its gradient divides by nothing, so zeros are fine."""
    return place_of(values, offsets, **where).reduce(_summable(values, dtype), "prod")


# ---- extremes -------------------------------------------------------------------------------------------------------
def amax(values: Tensor, offsets: Tensor, **where: Unpack[Where]) -> Tensor:
    """Greatest entry of each segment, nan if there is one; the lowest value of the dtype for an empty segment.

    Ties share the gradient evenly.
    """
    _check_ordered("amax", values)
    return place_of(values, offsets, **where).reduce(values, "amax")


def amin(values: Tensor, offsets: Tensor, **where: Unpack[Where]) -> Tensor:
    """Least entry of each segment, nan if there is one; the highest value of the dtype for an empty segment."""
    _check_ordered("amin", values)
    return place_of(values, offsets, **where).reduce(values, "amin")


def _first_extreme(values: Tensor, place: Place, name: str) -> Tensor:
    """(B, *pre, *post) int64: index of the first extreme, or of the first nan; -1 in an empty segment."""
    _check_ordered(name.replace("a", "arg", 1), values)
    values = values.detach()
    if values.dtype == torch.bool:
        values = values.to(torch.uint8)
    place = place.with_ids(values)
    if is_eager(values) and values.device.type == "cpu":
        best = place.reduce(values, name)
        return segments_cpu.argument(
            values, best, place.offsets, place.lengths, place.known_ids, place.dim
        )
    found = values == place.broadcast(place.reduce(values, name), values)
    if values.is_floating_point():
        found = found | values.isnan()
    index = place.along(positions(place.offsets, place.known_ids), values)
    far = torch.iinfo(torch.int64).max
    first = place.reduce(torch.where(found, index, far), "amin")
    return torch.where(first == far, -1, first)


def argmax(values: Tensor, offsets: Tensor, **where: Unpack[Where]) -> Tensor:
    """int64: index in its segment of the first greatest entry (or first nan); -1 for an empty segment.

    >>> argmax(torch.tensor([1.0, 3.0, 2.0]), torch.tensor([0, 2, 3]))
    tensor([1, 0])
    """
    return _first_extreme(values, place_of(values, offsets, **where), "amax")


def argmin(values: Tensor, offsets: Tensor, **where: Unpack[Where]) -> Tensor:
    """int64: index in its segment of the first least entry (or first nan); -1 for an empty segment."""
    return _first_extreme(values, place_of(values, offsets, **where), "amin")


def max(values: Tensor, offsets: Tensor, **where: Unpack[Where]) -> tuple[Tensor, Tensor]:
    """(values, indices) of the greatest entries, as `amax` and `argmax`; the gradient goes to the index."""
    place = place_of(values, offsets, **where)
    index = _first_extreme(values, place, "amax")
    return at_index(values, index, place, lowest(values.dtype)), index


def min(values: Tensor, offsets: Tensor, **where: Unpack[Where]) -> tuple[Tensor, Tensor]:
    """(values, indices) of the least entries, as `amin` and `argmin`; the gradient goes to the index."""
    place = place_of(values, offsets, **where)
    index = _first_extreme(values, place, "amin")
    return at_index(values, index, place, highest(values.dtype)), index


def any(values: Tensor, offsets: Tensor, **where: Unpack[Where]) -> Tensor:
    """Whether an entry of each segment is not 0: bool, or uint8 for uint8; False for an empty segment."""
    place = place_of(values, offsets, **where)
    out = place.reduce((values != 0).to(torch.uint8), "amax")
    return out if values.dtype == torch.uint8 else out.to(torch.bool)


def all(values: Tensor, offsets: Tensor, **where: Unpack[Where]) -> Tensor:
    """Whether no entry of each segment is 0: bool, or uint8 for uint8; True for an empty segment."""
    place = place_of(values, offsets, **where)
    out = place.reduce((values == 0).to(torch.uint8), "amax") == 0
    return out.to(torch.uint8) if values.dtype == torch.uint8 else out


# ---- logsumexp, moments, norms --------------------------------------------------------------------------------------
def logsumexp(values: Tensor, offsets: Tensor, **where: Unpack[Where]) -> Tensor:
    """log of the sum of exp of each segment; -inf for an empty one."""
    if values.is_complex():
        return _complex_logsumexp(values, place_of(values, offsets, **where))
    if not values.is_floating_point():
        values = values.to(torch.get_default_dtype())
    return place_of(values, offsets, **where).reduce(values, "logsumexp")


def _complex_logsumexp(values: Tensor, place: Place) -> Tensor:
    """From what has an order and what adds up: the greatest real part is taken out before exp."""
    place = place.with_ids(values)
    top = place.reduce(values.detach().real, "amax")
    top = torch.where(top.isfinite(), top, 0)
    x = place.without_gaps(values)
    return place.reduce((x - place.broadcast(top, x.real)).exp(), "sum").log() + top


def var(values: Tensor, offsets: Tensor, correction: float = 1, **where: Unpack[Where]) -> Tensor:
    """Variance of each segment, in two passes; nan where a segment has no more rows than `correction`."""
    _check_floating("var", values)
    place = place_of(values, offsets, **where)
    return _moment(values, correction, place).to(_real_dtype(values))


def std(values: Tensor, offsets: Tensor, correction: float = 1, **where: Unpack[Where]) -> Tensor:
    """Square root of `var`; its gradient is 0 where it is 0."""
    _check_floating("std", values)
    place = place_of(values, offsets, **where)
    return _root(_moment(values, correction, place)).to(_real_dtype(values))


def _real_dtype(values: Tensor) -> torch.dtype:
    return values.real.dtype if values.is_complex() else values.dtype


def _root(square: Tensor) -> Tensor:
    """sqrt with gradient 0 at 0."""
    zero = square == 0
    return torch.where(zero, 0, torch.where(zero, 1, square).sqrt())


def _moment(values: Tensor, correction: float, place: Place) -> Tensor:
    place = place.with_ids(values)
    x = place.without_gaps(values.to(wide(values.dtype)))
    apart = x - place.broadcast(place.reduce(x, "mean"), x)
    squares = (apart * apart.conj()).real if x.is_complex() else apart * apart
    rows = (segment_lengths(place.offsets, place.lengths) - correction).clamp(min=0)
    return place.reduce(squares, "sum") / rows.view(-1, *[1] * (values.dim() - 1))


def vector_norm(
    values: Tensor,
    offsets: Tensor,
    ord: float = 2,
    *,
    dtype: torch.dtype | None = None,
    **where: Unpack[Where],
) -> Tensor:
    """The `ord`-norm of each segment: any number, inf and -inf; 0 for an empty segment (inf if `ord` is negative)."""
    values = _converted(values, dtype)
    _check_floating("vector_norm", values)
    place = place_of(values, offsets, **where).with_ids(values)
    x = place.without_gaps(values.to(wide(values.dtype)))
    out_dtype = _real_dtype(values)
    if ord == 0:
        return place.reduce((x != 0).to(out_dtype), "sum")
    size = x.abs()
    if ord == float("inf"):
        return place.reduce(size, "amax").clamp(min=0).to(out_dtype)
    if ord == -float("inf"):
        return place.reduce(size, "amin").to(out_dtype)
    if ord == 1:
        return place.reduce(size, "sum").to(out_dtype)
    if ord == 2:
        # without abs, whose square loses its second derivative at 0
        squares = x.real * x.real + x.imag * x.imag if x.is_complex() else x * x
        return _root(place.reduce(squares, "sum")).to(out_dtype)
    total = place.reduce(size**ord, "sum")
    zero = total == 0
    return torch.where(
        zero, 0.0 if ord > 0 else float("inf"), torch.where(zero, 1, total) ** (1 / ord)
    ).to(out_dtype)


_BY_NAME: dict[str, Callable[..., Any]] = {
    "sum": sum, "mean": mean, "amax": amax, "amin": amin, "prod": prod, "any": any, "all": all, "logsumexp": logsumexp,
    "argmax": argmax, "argmin": argmin, "nansum": nansum, "nanmean": nanmean, "count_nonzero": count_nonzero,
    "var": var, "std": std, "vector_norm": vector_norm, "median": median, "max": max, "min": min,
}  # fmt: skip


def reduce(
    values: Tensor, offsets: Tensor, name: str, *args: float, **where: Unpack[Where]
) -> Tensor:
    """The reduction called `name`, for callers that keep names in a table; `args` are its own (ord, correction)."""
    return _BY_NAME[name](values, offsets, *args, **where)


# ---- one entry a row ------------------------------------------------------------------------------------------------
def broadcast(per_segment: Tensor, offsets: Tensor, total: int, **where: Unpack[Where]) -> Tensor:
    """(B, *pre, *post) to (*pre, total, *post): each segment's entry at each of its rows, 0 in gaps.

    The reverse of `sum`: each is the other's gradient.
    """
    return ops.broadcast(per_segment, *place_of(per_segment, offsets, **where).args, total)


def softmax(
    values: Tensor, offsets: Tensor, *, dtype: torch.dtype | None = None, **where: Unpack[Where]
) -> Tensor:
    """Softmax inside each segment. Half types compute in fp32 and round once."""
    values = _converted(values, dtype)
    _check_real_floating("softmax", values)
    return place_of(values, offsets, **where).softmax(values, log=False)


def log_softmax(
    values: Tensor, offsets: Tensor, *, dtype: torch.dtype | None = None, **where: Unpack[Where]
) -> Tensor:
    """log of softmax inside each segment."""
    values = _converted(values, dtype)
    _check_real_floating("log_softmax", values)
    return place_of(values, offsets, **where).softmax(values, log=True)


def softmax_backward(
    grad: Tensor, output: Tensor, offsets: Tensor, *, log: bool = False, **where: Unpack[Where]
) -> Tensor:
    """The gradient that `softmax` (or `log_softmax`, with `log`) passes on, from its output."""
    place = place_of(output, offsets, **where)
    return torch.ops.njt.segment_softmax_backward(grad, output, *place.args, log)


def cumsum(
    values: Tensor, offsets: Tensor, *, dtype: torch.dtype | None = None, **where: Unpack[Where]
) -> Tensor:
    """Running sum, begun anew in each segment."""
    return place_of(values, offsets, **where).scan(_summable(values, dtype), "cumsum")


def cumprod(
    values: Tensor, offsets: Tensor, *, dtype: torch.dtype | None = None, **where: Unpack[Where]
) -> Tensor:
    """Running product, begun anew in each segment. Its gradient divides by nothing, so zeros are fine."""
    return place_of(values, offsets, **where).scan(_summable(values, dtype), "cumprod")


def logcumsumexp(values: Tensor, offsets: Tensor, **where: Unpack[Where]) -> Tensor:
    """log of the running sum of exp, begun anew in each segment."""
    return place_of(values, offsets, **where).scan(values, "logcumsumexp")


def cummax(values: Tensor, offsets: Tensor, **where: Unpack[Where]) -> tuple[Tensor, Tensor]:
    """(values, indices in the segment) of the greatest entry so far; the later one of equals."""
    place = place_of(values, offsets, **where).with_ids(values)
    index = place.scan(values.detach(), "cummax")
    return take_rows(values, index, place), index


def cummin(values: Tensor, offsets: Tensor, **where: Unpack[Where]) -> tuple[Tensor, Tensor]:
    """(values, indices in the segment) of the least entry so far; the later one of equals."""
    place = place_of(values, offsets, **where).with_ids(values)
    index = place.scan(values.detach(), "cummin")
    return take_rows(values, index, place), index


def linear_recurrence(
    values: Tensor, decay: Tensor, offsets: Tensor, *, reverse: bool = False, **where: Unpack[Where]
) -> Tensor:
    """y[t] = values[t] + decay[t] * y[t - 1] inside each segment, or y[t + 1] with `reverse`.

    Discounted returns and advantage estimates are of this form.
    """
    return ops.recurrence(values, decay, *place_of(values, offsets, **where).args, reverse=reverse)
