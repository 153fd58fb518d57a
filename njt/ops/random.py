"""Random numbers written in place, and in-place dropout. Gap rows are left as they are."""

from __future__ import annotations

from typing import Any

import torch

from njt import _compat
from njt._compat import OpOverload
from njt.registry import OPS, declare, declare_function, overloads
from njt.tensor import NestedTensor


class Drawn:
    """An in-place filler that never looks at what it overwrites: on the values; with gaps on fresh rows."""

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, rest = args[0], args[1:]
        if not x._structure.has_gaps:
            func(x._values, *rest, **kwargs)
            return x
        d, rows = x._ragged_dim - 1, x._structure.row_index()
        drawn = torch.empty_like(x._values.index_select(d, rows))
        x._values.index_copy_(d, rows, func(drawn, *rest, **kwargs))
        return x


FILLERS = [
    "normal_",
    "uniform_",
    "exponential_",
    "cauchy_",
    "geometric_",
    "log_normal_",
    "random_",
    "bernoulli_",
]
for _name in FILLERS:
    for _overload in overloads(_name):
        if _overload not in OPS and not any(
            str(a.type) == "Tensor" for a in _compat.schema(_overload).arguments[1:]
        ):
            declare(_overload, Drawn())


def dropout_(input: Any, p: float = 0.5, train: bool = True) -> NestedTensor:
    """Multiplies by 0 or 1 / (1 - p), in place."""
    if not train or p == 0:
        return input
    if p == 1:
        return input.mul_(0)
    noise = torch.empty_like(input, requires_grad=False).bernoulli_(1 - p).div_(1 - p)
    return input.mul_(noise)


declare_function(dropout_, torch.dropout_)
