"""Reductions, and operators over one dim that keep it: what they mean when batch, ragged or feature dims are named.

These are handlers above autograd: they compose differentiable operators on values. `one_node` makes a rule
the handler that goes into the tables. May import bridge, tensor, structure, errors, dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from njt import bridge, dims, errors
from njt.kernels import segments
from njt.registry import Handler
from njt.tensor import NestedTensor

# what torch calls the same argument elsewhere
_ALIASES = {"axis": "dim", "keepdims": "keepdim"}


def one_node(name: str, rule: Callable[..., Any]) -> Handler:
    """`rule(x, *args, **options)` as a handler: `input=`, `axis=`, `keepdims=` and `out=` are understood.

    A compiler takes it as one node of its graph and runs it with real tensors when it records their operators,
    so that a rule may look at structures of intermediate results.
    """

    def handler(*args: Any, **options: Any) -> Any:
        for alias, usual in _ALIASES.items():
            if alias in options:
                options[usual] = options.pop(alias)
        for first in ("input", "self"):
            if first in options:
                args = (options.pop(first), *args)
        out = options.pop("out", None)
        result = rule(*args, **options)
        return result if out is None else into(out, result)

    handler.__name__ = handler.__qualname__ = name
    taken: Handler = torch.compiler.allow_in_graph(handler)
    return taken


def in_place(name: str, handler: Handler) -> Handler:
    """The variant of `handler` that writes its result into `x` and returns `x`."""

    def write(x: Any, *args: Any, **options: Any) -> Any:
        return x.copy_(handler(kept_for_backward(x), *args, **options))

    return one_node(name, write)


def kept_for_backward(x: Any) -> Any:
    """What to compute on where the result then overwrites `x`: a copy if backward may need what was there."""
    return x.clone() if x.requires_grad and torch.is_grad_enabled() else x


def into(out: Any, result: Any) -> Any:
    """Writes results into `out=`, dense ones resized as torch does it."""
    if not isinstance(out, Tensor):
        return type(out)([into(o, r) for o, r in zip(out, result)])
    if not out.is_nested and out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


@dataclass(frozen=True)
class Reduction:
    """A reduction with the signature `f(x, *lead, dim=None, keepdim=False, **options)`.

    Batch dim: goes only together with the ragged dim (or when everything goes). Ragged dim: a segment kernel,
    features that go along being folded into it; the result is dense. Feature dims alone: the dense
    operator on the values; the result is nested. Gaps: never counted. Ragged dim elsewhere than 1: any.

    Attributes:
        dense: the torch function, for feature dims and for everything at once.
        ragged: f(values, offsets, *, lengths, dim, max_seqlen, **options) over each segment.
        lead: names of positional arguments between `x` and `dim` (for vector_norm: "ord").
        default: `dim` if none is given; None: everything.
        full: everything at once, where that differs from `dense` over one dim: f(flat values, **options).
        result: the named tuple of the results, where there are several.
        nonempty: the dense operator refuses to reduce no element at all.
        ids: whether the kernel wants to be told the component of each row.
    """

    dense: Callable[..., Any]
    ragged: Callable[..., Any]
    lead: tuple[str, ...] = ()
    default: int | None = None
    full: Callable[..., Any] | None = None
    result: Callable[[Sequence[Tensor]], Any] | None = None
    nonempty: bool = False
    ids: bool = True

    def __call__(self, x: Any, *args: Any, **options: Any) -> Any:
        options.update(zip((*self.lead, "dim", "keepdim"), args))
        if not isinstance(x, NestedTensor):
            return self.dense(x, **options)
        dim = options.pop("dim", self.default)
        keepdim = bool(options.pop("keepdim", False))
        going = dims.canonical_all(dim, x.dim())
        if x._ragged_dim not in going:
            if 0 in going:
                raise errors.no_batch_dim(name_of(self.dense), x, 0)
            return self._over_features(x, going, keepdim, options)
        if 0 in going:
            return self._over_batch(x, going, keepdim, options)
        return self._over_ragged(x, going, keepdim, options)

    def _over_features(
        self, x: NestedTensor, going: tuple[int, ...], keepdim: bool, options: dict[str, Any]
    ) -> Any:
        kept = {"keepdim": True} if keepdim else {}
        out = self.dense(bridge.values(x), dim=_one([d - 1 for d in going]), **kept, **options)
        ragged_dim = x._ragged_dim if keepdim else dims.drop(x._ragged_dim, going)
        return each(out, lambda o: bridge.wrap(o, x._structure, ragged_dim, x))

    def _over_batch(
        self, x: NestedTensor, going: tuple[int, ...], keepdim: bool, options: dict[str, Any]
    ) -> Any:
        if x._structure.is_traced and x._structure.has_gaps:
            return self._over_batch_traced(x, going, keepdim, options)
        packed = bridge.compact_values(x)
        if len(going) == x.dim():
            flat = packed.reshape(-1)
            out = self.full(flat, **options) if self.full else self.dense(flat, dim=0, **options)
            return each(out, lambda o: o.reshape([1] * x.dim())) if keepdim else out
        kept = {"keepdim": True} if keepdim else {}
        out = self.dense(packed, dim=_one([d - 1 for d in going if d > 0]), **kept, **options)
        return each(out, lambda o: o.unsqueeze(0)) if keepdim else out

    def _over_batch_traced(
        self, x: NestedTensor, going: tuple[int, ...], keepdim: bool, options: dict[str, Any]
    ) -> Any:
        # how many rows are left without gaps is unknown in a graph, so they become one segment
        d, ids = x._ragged_dim - 1, segment_ids(x)
        used = ids < x._structure.batch_size
        packed = bridge.values(x).index_select(d, torch.argsort(~used, stable=True))
        offsets = torch.nn.functional.pad(used.sum().view(1), (1, 0))
        place = {"offsets": offsets, "lengths": None, "max_seqlen": packed.shape[d]}
        features = [f - 1 for f in going if f not in (0, x._ragged_dim)]
        out = self._segments(packed, d, features, place, options)
        if self.full and len(going) == x.dim() and not isinstance(out, Tensor):
            out = out[0]
        out = each(out, lambda o: o.squeeze(0))
        return each(out, lambda o: _kept(o, sorted(going))) if keepdim else out

    def _over_ragged(
        self, x: NestedTensor, going: tuple[int, ...], keepdim: bool, options: dict[str, Any]
    ) -> Any:
        if self.nonempty:
            check_rows(name_of(self.dense), x)
        features = [f - 1 for f in going if f != x._ragged_dim]
        d = x._ragged_dim - 1
        place = place_of(x, ids=self.ids and not features)
        out = self._segments(bridge.values(x), d, features, place, options)
        return each(out, lambda o: _kept(o, sorted(going))) if keepdim else out

    def _segments(
        self,
        packed: Tensor,
        d: int,
        features: list[int],
        place: dict[str, Any],
        options: dict[str, Any],
    ) -> Any:
        """The ragged dim at `d` and some dims of the values reduced together: (B, *others)."""
        if features:  # fold them into the ragged dim: rows of F elements become F rows
            packed, fold = _folded(packed, d, features)
            place = {name: None if p is None else p * fold for name, p in place.items()}
            place["ids"] = None
            d -= sum(f < d for f in features)
        offsets = place["offsets"]
        rest = {name: p for name, p in place.items() if name != "offsets"}
        out = self.ragged(packed, offsets, dim=d, **rest, **options)
        return out if self.result is None else self.result(out)


@dataclass(frozen=True)
class DimMapped:
    """An operator with one `dim` argument whose result has the shape of its input.

    Batch dim: refused. Ragged dim: `ragged` runs over each segment. Gaps: the kernel's task; over features
    computed and ignored. Ragged dim elsewhere than 1: any.

    Attributes:
        dense: the torch function f(values, *, dim, ...).
        ragged: f(values, offsets, *, lengths, dim, max_seqlen, **options), or None: refused.
        names: positional arguments after `x`, in order.
        default: `dim` if none is given.
        result: the named tuple of the results, where there are several.
        drops: options that change nothing.
    """

    dense: Callable[..., Any]
    ragged: Callable[..., Any] | None
    names: tuple[str, ...] = ("dim",)
    default: int | None = None
    result: Callable[[Sequence[Tensor]], Any] | None = None
    drops: tuple[str, ...] = ()

    def __call__(self, x: Any, *args: Any, **options: Any) -> Any:
        options.update(zip(self.names, args))
        if not isinstance(x, NestedTensor):
            return self.dense(x, **options)
        op = name_of(self.dense)
        dim = options.pop("dim", self.default)
        if dim is None:
            raise errors.bad_type(op, "no dim", "dim= of the nested tensor", "Pass dim=-1.")
        dim = dims.canonical(dim, x.dim())
        if dim == 0:
            raise errors.no_batch_dim(op, x, 0)
        if dim != x._ragged_dim:
            out = self.dense(bridge.values(x), dim=dim - 1, **options)
        elif self.ragged is None:
            raise errors.no_ragged_dim(op, x, dim)
        else:
            kept = {name: o for name, o in options.items() if name not in self.drops}
            out = self.ragged(bridge.values(x), dim=dim - 1, **place_of(x), **kept)
            if self.result is not None:
                out = self.result(out)
        return each(out, lambda o: bridge.wrap(o, x._structure, x._ragged_dim, x))


def place_of(x: NestedTensor, ids: bool = True) -> dict[str, Any]:
    """Where the components of `x` lie, as the keyword arguments of kernels.

    ids: with the component of each row, which most kernels need and the structure keeps; graphs make their own.
    """
    structure = x._structure
    return {
        "offsets": structure.offsets,
        "lengths": structure.lengths,
        "max_seqlen": structure.known_max_seqlen,
        "ids": segment_ids(x) if ids and not structure.is_traced else None,
    }


def segment_ids(x: NestedTensor) -> Tensor:
    """(rows,) the component of each row of the values, B in gaps; kept by the structure."""
    structure, rows = x._structure, x._values.shape[x._ragged_dim - 1]
    return structure.derived(
        f"segment_ids {rows}" if not structure.is_traced else "",
        lambda: segments.segment_ids(structure.offsets, structure.lengths, rows),
    )


def check_rows(op: str, x: NestedTensor, least: int = 1) -> None:
    """Refuses components of fewer than `least` rows, as far as that is known without asking a device or a tracer.

    Raises:
        IndexError: there is one.
    """
    structure = x._structure
    if structure.is_traced or structure.batch_size == 0:
        return
    shortest = structure.known_min_seqlen
    if shortest is None and structure.offsets.device.type == "cpu":
        shortest = structure.min_seqlen
    if isinstance(shortest, int) and shortest < least:
        text = errors.bad_shape(
            op,
            f"{errors.describe(x)} with a component of {shortest} rows",
            f"{least} or more to reduce over",
            "Leave empty components out, or pad: njt.to_padded_tensor(x, padding).",
        )
        raise IndexError(*text.args)


def name_of(function: Callable[..., Any]) -> str:
    """A function as users call it."""
    return str(getattr(function, "__name__", function)).removeprefix("linalg_").strip("_")


def each(out: Any, f: Callable[[Tensor], Any]) -> Any:
    """`f` of a result, or of each of several; named tuples keep their type."""
    if isinstance(out, Tensor):
        return f(out)
    return type(out)([f(o) for o in out])


def _one(inner: list[int]) -> Any:
    return inner[0] if len(inner) == 1 else inner


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
