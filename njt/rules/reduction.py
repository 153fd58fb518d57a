"""Reductions: which of batch, ragged and feature dims goes, and what comes out.

Batch dim: goes only together with the ragged dim (or when everything goes). Ragged dim: a segment kernel,
features that go along being folded into it; the result is dense. Feature dims alone: the dense operator
on the values; the result is nested. Gaps: never counted. Ragged dim elsewhere than 1: any.
These are handlers above autograd: they compose differentiable operators on values.
May import bridge, tensor, structure, errors, dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


from torch import Tensor

from njt import bridge, dims, errors
from njt.structure import Structure
from njt.tensor import NestedTensor


@dataclass(frozen=True)
class Reduction:
    """A reduction with the signature `f(x, dim=None, keepdim=False, **options)`.

    Attributes:
        dense: the torch function, for feature dims and for everything at once.
        ragged: f(values, offsets, *, lengths, dim, max_seqlen, **options) over each segment.
        lead: names of positional arguments between `x` and `dim` (for vector_norm: "ord").
    """

    dense: Callable[..., Any]
    ragged: Callable[..., Any]
    lead: tuple[str, ...] = field(default=())

    def __call__(self, x: Any, *args: Any, **options: Any) -> Any:
        names = (*self.lead, "dim", "keepdim")
        options.update(zip(names, args))
        dim = options.pop("axis", options.pop("dim", None))
        keepdim = options.pop("keepdim", False)
        if not isinstance(x, NestedTensor):
            return self.dense(x, dim=dim, keepdim=keepdim, **options)
        rank, ragged_dim = x.dim(), x._ragged_dim
        going = dims.canonical_all(dim, rank)
        if 0 in going and ragged_dim not in going:
            raise errors.no_batch_dim(_name(self.dense), x, 0)
        if ragged_dim not in going:
            return self._over_features(x, going, keepdim, options)
        if 0 in going:
            return self._over_batch(x, going, keepdim, options, dim is None)
        return self._over_ragged(x, going, keepdim, options)

    def _over_features(
        self, x: NestedTensor, going: tuple[int, ...], keepdim: bool, options: dict[str, Any]
    ) -> Any:
        inner: Any = [d - 1 for d in going]
        out = self.dense(bridge.values(x), dim=_one(inner), keepdim=keepdim, **options)
        ragged_dim = x._ragged_dim if keepdim else dims.drop(x._ragged_dim, going)
        return _each(out, lambda o: bridge.wrap(o, x._structure, ragged_dim, x))

    def _over_batch(
        self,
        x: NestedTensor,
        going: tuple[int, ...],
        keepdim: bool,
        options: dict[str, Any],
        everything: bool,
    ) -> Any:
        packed = bridge.compact_values(x)
        if len(going) == x.dim():
            flat = packed.reshape(-1)
            # some dense functions have no dim argument in their full form
            out = self.dense(flat, **options) if everything else self.dense(flat, dim=0, **options)
            return _each(out, lambda o: o.reshape([1] * x.dim()) if keepdim else o)
        inner = [d - 1 for d in going if d > 0]
        out = self.dense(packed, dim=_one(inner), keepdim=keepdim, **options)
        return _each(out, lambda o: o.unsqueeze(0) if keepdim else o)

    def _over_ragged(
        self, x: NestedTensor, going: tuple[int, ...], keepdim: bool, options: dict[str, Any]
    ) -> Any:
        packed, offsets, lengths, d = bridge.values(x), *ends(x._structure), x._ragged_dim - 1
        longest = x._structure.known_max_seqlen
        features = [f - 1 for f in going if f != x._ragged_dim]
        if features:  # fold them into the ragged dim: rows of F elements become F rows
            packed, fold = _folded(packed, d, features)
            offsets = offsets * fold
            lengths = None if lengths is None else lengths * fold
            longest = None if longest is None else longest * fold
            d -= sum(f < d for f in features)
        out = self.ragged(
            packed, offsets, lengths=lengths, dim=d, max_seqlen=longest, **options
        )
        if not keepdim:
            return out
        return _each(out, lambda o: _kept(o, sorted(going)))


def ends(structure: Structure) -> tuple[Tensor, Tensor | None]:
    """Offsets and lengths, as kernels take them."""
    return structure.offsets, structure.lengths


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function))


def _one(inner: list[int]) -> Any:
    return inner[0] if len(inner) == 1 else inner


def _each(out: Any, f: Callable[[Tensor], Any]) -> Any:
    if isinstance(out, Tensor):
        return f(out)
    return type(out)([f(o) for o in out])


def _kept(out: Tensor, going: Sequence[int]) -> Tensor:
    for d in going:
        out = out.unsqueeze(d)
    return out


def _folded(packed: Tensor, d: int, features: list[int]) -> tuple[Tensor, Any]:
    """Moves feature dims behind the ragged dim and merges them with it."""
    rest = [f for f in range(packed.dim()) if f not in features]
    at = rest.index(d)
    order = [*rest[: at + 1], *features, *rest[at + 1 :]]
    moved = packed.permute(order)
    merged = moved.flatten(at, at + len(features))
    fold: Any = 1
    for f in features:
        fold = fold * packed.shape[f]
    return merged, fold


@dataclass(frozen=True)
class DimMapped:
    """An operator with one `dim` argument whose result has the shape of its input.

    Batch dim: refused. Ragged dim: `ragged` runs over each segment. Gaps: the kernel's task; over features
    computed and ignored. Ragged dim elsewhere than 1: any.

    Attributes:
        dense: the torch function f(values, *args, dim, ...).
        ragged: f(values, offsets, *args, lengths, dim, max_seqlen, **options), or None: refused.
        names: positional arguments after `x`, in order.
        default: `dim` if none is given.
    """

    dense: Callable[..., Any]
    ragged: Callable[..., Any] | None
    names: tuple[str, ...] = ("dim",)
    default: int | None = None

    def __call__(self, x: Any, *args: Any, **options: Any) -> Any:
        options.update(zip(self.names, args))
        options.pop("_stacklevel", None)  # torch.nn.functional passes it on for its own warnings
        dim = options.pop("dim", self.default)
        if not isinstance(x, NestedTensor):
            return self.dense(x, dim=dim, **options)
        if dim is None:
            raise errors.bad_type(
                _name(self.dense), "no dim", "dim= of the nested tensor", "Pass dim=-1 for features."
            )
        dim = dims.canonical(dim, x.dim())
        if dim == 0:
            raise errors.no_batch_dim(_name(self.dense), x, 0)
        if dim != x._ragged_dim:
            out = self.dense(bridge.values(x), dim=dim - 1, **options)
        elif self.ragged is None:
            raise errors.no_ragged_dim(_name(self.dense), x, dim)
        else:
            offsets, lengths = ends(x._structure)
            out = self.ragged(
                bridge.values(x),
                offsets,
                lengths=lengths,
                dim=dim - 1,
                max_seqlen=x._structure.known_max_seqlen,
                **options,
            )
        return _each(out, lambda o: bridge.wrap(o, x._structure, x._ragged_dim, x))



