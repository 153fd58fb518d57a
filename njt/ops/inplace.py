"""torch._foreach_*: lists that hold nested and dense tensors, one call on all their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from njt import bridge
from njt.registry import declare_function
from njt.tensor import NestedTensor


class ForEach:
    """The dense list function on values. Batch and ragged dims: just elements. Gaps: closed for what is
    reduced or written.

    Attributes:
        dense: the torch function.
    """

    def __init__(self, dense: Callable[..., Any]) -> None:
        self.dense = dense
        self.writes = dense.__name__.endswith("_")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaders = list(args[0] if args else kwargs["self"])
        inner = [self._list(a, leaders) for a in args]
        named = {k: self._list(a, leaders) for k, a in kwargs.items()}
        outs = self.dense(*inner, **named)
        if self.writes:
            for x, packed in zip(leaders, inner[0] if inner else named["self"]):
                if isinstance(x, NestedTensor) and x._structure.has_gaps:
                    x.copy_(bridge.wrap(packed, x._structure.compact(), x._ragged_dim, x))
            return args[0] if outs is not None else None
        return tuple(self._outer(x, out) for x, out in zip(leaders, outs))

    def _list(self, given: Any, leaders: list[Any]) -> Any:
        if not isinstance(given, (list, tuple)):
            return bridge.compact_values(given) if isinstance(given, NestedTensor) else given
        return [self._inner(a, x) for a, x in zip(given, leaders)]

    def _inner(self, a: Any, x: Any) -> Any:
        if not isinstance(a, NestedTensor):
            return a
        if isinstance(x, NestedTensor) and a is not x and a._structure is not x._structure:
            a = bridge.align(a, x, self.dense.__name__)
        if a._structure.has_gaps:
            return bridge.compact_values(a)
        return a.values() if self.writes else bridge.values(a)

    def _outer(self, x: Any, out: Tensor) -> Tensor:
        if not isinstance(x, NestedTensor) or out.dim() == 0:
            return out
        return bridge.wrap(out, x._structure.compact(), x._ragged_dim, x)


for _name in dir(torch):
    if _name.startswith("_foreach_"):
        declare_function(ForEach(getattr(torch, _name)), getattr(torch, _name))
