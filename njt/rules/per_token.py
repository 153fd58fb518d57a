"""Operators that treat every token alike: batch and ragged dims are only leading dims.

Batch and ragged dim: never looked at. Gaps: computed and ignored; where a dense result sums over tokens
(weight gradients) gap rows are left out. Ragged dim: any, as long as it is none of the operator's own
feature dims. May import bridge, tensor, errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from njt import bridge, errors
from njt.rules.call import user_name
from njt.tensor import NestedTensor


@dataclass(frozen=True)
class PerToken:
    """The dense operator on values; results with a row per token are nested, others stay dense.

    Attributes:
        features: how many trailing dims the operator works over, or the name of the argument that
            lists them (`normalized_shape`).
        per_token: for each result, whether it has a row per token.
        sums: whether a dense result sums over tokens, so that gap rows have to go first.
    """

    features: int | str = 0
    per_token: tuple[bool, ...] = (True,)
    sums: bool = False

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = next(a for a in args if isinstance(a, NestedTensor))
        self._check_ragged_dim(func, x, args)
        gaps = self.sums and x._structure.has_gaps
        inner = [self._inner(func, x, a, gaps) for a in args]
        kwargs = {k: self._inner(func, x, a, gaps) for k, a in kwargs.items()}
        out = func(*inner, **kwargs)
        if isinstance(out, Tensor):
            return self._outer(x, out, gaps)
        return tuple(
            self._outer(x, o, gaps) if nested and o is not None else o
            for o, nested in zip(out, self.per_token)
        )

    def _check_ragged_dim(self, func: OpOverload, x: NestedTensor, args: tuple[Any, ...]) -> None:
        if isinstance(self.features, int):
            trailing = self.features
        else:
            names = [a.name for a in func._schema.arguments]
            trailing = len(args[names.index(self.features)])
        if x._ragged_dim >= x.dim() - trailing:
            raise errors.no_ragged_dim(user_name(func), x, x._ragged_dim)

    def _inner(self, func: OpOverload, x: NestedTensor, a: Any, gaps: bool) -> Any:
        if not isinstance(a, NestedTensor):
            return a
        if a is not x and a._structure is not x._structure:
            a = bridge.align(a, x, user_name(func))
        return bridge.compact_values(a) if gaps else a._values

    def _outer(self, x: NestedTensor, out: Tensor, gaps: bool) -> NestedTensor:
        if gaps:
            d = x._ragged_dim - 1
            out = bridge.spread(out, x._structure, x._values.shape[d], d)
        return x.with_values(out)
