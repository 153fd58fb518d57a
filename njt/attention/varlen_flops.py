"""What an attention call costs, for `FlopCounterMode`: the scores of each sequence, nothing padded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from njt.attention.varlen_call import Call

_CALL = len(Call._fields)


def _scores(call: Call) -> int:
    """Pairs of a query and a key of one sequence; from the bounds where lengths hold no data."""
    if isinstance(call.q_offsets, Tensor) and call.q_offsets.device.type != "meta":
        try:
            q = call.q_offsets.diff() if call.q_lengths is None else call.q_lengths
            k = call.k_offsets.diff() if call.k_lengths is None else call.k_lengths
            return sum(n * m for n, m in zip(q.tolist(), k.tolist(), strict=True))
        except RuntimeError:  # a FakeTensor has no lengths to read
            pass
    return (call.q_offsets.shape[0] - 1) * call.max_q * call.max_k


def _forward_flops(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any, out_val: Any = None
) -> int:
    # two products: scores, and weights with values
    width = query.shape[2] + value.shape[2]
    return 2 * _scores(Call(*rest)) * query.shape[1] * width


def _backward_flops(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, out_val: Any = None
) -> int:
    # scores again, and the gradients of weights, values, keys and queries
    width = 3 * query.shape[2] + 2 * value.shape[2]
    return 2 * _scores(Call(*rest[-_CALL:])) * query.shape[1] * width


def register() -> None:
    """Tells torch's counter about both operators."""
    operators = torch.ops.njt.varlen_attention, torch.ops.njt.varlen_attention_backward
    for operator, formula in zip(operators, (_forward_flops, _backward_flops), strict=True):
        decorate: Any = register_flop_formula(operator, get_raw=True)
        decorate(formula)
