"""Views: the values viewed alike, the ragged dim where `njt.dims` says, the same structure object.

Batch dim: stays first; an operator that would move or select it is refused. Ragged dim: may move, may not
be taken apart. Gaps: stay gaps. Ragged dim elsewhere than 1: any. May import bridge, tensor, errors, dims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload

from njt import dims, errors
from njt.rules.call import Call
from njt.tensor import NestedTensor


@dataclass(frozen=True)
class Restructured:
    """The dense view operator on the values, its dim arguments renumbered.

    Attributes:
        moves: from the old ragged dim and the canonical dim arguments to the new ragged dim.
        dims: schema names of the arguments that hold dims.
        grows: whether dims count in the result, one rank up, as for unsqueeze.
        keeps_ragged: whether the ragged dim may be named.
    """

    moves: Callable[..., int]
    dims: tuple[str, ...] = ("dim",)
    grows: bool = False
    keeps_ragged: bool = False

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call(func, args, kwargs)
        x, rank = call.nested, call.nested.dim() + self.grows
        named: dict[str, Any] = {}
        for name in self.dims:
            given = call[name]
            found = (
                dims.canonical_all(given, rank)
                if isinstance(given, (list, tuple))
                else dims.canonical(given, rank)
            )
            self._check(call, x, found)
            named[name] = found
        ragged_dim = self.moves(x._ragged_dim, *named.values())
        inner = {
            name: [d - 1 for d in found if d > 0] if isinstance(found, tuple) else found - 1
            for name, found in named.items()
        }
        out = call.on_values(**inner)
        return NestedTensor(out, x._structure, ragged_dim)

    def _check(self, call: Call, x: NestedTensor, found: int | tuple[int, ...]) -> None:
        if isinstance(found, tuple):  # an order of all dims
            if found[0] != 0:
                raise errors.no_batch_dim(call.name, x, found[0])
            return
        if found == 0:
            raise errors.no_batch_dim(call.name, x, 0)
        if found == x._ragged_dim and not self.keeps_ragged:
            raise errors.no_ragged_dim(call.name, x, found)


def stays(ragged_dim: int, *named: int) -> int:
    """The ragged dim where it was."""
    return ragged_dim


def dropped(ragged_dim: int, dim: int) -> int:
    """The ragged dim after `dim` went away."""
    return dims.drop(ragged_dim, (dim,))


def permuted(ragged_dim: int, order: tuple[int, ...]) -> int:
    """The ragged dim after a permutation."""
    return dims.permute(ragged_dim, order)
