"""Reductions: a line names the dense function and the segment kernel for the ragged dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from njt.kernels import padding, segments
from njt.kernels.segments_index import is_eager
from njt.registry import Handler, declare_named
from njt.rules.reduction import Reduction, one_node


def reduction(
    name: str,
    rule: Callable[..., Any],
    aten: tuple[str, ...] | None = None,
    but: tuple[Callable[..., Any], ...] = (),
) -> Handler:
    """Declares `name` under a rule; returns the handler. `but`: as for `declare_named`."""
    handler = one_node(name, rule)
    declare_named(name, handler, aten, but)
    return handler


def _prod(x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """torch.prod over any number of dims."""
    for d in sorted([dim] if isinstance(dim, int) else dim, reverse=True):
        x, dtype = torch.prod(x, d, keepdim, dtype=dtype), None
    return x


def _count_nonzero(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return torch.sum(x != 0, dim, keepdim)


reduction("sum", Reduction(torch.sum, segments.sum, ids=False))
reduction("nansum", Reduction(torch.nansum, segments.nansum))
reduction("mean", Reduction(torch.mean, segments.mean, ids=False))
reduction("nanmean", Reduction(torch.nanmean, segments.nanmean))
prod = reduction("prod", Reduction(_prod, segments.prod, full=torch.prod))
reduction("amax", Reduction(torch.amax, segments.amax, nonempty=True))
reduction("amin", Reduction(torch.amin, segments.amin, nonempty=True))
reduction("any", Reduction(torch.any, segments.any))
reduction("all", Reduction(torch.all, segments.all))
reduction("logsumexp", Reduction(torch.logsumexp, segments.logsumexp))
reduction("argmax", Reduction(torch.argmax, segments.argmax, nonempty=True))
reduction("argmin", Reduction(torch.argmin, segments.argmin, nonempty=True))
reduction("count_nonzero", Reduction(_count_nonzero, segments.count_nonzero))


def _allclose(x: Any, other: Any, *args: Any, **options: Any) -> bool:
    return bool(torch.isclose(x, other, *args, **options).all())


declare_named("allclose", _allclose)


# ---- the least, the greatest, the middle: values and indices --------------------------------------------------------
def _extreme(rule: Reduction, binary: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """f(x), f(x, dim, keepdim) and, where there is one, f(x, other)."""

    def choose(x: Any, *args: Any, **options: Any) -> Any:
        second = args[0] if args else options.get("other")
        if binary is not None and isinstance(second, Tensor):
            return binary(x, second)
        if not args and "dim" not in options:
            return rule(x, dim=None, **options)
        return rule(x, *args, **options)

    return choose


types: Any = torch.return_types
MAX = Reduction(torch.max, segments.max, full=torch.max, result=types.max, nonempty=True)
MIN = Reduction(torch.min, segments.min, full=torch.min, result=types.min, nonempty=True)
MEDIAN = Reduction(
    torch.median, segments.median, full=torch.median, result=types.median, nonempty=True
)
NANMEDIAN = Reduction(
    torch.nanmedian, segments.nanmedian, full=torch.nanmedian, result=types.nanmedian, nonempty=True
)


def _aminmax(values: Tensor, offsets: Tensor, **place: Any) -> Sequence[Tensor]:
    return segments.amin(values, offsets, **place), segments.amax(values, offsets, **place)


reduction("max", _extreme(MAX, torch.maximum))
reduction("min", _extreme(MIN, torch.minimum))
reduction("median", _extreme(MEDIAN))
reduction("nanmedian", _extreme(NANMEDIAN))
reduction(
    "mode", Reduction(torch.mode, segments.mode, default=-1, result=types.mode, nonempty=True)
)
reduction(
    "kthvalue",
    Reduction(
        torch.kthvalue,
        segments.kthvalue,
        lead=("k",),
        default=-1,
        result=types.kthvalue,
        nonempty=True,
    ),
)
reduction("aminmax", Reduction(torch.aminmax, _aminmax, result=types.aminmax, nonempty=True))


# ---- moments --------------------------------------------------------------------------------------------------------
def _corrected(rule: Reduction) -> Callable[..., Any]:
    """The three signatures of var: (x, unbiased), (x, dim, unbiased, keepdim) and (x, dim, *, correction, keepdim)."""

    def unify(x: Any, *args: Any, **options: Any) -> Any:
        names: tuple[str, ...] = ("dim", "unbiased", "keepdim")
        if args and isinstance(args[0], bool):
            names = names[1:]
        options.update(zip(names, args))
        unbiased = options.pop("unbiased", None)
        correction = options.pop("correction", None)
        if correction is None:
            correction = 1 if unbiased is None else int(unbiased)
        return rule(x, correction=correction, **options)

    return unify


def _with_mean(moment: Callable[..., Tensor]) -> Callable[..., Any]:
    def both(values: Tensor, offsets: Tensor, correction: float = 1, **place: Any) -> Any:
        return moment(values, offsets, correction, **place), segments.mean(values, offsets, **place)

    return both


reduction("var", _corrected(Reduction(torch.var, segments.var)))
reduction("std", _corrected(Reduction(torch.std, segments.std)))
reduction("var_mean", _corrected(Reduction(torch.var_mean, _with_mean(segments.var))))
reduction("std_mean", _corrected(Reduction(torch.std_mean, _with_mean(segments.std))))


# ---- bits -----------------------------------------------------------------------------------------------------------
def _hash(
    values: Tensor,
    offsets: Tensor,
    *,
    dim: int,
    lengths: Tensor | None,
    max_seqlen: Any,
    ids: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The xor of all bits: padding with zeros changes nothing."""
    width = max_seqlen
    if width is None:  # all rows are bound enough for a graph
        sizes = offsets.diff() if lengths is None else lengths
        width = int(F.pad(sizes, (0, 1)).amax()) if is_eager(sizes) else values.shape[dim]
    padded = padding.packed_to_padded(values, offsets, width, 0, lengths=lengths, values_dim=dim)
    return torch.hash_tensor(padded, dim + 1, **options)


if hasattr(torch, "hash_tensor"):
    reduction("hash_tensor", Reduction(torch.hash_tensor, _hash))
