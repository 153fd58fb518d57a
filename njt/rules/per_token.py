"""Operators that treat every token alike: batch and ragged dims are only leading dims.

Batch and ragged dim: never looked at. Gaps: computed and ignored; where a dense result sums over tokens
(weight gradients) gap rows are left out. Ragged dim: any, as long as it is none of the operator's own
feature dims. May import bridge, tensor, kernels, errors, dims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from njt import _compat, bridge, dims, errors
from njt._compat import OpOverload
from njt.kernels import segments
from njt.rules.call import user_name
from njt.tensor import NestedTensor


@dataclass(frozen=True)
class PerToken:
    """The dense operator on values, below autograd; results with a row per token are nested, others stay dense.

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
            names = [a.name for a in _compat.schema(func).arguments]
            trailing = len(args[names.index(self.features)])
        check_features(user_name(func), x, trailing)

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


def check_features(op: str, x: NestedTensor, trailing: int) -> None:
    """Refuses a ragged dim among the `trailing` last dims.

    Raises:
        RuntimeError: the ragged dim is one of them.
    """
    if x._ragged_dim >= x.dim() - trailing:
        raise errors.no_ragged_dim(op, x, x._ragged_dim)


def zeroed(x: NestedTensor) -> Tensor:
    """The values of `x`, differentiable, with 0 in gap rows: what may reach a sum over rows.

    Unlike leaving gap rows out, it keeps the number of rows, so that a graph needs no size that data decide.
    """
    packed, structure, d = bridge.values(x), x._structure, x._ragged_dim - 1
    if not structure.has_gaps:
        return packed
    rows = packed.shape[d]
    if structure.is_traced:
        ids = segments.segment_ids(structure.offsets, structure.lengths, rows)
        mask = ids < structure.batch_size
    else:
        mask = structure.row_mask(rows)
    shape = [1] * packed.dim()
    shape[d] = rows
    return torch.where(
        mask.view(shape), packed, torch.zeros((), dtype=packed.dtype, device=packed.device)
    )


class Tokens:
    """The rows of one or more nested tensors of one structure, as dense operators want them.

    With `keep_gaps` gap rows hold what they hold: for operators whose result no gap row can reach; else 0.
    """

    def __init__(self, op: str, x: NestedTensor, keep_gaps: bool = False) -> None:
        self.op = op
        self.x = x
        self.keep_gaps = keep_gaps

    def rows(self, a: Any) -> Any:
        """The packed rows of a nested tensor, differentiable; anything else as it is."""
        if not isinstance(a, NestedTensor):
            return a
        x = self.x
        if a is not x and a._structure is not x._structure:
            aligned = bridge.align(a, x, self.op)
            if not isinstance(aligned, NestedTensor):
                raise errors.different_structures(self.op, a, x)
            a = aligned
        return bridge.values(a) if self.keep_gaps else zeroed(a)

    def nested(self, rows: Tensor, ragged_dim: int | None = None) -> NestedTensor:
        """Fresh rows as a nested tensor of the structure of `x`."""
        x = self.x
        return bridge.wrap(
            rows, x._structure, x._ragged_dim if ragged_dim is None else ragged_dim, x
        )


@dataclass(frozen=True)
class AsOne:
    """A function above autograd that mixes no rows: the batch goes in as one long sequence (1, *values).

    So every `dim` argument keeps its number, and channels stay in dim 1. Batch dim: refused. Ragged dim:
    refused, unless `ragged` takes it. Gaps: computed and ignored, or 0 where `sums`.

    Attributes:
        dense: the torch function f(x, *args, **options).
        names: positional arguments after `x`, in order.
        dim: name of the argument that holds the dim it works over, if any; `default` is its default.
        channels: whether it works with dim 1 (prelu), which then may not be ragged.
        sums: whether a dense operand gets a gradient that sums over rows.
        ragged: takes the place of `dense` where `dim` is the ragged dim: f(x, **options).
    """

    dense: Callable[..., Any]
    names: tuple[str, ...] = ()
    dim: str | None = None
    default: int | None = None
    channels: bool = False
    sums: bool = False
    ragged: Callable[..., Any] | None = None
    drops: tuple[str, ...] = field(default=("inplace",))

    def __call__(self, *args: Any, **options: Any) -> Any:
        op = bridge.name_of(self.dense)
        names = ("input", *self.names)
        options.update(zip(names, args))
        if "self" in options:
            options["input"] = options.pop("self")
        x = next((a for a in options.values() if isinstance(a, NestedTensor)), None)
        if x is None:
            return self.dense(**options)
        if self.dim is not None:
            given: Any = options.get(self.dim)
            given = self.default if given is None else given
            dim = dims.canonical(given, x.dim())
            options[self.dim] = dim
            if dim == 0:
                raise errors.no_batch_dim(op, x, 0)
            if dim == x._ragged_dim:
                if self.ragged is None:
                    raise errors.no_ragged_dim(op, x, dim)
                return self.ragged(options.pop("input"), **options)
        if self.channels and x._ragged_dim == 1:
            raise errors.no_ragged_dim(op, x, 1)
        tokens = Tokens(op, x, keep_gaps=not self.sums)
        inner = {
            k: tokens.rows(a).unsqueeze(0) if isinstance(a, NestedTensor) else a
            for k, a in options.items()
            if k not in self.drops
        }
        out = self.dense(inner.pop("input"), **inner).squeeze(0)
        r = x._ragged_dim
        if out.dim() < x.dim() - 1:  # the dim went away
            r = dims.drop(r, (options[self.dim or ""],))
        return tokens.nested(out, r)


@dataclass(frozen=True)
class OverFeatures:
    """A function above autograd over the last dims of every token, with dense weights.

    Batch and ragged dim: leading dims. Gaps: 0, since gradients of weights sum over rows.

    Attributes:
        dense: the torch function f(x, *args, **options).
        features: how many trailing dims it works over, or the position of the argument that lists them.
        listed: name of that argument.
    """

    dense: Callable[..., Any]
    features: int = 1
    listed: str | None = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        op = bridge.name_of(self.dense)
        given = (*args, *options.values())
        x = next((a for a in given if isinstance(a, NestedTensor)), None)
        if x is None:
            return self.dense(*args, **options)
        trailing = self.features
        if self.listed is not None:
            sizes = options[self.listed] if self.listed in options else args[1]
            trailing = 1 if isinstance(sizes, int) else len(sizes)
        tokens = Tokens(op, x)
        for a in given:
            if isinstance(a, NestedTensor):
                check_features(op, a, trailing)
        out = self.dense(
            *(tokens.rows(a) for a in args), **{k: tokens.rows(a) for k, a in options.items()}
        )
        return tokens.nested(out)
