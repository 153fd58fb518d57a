"""Running sums, products and extremes along one dim."""

from __future__ import annotations

from typing import Any

import torch

from njt.kernels import segments
from njt.registry import declare_named
from njt.rules.reduction import DimMapped, in_place, one_node

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
