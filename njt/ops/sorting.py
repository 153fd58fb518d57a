"""Sorting along one dim, what is read off sorted rows, and moving rows about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from njt import bridge, dims, errors
from njt.kernels import segments
from njt.kernels.segments_index import is_eager
from njt.kernels.segments_place import Place, at_index
from njt.ops.reductions import reduction
from njt.registry import declare_named
from njt.rules.reduction import DimMapped, Reduction, check_rows, one_node, place_of
from njt.tensor import NestedTensor

types: Any = torch.return_types

# segments sort stably, whether asked to or not
_SORT = {"names": ("dim", "descending", "stable"), "default": -1, "drops": ("stable",)}
SORT = DimMapped(torch.sort, segments.sort, result=types.sort, **_SORT)  # type: ignore[arg-type]
ARGSORT = DimMapped(torch.argsort, segments.argsort, **_SORT)  # type: ignore[arg-type]


def _msort(x: Any) -> Any:
    """torch.msort sorts along dim 0, which is the batch."""
    return SORT(x, 0)


def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Over features nested with k of them; over the ragged dim dense (B, .., k, ..)."""
    dim = dims.canonical(dim, x.dim())
    if dim == 0:
        raise errors.no_batch_dim("topk", x, 0)
    if dim != x._ragged_dim:
        out = torch.topk(bridge.values(x), k, dim - 1, largest, sorted)
        return types.topk([bridge.wrap(o, x._structure, x._ragged_dim, x) for o in out])
    check_rows("topk", x, k)
    found = segments.topk(bridge.values(x), k=k, largest=largest, dim=dim - 1, **place_of(x))
    return types.topk([o.movedim(1, dim) for o in found])


declare_named("sort", one_node("sort", SORT))
declare_named("argsort", one_node("argsort", ARGSORT))
declare_named("msort", one_node("msort", _msort))
declare_named("topk", one_node("topk", _topk))


# ---- quantiles ------------------------------------------------------------------------------------------------------
_ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "lower": torch.floor, "higher": torch.ceil, "nearest": torch.round,
}  # fmt: skip


def _segment_quantile(
    values: Tensor,
    offsets: Tensor,
    q: Any,
    *,
    skip_nan: bool,
    interpolation: str = "linear",
    dim: int,
    lengths: Tensor | None,
    max_seqlen: Any,
    ids: Tensor | None = None,
) -> Tensor:
    """The q-quantile of each segment; nan where nothing is left, or where there is a nan that is not skipped."""
    if ids is None:
        ids = segments.segment_ids(offsets, lengths, values.shape[dim])
    place: dict[str, Any] = {"lengths": lengths, "dim": dim, "max_seqlen": max_seqlen, "ids": ids}
    ordered, _ = segments.sort(values, offsets, **place)  # nan comes last
    counted = segments.sum((~values.detach().isnan()).long(), offsets, **place)
    rank = (counted - 1).clamp(min=0).to(values.dtype) * q
    if interpolation in _ROUNDED:
        rank = _ROUNDED[interpolation](rank)
    low = rank.floor()
    weight = (rank - low).detach()
    if interpolation == "midpoint":
        weight = torch.where(weight > 0, 0.5, 0.0).to(values.dtype)
    where = Place(offsets, lengths, ids, dim, max_seqlen)
    below = at_index(ordered, low.long(), where, torch.nan)
    out = below.lerp(at_index(ordered, rank.ceil().long(), where, torch.nan), weight)
    void = counted == 0
    if not skip_nan:
        void = void | (segments.count_nonzero(values.detach().isnan(), offsets, **place) > 0)
    return torch.where(void, torch.nan, out)


def _quantile(dense: Callable[..., Any], skip_nan: bool) -> Callable[..., Any]:
    def ragged(values: Tensor, offsets: Tensor, **options: Any) -> Tensor:
        return _segment_quantile(values, offsets, skip_nan=skip_nan, **options)

    @wraps(dense)
    def filled(x: Tensor, q: Any, dim: int, keepdim: bool = False, **options: Any) -> Tensor:
        if is_eager(x) and x.numel() == 0 and x.shape[dim]:  # no row at all, which `dense` refuses
            return x.sum(dim, keepdim)
        return dense(x, q, dim, keepdim, **options)

    rule = Reduction(filled, ragged, lead=("q",), nonempty=True)

    def quantile(x: Any, q: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(q, Tensor) or q.dim() == 0:
            return rule(x, q, *args, **options)
        each = [rule(x, one, *args, **options) for one in q.unbind()]
        if isinstance(each[0], NestedTensor):
            raise errors.unsupported(
                dense.__name__,
                f"q of {q.shape[0]} numbers over feature dims",
                "one number, since q would be the first dim of the result, before the batch",
                "Call it for each number.",
            )
        return torch.stack(each)

    return quantile


reduction("quantile", _quantile(torch.quantile, skip_nan=False))
reduction("nanquantile", _quantile(torch.nanquantile, skip_nan=True))


# ---- rows moved about -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Moved:
    """An operator that moves entries along several dims, one after the other.

    Batch dim: refused. Ragged dim: `ragged` in each segment. Gaps: stay; over features moved along.
    Ragged dim elsewhere than 1: any.
    """

    dense: Callable[..., Any]
    ragged: Callable[..., Any]

    def __call__(self, x: NestedTensor, named: Sequence[int], *each: Sequence[int]) -> NestedTensor:
        """`named`: the dims; `each`: lists with one entry a dim."""
        packed = bridge.values(x)
        for d, *own in zip((dims.canonical(d, x.dim()) for d in named), *each):
            if d == 0:
                raise errors.no_batch_dim(self.dense.__name__, x, 0)
            if d == x._ragged_dim:
                packed = self.ragged(packed, x._structure.offsets, *own, dim=d - 1, **_rest(x))
            else:
                packed = self.dense(packed, *own, d - 1)
        return bridge.wrap(packed, x._structure, x._ragged_dim, x)


def _rest(x: NestedTensor) -> dict[str, Any]:
    place = place_of(x)
    del place["offsets"]
    return place


def _flip(x: Any, *given: Any, **options: Any) -> Any:
    named = options.get("dims", given[0] if len(given) == 1 else given)
    named = (named,) if isinstance(named, int) else named
    return Moved(_flip_dense, segments.flip)(x, tuple(named))


def _flip_dense(x: Tensor, dim: int) -> Tensor:
    return x.flip(dim)


def _roll(x: Any, shifts: Any, dims: Any = None) -> Any:
    if dims is None or dims == ():
        raise errors.bad_type(
            "roll", f"no dims for {errors.describe(x)}", "dims=", "Name the dims to roll along."
        )
    shifts, named = ((v,) if isinstance(v, int) else tuple(v) for v in (shifts, dims))
    if len(shifts) != len(named):
        raise errors.bad_shape(
            "roll", f"shifts {shifts} and dims {named}", "as many of each", "Pair them."
        )
    return Moved(torch.roll, segments.roll)(x, named, shifts)


declare_named("flip", one_node("flip", _flip))
declare_named("fliplr", one_node("fliplr", lambda x: _flip(x, 1)))
declare_named("flipud", one_node("flipud", lambda x: _flip(x, 0)))
declare_named("roll", one_node("roll", _roll))
