"""What the products that reach a mode whole cost, for `FlopCounterMode`: nothing padded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from njt.tensor import NestedTensor

aten = torch.ops.aten


def _linear(x: Tensor, weight: Tensor, *rest: Any, out_val: Any = None) -> int:
    packed = x._values if isinstance(x, NestedTensor) else x
    return 2 * packed.numel() * weight.shape[0]


def _linear_backward(
    x: Tensor, grad: Tensor, weight: Tensor, wanted: list[bool], *rest: Any, out_val: Any = None
) -> int:
    return (wanted[0] + wanted[1]) * _linear(x, weight)


# a dense linear never gets here: torch takes it apart before a mode sees it
for _operator, _formula in {aten.linear: _linear, aten.linear_backward: _linear_backward}.items():
    _decorate: Any = register_flop_formula(_operator, get_raw=True)
    _decorate(_formula)
# the counter takes apart what it does not find under the overload itself
flop_registry[aten.linear.default] = flop_registry[aten.linear]
