"""Activations that look at more than one element: halves, channels, random slopes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from njt import bridge
from njt.registry import declare_function, declare_named
from njt.rules.per_token import AsOne
from njt.rules.reduction import kept_for_backward
from njt.tensor import NestedTensor

declare_named("glu", AsOne(F.glu, ("dim",), dim="dim", default=-1))


def prelu(input: Any, weight: Any) -> Any:
    """`F.prelu`: one slope, or one for each channel of dim 1.

    Args:
        input: nested, any ragged dim for one slope; (B, C, *) with the ragged dim behind for many.
    """
    if weight.numel() == 1:
        return _PRELU_ALL(input, weight)
    return _PRELU_CHANNELS(input, weight)


_PRELU_ALL = AsOne(torch.prelu, ("weight",), sums=True)
_PRELU_CHANNELS = AsOne(torch.prelu, ("weight",), channels=True, sums=True)
declare_named("prelu", prelu)


def rrelu(
    input: Any,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    """`F.rrelu`: the same for every element, random slopes while training. Gaps are computed and ignored."""
    x: NestedTensor = kept_for_backward(input) if inplace else input
    packed = torch.rrelu(bridge.values(x), lower, upper, training)
    out = bridge.wrap(packed, x._structure, x._ragged_dim, x)
    return input.copy_(out) if inplace else out


def rrelu_(
    input: Any, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False
) -> Any:
    """`rrelu` in place."""
    return rrelu(input, lower, upper, training, inplace=True)


declare_named("rrelu", rrelu, aten=())
declare_function(rrelu_, torch.rrelu_)
declare_named("logsigmoid", AsOne(F.logsigmoid))


def _softmin_over_rows(x: NestedTensor, dim: int, **named: Any) -> Any:
    return torch.softmax(-x, dim, dtype=named.get("dtype"))


_NAMES = ("dim", "_stacklevel", "dtype")
declare_named("softmin", AsOne(F.softmin, _NAMES, dim="dim", default=1, ragged=_softmin_over_rows))
