"""Running sums, products and extremes along one dim, and differences of neighbours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from njt import bridge, dims, errors
from njt.kernels import segments
from njt.ops.pieces import rows_between
from njt.registry import declare_named
from njt.rules.reduction import DimMapped, in_place, one_node
from njt.tensor import NestedTensor

types: Any = torch.return_types

SCANS = {
    "cumsum": DimMapped(torch.cumsum, segments.cumsum),
    "cumprod": DimMapped(torch.cumprod, segments.cumprod),
    "logcumsumexp": DimMapped(torch.logcumsumexp, segments.logcumsumexp),
    "cummax": DimMapped(torch.cummax, segments.cummax, result=types.cummax),
    "cummin": DimMapped(torch.cummin, segments.cummin, result=types.cummin),
}
for _name, _rule in SCANS.items():
    declare_named(_name, one_node(_name, _rule))
for _name in ("cumsum", "cumprod"):
    declare_named(f"{_name}_", in_place(f"{_name}_", SCANS[_name]))


def diff(x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    """Each row less the one before it, `n` times.

    Batch dim: refused. Ragged dim: inside each component, which ends up shorter by `n`, or empty. Gaps: left out.
    Ragged dim elsewhere than 1: any.

    Args:
        prepend, append: joined to `x` along `dim` first, as by `torch.cat`.
    """
    dim = dims.canonical(dim, x.dim())
    if dim == 0:
        raise errors.no_batch_dim("diff", x, 0)
    if n < 0:
        raise errors.bad_shape("diff", f"n={n}", "0 or more", "Sum with torch.cumsum.")
    parts = [t for t in (prepend, x, append) if t is not None]
    x = torch.cat(parts, dim) if len(parts) > 1 else x
    d = dim - 1
    if dim != x._ragged_dim:
        return bridge.wrap(bridge.values(x).diff(n, d), x._structure, x._ragged_dim, x)
    for _ in range(n):
        x = _less_the_one_before(x, d)
    return x


def _less_the_one_before(x: NestedTensor, d: int) -> NestedTensor:
    later = rows_between(x.detach(), slice(1, None))._structure
    values, place = bridge.values(x), later.row_index()
    ours, before = values.index_select(d, place), values.index_select(d, place - 1)
    out = ours ^ before if x.dtype is torch.bool else ours - before
    return bridge.wrap(out, later.compact(), d + 1, x)


declare_named("diff", one_node("diff", diff))
