"""Views: the values viewed alike, the ragged dim where `njt.dims` says, the same structure object.

Batch dim: stays first; an operator that would move it is refused. Ragged dim: may move, may not be taken
apart. Gaps: stay gaps. Ragged dim elsewhere than 1: any. `Restructured` stands below autograd, `packed`
and `seen` are for handlers above it. May import bridge, tensor, structure, errors, dims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from njt import bridge, dims, errors
from njt._compat import OpOverload
from njt.rules.call import Call
from njt.structure import Structure
from njt.tensor import NestedTensor


def packed(x: NestedTensor) -> Tensor:
    """The values of `x` as an autograd view of it, with or without a gradient: writes are counted in `x`."""
    if x.is_complex() or torch.compiler.is_compiling():
        return bridge.values(x)
    return x.values()


def seen(
    values: Tensor,
    x: NestedTensor,
    ragged_dim: int | None = None,
    structure: Structure | None = None,
) -> NestedTensor:
    """A view of the values of `x` as a nested tensor, of the structure of `x` unless another is given."""
    ragged_dim = x._ragged_dim if ragged_dim is None else ragged_dim
    return bridge.nested_view(
        values, x._structure if structure is None else structure, ragged_dim, x
    )


def inner_dim(op: str, x: NestedTensor, dim: int, ragged: bool = False) -> int:
    """The dim of the values that dim `dim` of `x` is.

    Raises:
        IndexError: `dim` is out of range.
        RuntimeError: `dim` is the batch dim, or the ragged dim unless that is allowed by `ragged`.
    """
    dim = dims.canonical(dim, x.dim())
    if dim == 0:
        raise errors.no_batch_dim(op, x, 0)
    if dim == x._ragged_dim and not ragged:
        raise errors.no_ragged_dim(op, x, dim)
    return dim - 1


@dataclass(frozen=True)
class Restructured:
    """The dense view operator on the values, its dim arguments renumbered.

    Attributes:
        moves: from the old ragged dim and the canonical dim arguments to the new ragged dim.
        dims: schema names of the arguments that hold dims.
        grows: whether dims count in the result, one rank up, as for unsqueeze.
        keeps_ragged: whether the ragged dim may be named.
        in_place: the operand takes on the new shape and is returned itself.
    """

    moves: Callable[..., int]
    dims: tuple[str, ...] = ("dim",)
    grows: bool = False
    keeps_ragged: bool = False
    in_place: Any = None

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
        if self.in_place is not None:
            viewed = self.in_place(x._values, *inner.values())
            return x.become(NestedTensor(viewed, x._structure, ragged_dim))
        out = call.on_values(**inner)
        return NestedTensor(out, x._structure, ragged_dim)

    def _check(self, call: Call, x: NestedTensor, found: int | tuple[int, ...]) -> None:
        if isinstance(found, tuple):  # an order of all dims
            if len(found) != x.dim():
                raise errors.bad_shape(
                    call.name,
                    f"dims {found} for {errors.describe(x)}",
                    f"all {x.dim()} dims",
                    "Name every dim once.",
                )
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
