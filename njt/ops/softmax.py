"""Softmax family: a line an operator; the two overloads that torch's own functions reach, beside their backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from njt import bridge, dims
from njt.kernels import segments
from njt.registry import declare, declare_named, implements
from njt.rules.reduction import DimMapped, one_node, place_of, segment_ids
from njt.tensor import NestedTensor

aten = torch.ops.aten

_NAMES, _UNUSED = ("dim", "dtype"), ("_stacklevel",)
SOFTMAX = DimMapped(torch.softmax, segments.softmax, _NAMES)
LOG_SOFTMAX = DimMapped(torch.log_softmax, segments.log_softmax, _NAMES)


def _named(rule: DimMapped) -> Any:
    """torch.softmax(x, dim, dtype) and F.softmax(x, dim, _stacklevel, dtype) in one."""

    def handler(x: Any, dim: Any = None, *args: Any, **options: Any) -> Any:
        options.pop("_stacklevel", None)
        if len(args) == 2 or (args and not isinstance(args[0], torch.dtype)):
            args = args[1:]
        return rule(x, dim, *args, **options)

    return handler


declare_named("softmax", one_node("softmax", _named(SOFTMAX)))
declare_named("log_softmax", one_node("log_softmax", _named(LOG_SOFTMAX)))


class _Below:
    """aten::_softmax(x, dim, half_to_float), from composites in C++."""

    def __init__(self, rule: DimMapped) -> None:
        self.rule = rule

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, dim, half_to_float = args
        return self.rule(x, dim, dtype=torch.float32 if half_to_float else None)


declare(aten._softmax.default, _Below(SOFTMAX))
declare(aten._log_softmax.default, _Below(LOG_SOFTMAX))


@implements(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, output, dim, dtype = args
    if grad._structure is not output._structure:
        grad = bridge.align(grad, output, "softmax_backward")
    dim = dims.canonical(dim, output.dim())
    if dim != output._ragged_dim:
        return output.with_values(func(grad._values, output._values, dim - 1, dtype))
    log = func is aten._log_softmax_backward_data.default
    out = segments.softmax_backward(
        grad._values, output._values, dim=dim - 1, log=log, **place_of(output)
    )
    return output.with_values(out.to(dtype))


def gumbel_softmax(
    logits: Any, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Any:
    """A softmax of logits with Gumbel noise; `hard`: one-hot forward, the gradient of the soft one backward."""
    values = bridge.values(logits)
    noise = -torch.empty_like(values).exponential_().log()
    noisy = bridge.wrap((values + noise) / tau, logits._structure, logits._ragged_dim, logits)
    soft = SOFTMAX(noisy, dim)
    if not hard:
        return soft
    picked = _one_hot(soft, dims.canonical(dim, soft.dim()))
    packed = bridge.values(soft)
    out = picked.to(packed.dtype) - packed.detach() + packed
    return bridge.wrap(out, soft._structure, soft._ragged_dim, soft)


def _one_hot(x: NestedTensor, dim: int) -> Tensor:
    """True at the greatest entry along `dim`, in the shape of the values."""
    values, d = x._values.detach(), dim - 1
    if dim == x._ragged_dim:
        place = {**place_of(x), "ids": segment_ids(x)}
        first = segments.argmax(values, dim=d, **place)
        best = segments.broadcast(first, total=values.shape[d], dim=d, **place)
        spots = segments.positions(place["offsets"], place["ids"])
    else:
        best = values.argmax(d, keepdim=True)
        spots = torch.arange(values.shape[d], device=values.device)
    return spots.view(*[1] * d, -1, *[1] * (values.dim() - d - 1)) == best


declare_named("gumbel_softmax", one_node("gumbel_softmax", gumbel_softmax))
