"""What operators cost that nested tensors keep whole, for torch.utils.flop_counter.FlopCounterMode.

Dense tensors never show these operators to a counter: there they are taken apart before it sees them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from njt import _compat
from njt.tensor import NestedTensor


def _tokens(x: Tensor) -> Any:
    """Rows that a matrix product runs over."""
    values = x._values if isinstance(x, NestedTensor) else x
    return values.numel() // max(values.shape[-1], 1)


def _linear(x: Tensor, weight: Tensor, bias: Any = None, out_val: Any = None) -> Any:
    return 2 * _tokens(x) * weight.numel()


def _linear_backward(
    x: Tensor, grad: Tensor, weight: Tensor, wanted: list[bool], out_val: Any = None
) -> Any:
    return 2 * _tokens(x) * weight.numel() * (bool(wanted[0]) + bool(wanted[1]))


def _grouped(
    first: Tensor,
    second: Tensor,
    offsets: Tensor,
    lengths: Tensor | None = None,
    width: Any = None,
    out_val: Any = None,
) -> Any:
    """Multiply and contract alike: rows (*lead, T, D) of which those in use meet E columns each."""
    rows = first.shape[-2]
    if lengths is not None and not _compat.is_fake(lengths):
        rows = int(lengths.sum())
    return 2 * (first.numel() // max(first.shape[-2], 1)) * rows * second.shape[-1]


for _operator, _formula in (
    (torch.ops.njt.grouped_multiply, _grouped),
    (torch.ops.njt.grouped_contract, _grouped),
    (torch.ops.aten.linear, _linear),
    (torch.ops.aten.linear_backward, _linear_backward),
):
    _decorate: Any = register_flop_formula(_operator, get_raw=True)
    _decorate(_formula)
    # the counter takes apart every overload that is no key, and counts by packet
    flop_registry[_operator.default] = _formula
