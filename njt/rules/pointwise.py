"""Pointwise operators: the same for every element, so they run on the values.

Batch and ragged dim: both are just elements; a dense operand broadcasts to every component, or holds
one row per component. Gaps: computed and ignored, but never written by in-place and `out=` variants.
Ragged dim: any, the same for all operands. May import bridge, tensor, kernels, errors, dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from njt import _compat, bridge, errors
from njt._compat import OpOverload
from njt.kernels import segments
from njt.rules.call import user_name
from njt.structure import Structure
from njt.tensor import NestedTensor


class Pointwise:
    """The dense operator on the values of all nested operands."""

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # the commonest call, one nested operand and numbers, takes the short way
        x = args[0] if args else None
        if type(x) is NestedTensor and not kwargs:
            for a in args[1:]:
                if isinstance(a, Tensor):
                    if (
                        type(a) is NestedTensor
                        and a._structure is x._structure
                        and a._ragged_dim == x._ragged_dim
                        and a._values.dim() == x._values.dim()
                    ):
                        continue
                    break
            else:
                if not _compat.schema(func).is_mutable:
                    inner = [a._values if type(a) is NestedTensor else a for a in args]
                    out = func(*inner)
                    if type(out) is tuple:
                        return tuple(x.with_values(o) for o in out)
                    return x.with_values(out)
        return self._general(func, args, kwargs)

    def _general(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = user_name(func)
        kwargs = {k: v for k, v in kwargs.items() if k != "layout"}
        operands = [a for a in (*args, *kwargs.values()) if isinstance(a, NestedTensor)]
        x = _leader(operands)
        written = _written(func, args, kwargs)
        for a in written:
            if not isinstance(a, NestedTensor):
                raise errors.bad_type(
                    op,
                    f"{errors.describe(a)} to write a nested result into",
                    "a nested tensor of the result's structure",
                    "Allocate it with torch.empty_like of a nested operand.",
                )
        target = written[0] if written else None
        lead = x if target is None else target
        compacted = target is not None and target._structure.has_gaps
        if target is not None and compacted and target._structure.is_traced:
            fit = _Fit(op, lead, compacted=False, copied=written)
        else:
            fit = _Fit(op, lead, compacted)
        inner_args = [fit(a) for a in args]
        inner_kwargs = {k: fit(v) for k, v in kwargs.items()}
        out = func(*inner_args, **inner_kwargs)
        if target is not None:
            if fit.copied:
                for a, copy in zip(written, fit.written(func, inner_args, inner_kwargs)):
                    a._values.copy_(torch.where(bridge.rows_in_use(a), copy, a._values))
            elif compacted:
                rows, d = target._structure.row_index(), target._ragged_dim - 1
                for a, written_rows in zip(written, fit.written(func, inner_args, inner_kwargs)):
                    a._values.index_copy_(d, rows, written_rows)
            return written[0] if len(written) == 1 else tuple(written)
        return _wrapped(lead, out)


def _leader(operands: list[NestedTensor]) -> NestedTensor:
    """The operand of highest rank; a batch of scalars (B, j1) may meet features (B, j1, D) never."""
    return max(operands, key=lambda a: a._values.dim())


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[NestedTensor]:
    if not _compat.schema(func).is_mutable:
        return []
    found = []
    for i, a in enumerate(_compat.schema(func).arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            found.append(args[i] if i < len(args) else kwargs[a.name])
    return found


def _wrapped(x: NestedTensor, out: Any) -> Any:
    if isinstance(out, Tensor):
        return x.with_values(out)
    return type(out)(_wrapped(x, o) for o in out)


@dataclass(frozen=True)
class PointwiseAbove:
    """A handler above autograd, for functions whose derivative in torch can't take nested sizes.

    The rest as `Pointwise`.
    """

    dense: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = {{"self": "input"}.get(k, k): a for k, a in kwargs.items()}
        operands = [a for a in (*args, *kwargs.values()) if isinstance(a, NestedTensor)]
        if not operands:
            return self.dense(*args, **kwargs)
        x = _leader(operands)
        fit = _Fit(self.dense.__name__, x, compacted=False, differentiable=True)
        out = self.dense(*(fit(a) for a in args), **{k: fit(a) for k, a in kwargs.items()})
        return bridge.wrap(out, x._structure, x._ragged_dim, x)


class _Fit:
    """Turns operands into tensors that line up with the values of `lead`."""

    def __init__(
        self,
        op: str,
        lead: NestedTensor,
        compacted: bool,
        differentiable: bool = False,
        copied: Sequence[NestedTensor] = (),
    ) -> None:
        self.differentiable = differentiable
        self.copied = copied  # written in a graph: a whole copy is, so that no size hangs on data
        self.op = op
        self.lead = lead
        self.compacted = compacted
        self.structure: Structure = lead._structure.compact() if compacted else lead._structure

    def __call__(self, a: Any) -> Any:
        if isinstance(a, NestedTensor):
            return self.nested(a)
        if isinstance(a, Tensor) and a.dim() > 0:
            return self.dense(a)
        if isinstance(a, (list, tuple)) and any(isinstance(e, Tensor) for e in a):
            return [self(e) for e in a]
        return a

    def written(self, func: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        return _written(func, tuple(args), kwargs)  # type: ignore[return-value]

    def nested(self, a: NestedTensor) -> Tensor:
        lead = self.lead
        if a is not lead:
            if a._structure is not lead._structure:
                aligned = bridge.align(a, lead, self.op)
                if not isinstance(aligned, NestedTensor):
                    return self.dense(aligned)
                a = aligned
            # fewer dims line up from the right, as dense operands do
            missing = lead.dim() - a.dim()
            if missing < 0 or missing != lead._ragged_dim - a._ragged_dim:
                raise errors.different_ragged_dims(self.op, lead, a)
        if self.compacted:
            return bridge.compact_values(a)
        if any(a is w for w in self.copied):
            return a._values.clone()
        return bridge.values(a) if self.differentiable else a._values

    def dense(self, t: Tensor) -> Tensor:
        """A dense operand, seen from the values."""
        x, rank = self.lead, self.lead.dim()
        d, missing = x._ragged_dim, rank - t.dim()
        if missing < 0:
            raise errors.not_broadcastable(self.op, x, t, "it has more dims")
        if missing > d:
            return t  # feature dims after the ragged one
        at_ragged = t.shape[d - missing]
        ones = at_ragged == 1
        if missing == 0 and t.shape[0] != 1:
            if t.shape[0] != x._structure.batch_size:
                raise errors.not_broadcastable(self.op, x, t, "its batch size differs")
            if ones:
                return self._per_component(t.squeeze(d), d - 1)
            return self._packed(t, at_ragged)
        inner = t.squeeze(0) if missing == 0 else t
        if ones:
            return inner
        full = (
            inner.expand(x._structure.batch_size, *([1] * (missing - 1)), *inner.shape)
            if missing
            else t.expand(x._structure.batch_size, *t.shape[1:])
        )
        return self._packed(full, at_ragged)

    def _per_component(self, t: Tensor, dim: int) -> Tensor:
        """(B, *pre, *post) to one row of each component for each of its rows."""
        structure = self.structure
        rows = self.lead._values.shape[self.lead._ragged_dim - 1]
        if self.compacted:
            rows = structure.row_index().shape[0]
        return segments.broadcast(t, structure.offsets, rows, lengths=structure.lengths, dim=dim)

    def _packed(self, t: Tensor, width: Any) -> Tensor:
        """(B, *pre, S, *post) where every component is S long, to packed rows."""
        structure, d = self.structure, self.lead._ragged_dim
        if structure.max_seqlen != width or structure.min_seqlen != width:
            raise errors.not_broadcastable(
                self.op, self.lead, t, f"dim {d} has size {width} and lengths vary"
            )
        packed = t.movedim(d, 1).flatten(0, 1).movedim(0, d - 1)
        rows = self.lead._values.shape[d - 1]
        return bridge.spread(packed, structure, rows, d - 1)
