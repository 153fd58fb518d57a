"""torch.masked on nested tensors: entries where `mask` is False are left out.

Those functions are plain Python that asks nobody before it refuses a jagged layout, so importing njt puts a door into
each (`_compat.door_in_function`); dense calls go straight on.
Masks are bool, nested like `x` or dense and broadcast to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.masked
import torch.nn.functional as F
from torch import Tensor

from njt import _compat, errors
from njt.ops.reductions import prod
from njt.tensor import NestedTensor

_INF = float("inf")


def _bounds(x: Tensor) -> tuple[float, float]:
    """The least and the greatest value of the dtype."""
    if x.is_floating_point() or x.is_complex():
        return -_INF, _INF
    if x.dtype is torch.bool:
        return 0, 1
    info = torch.iinfo(x.dtype)
    return info.min, info.max


def _kept(x: Tensor, mask: Tensor | None, fill: float) -> Tensor:
    """`x` with `fill` where the mask is False."""
    if mask is None:
        return x
    if mask.dim() > x.dim():
        raise IndexError(
            *errors.bad_shape(
                "masked",
                f"a mask {errors.describe(mask)} for {errors.describe(x)}",
                "a mask that broadcasts to it",
                "Drop dims of the mask.",
            ).args
        )
    return torch.where(mask.to(torch.bool), x, torch.tensor(fill, dtype=x.dtype, device=x.device))


def _dims(x: Tensor, dim: Any) -> Any:
    return tuple(range(x.dim())) if dim is None or dim == () else dim


def _integers_to_int64(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None or x.is_floating_point() or x.is_complex():
        return dtype or x.dtype
    return torch.int64


def _sum(
    x: Any, dim: Any = None, *, keepdim: Any = False, dtype: Any = None, mask: Any = None
) -> Any:
    dtype = _integers_to_int64(x, dtype)
    return torch.sum(_kept(x, mask, 0), _dims(x, dim), bool(keepdim), dtype=dtype)


def _prod(
    x: Any, dim: Any = None, *, keepdim: Any = False, dtype: Any = None, mask: Any = None
) -> Any:
    dtype = _integers_to_int64(x, dtype)
    # torch.prod itself takes one dim only
    return prod(_kept(x, mask, 1), _dims(x, dim), bool(keepdim), dtype=dtype)


def _amax(
    x: Any, dim: Any = None, *, keepdim: Any = False, dtype: Any = None, mask: Any = None
) -> Any:
    return torch.amax(_kept(x, mask, _bounds(x)[0]), _dims(x, dim), bool(keepdim)).to(
        dtype or x.dtype
    )


def _amin(
    x: Any, dim: Any = None, *, keepdim: Any = False, dtype: Any = None, mask: Any = None
) -> Any:
    return torch.amin(_kept(x, mask, _bounds(x)[1]), _dims(x, dim), bool(keepdim)).to(
        dtype or x.dtype
    )


def _argmax(
    x: Any, dim: Any = None, *, keepdim: Any = False, dtype: Any = None, mask: Any = None
) -> Any:
    return torch.argmax(_kept(x, mask, _bounds(x)[0]), dim, bool(keepdim)).to(dtype or x.dtype)


def _argmin(
    x: Any, dim: Any = None, *, keepdim: Any = False, dtype: Any = None, mask: Any = None
) -> Any:
    return torch.argmin(_kept(x, mask, _bounds(x)[1]), dim, bool(keepdim)).to(dtype or x.dtype)


def _logsumexp(
    x: Any, dim: Any = None, *, keepdim: Any = False, dtype: Any = None, mask: Any = None
) -> Any:
    out = torch.logsumexp(_kept(x, mask, _bounds(x)[0]), _dims(x, dim), bool(keepdim))
    return out.to(dtype or x.dtype)


def _median(
    x: Any, dim: int = -1, *, keepdim: Any = False, dtype: Any = None, mask: Any = None
) -> Any:
    real = x if x.is_floating_point() else x.to(torch.float32)
    out = torch.nanmedian(_kept(real, mask, torch.nan), dim, bool(keepdim)).values
    return out if real is x else out.to(dtype or x.dtype)


def _norm(
    x: Any,
    ord: Any = 2.0,
    dim: Any = None,
    *,
    keepdim: Any = False,
    dtype: Any = None,
    mask: Any = None,
) -> Any:
    kept = _kept(x, mask, _INF if ord == -_INF else 0)
    return torch.linalg.vector_norm(kept, ord, _dims(x, dim), bool(keepdim), dtype=dtype or x.dtype)


def _count(x: Any, dim: Any, keepdim: Any, mask: Any) -> Tensor:
    """How many entries are counted in each result."""
    ones = torch.ones_like(x, dtype=torch.int64, requires_grad=False)
    return _sum(ones, dim, keepdim=keepdim, mask=mask)


def _mean(
    x: Any, dim: Any = None, *, keepdim: Any = False, dtype: Any = None, mask: Any = None
) -> Any:
    dtype = dtype or x.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise errors.bad_value("mean", f"{dtype}", "a floating or complex dtype", "Pass dtype=.")
    total = _sum(x, dim, keepdim=keepdim, dtype=dtype, mask=mask)
    return total / _count(x, dim, keepdim, mask)


def _var(
    x: Any,
    dim: Any = None,
    unbiased: bool | None = None,
    *,
    correction: float | None = None,
    keepdim: Any = False,
    dtype: Any = None,
    mask: Any = None,
) -> Any:
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    if dtype is None:
        dtype = x.dtype if x.is_floating_point() or x.is_complex() else torch.float32
    mean = _sum(x, dim, keepdim=True, dtype=dtype, mask=mask) / _count(x, dim, True, mask)
    apart = x - mean
    total = _sum(apart * apart.conj(), dim, keepdim=keepdim, dtype=dtype, mask=mask)
    left = (_count(x, dim, keepdim, mask) - correction).clamp(min=0)
    return (total / left).to(dtype)


def _std(x: Any, *args: Any, **options: Any) -> Any:
    return torch.sqrt(_var(x, *args, **options))


def _over_dim(
    function: Callable[..., Any], fill: int | None, number: float = 0
) -> Callable[..., Any]:
    """f(x, dim) after masking by the least (0) or greatest (1) value, or by `number`."""

    def masked(x: Any, dim: int, *, dtype: Any = None, mask: Any = None) -> Any:
        kept = _kept(x, mask, number if fill is None else _bounds(x)[fill])
        return function(kept, dim, dtype=dtype or x.dtype)

    return masked


def _normalize(
    x: Any, ord: float, dim: int, *, eps: float = 1e-12, dtype: Any = None, mask: Any = None
) -> Any:
    return _kept(x, mask, 0) / _norm(x, ord, dim, keepdim=True, dtype=dtype, mask=mask).clamp_min(
        eps
    )


def _logaddexp(
    x: Any, other: Any, *, dtype: Any = None, input_mask: Any = None, other_mask: Any = None
) -> Any:
    kept = _kept(x, input_mask, -_INF), _kept(other, other_mask, -_INF)
    return torch.logaddexp(*kept).to(dtype or x.dtype)


MASKED: dict[str, Callable[..., Any]] = {
    "sum": _sum, "prod": _prod, "amax": _amax, "amin": _amin, "argmax": _argmax, "argmin": _argmin,
    "mean": _mean, "median": _median, "norm": _norm, "var": _var, "std": _std,
    "logsumexp": _logsumexp, "logaddexp": _logaddexp, "normalize": _normalize,
    "softmax": _over_dim(torch.softmax, 0), "log_softmax": _over_dim(torch.log_softmax, 0),
    "softmin": _over_dim(F.softmin, 1), "cumsum": _over_dim(torch.cumsum, None),
    "cumprod": _over_dim(torch.cumprod, None, 1),
}  # fmt: skip


def _named_input(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, its first argument also by torch's name for it."""

    def named(*args: Any, **options: Any) -> Any:
        if "input" in options:
            args = (options.pop("input"), *args)
        return function(*args, **options)

    return named


for _name, _nested in MASKED.items():
    _compat.door_in_function(
        getattr(torch.masked, _name, None), NestedTensor, _named_input(_nested)
    )
