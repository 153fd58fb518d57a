"""Matrix products with weights shared by all tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from njt import bridge
from njt.registry import declare, implements
from njt.rules.per_token import PerToken
from njt.tensor import NestedTensor

aten = torch.ops.aten

declare(aten.linear.default, PerToken(features=1))


@implements(aten.linear_backward.default)
def _linear_backward(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # gap rows must not reach the sums over tokens, so they go first
    x, grad, weight, wanted = args
    packed, grad_packed = bridge.compact_values(x), bridge.compact_values(_like(grad, x))
    rows, grads = packed.flatten(0, -2), grad_packed.flatten(0, -2)
    grad_input: Any = None
    if wanted[0]:
        d = x._ragged_dim - 1
        spread = bridge.spread(grad_packed @ weight, x._structure, x._values.shape[d], d)
        grad_input = x.with_values(spread)
    grad_weight = grads.t() @ rows if wanted[1] else None
    return grad_input, grad_weight, grads.sum(0) if wanted[2] else None


def _like(grad: Tensor, x: NestedTensor) -> NestedTensor:
    if isinstance(grad, NestedTensor) and grad._structure is not x._structure:
        return bridge.align(grad, x, "linear_backward")
    return grad
