"""Views: transposing, viewing, expanding features; storage shared, structure passed on.

What torch's derivative formulas handle for nested sizes stands below autograd, the rest above it, as dense
views of the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from njt import _compat, bridge, dims, errors
from njt._compat import OpOverload
from njt.registry import declare, declare_function, declare_named, implements
from njt.rules.reduction import one_node
from njt.rules.restructured import Restructured, inner_dim, packed, permuted, seen
from njt.structure import Structure
from njt.tensor import NestedTensor

aten = torch.ops.aten

declare(aten.transpose.int, Restructured(dims.swap, ("dim0", "dim1"), keeps_ragged=True))
declare(aten.permute.default, Restructured(permuted, ("dims",)))
declare(aten.unsqueeze.default, Restructured(dims.insert, grows=True, keeps_ragged=True))

for _overload, _rule in {
    aten.transpose_.default: Restructured(
        dims.swap, ("dim0", "dim1"), keeps_ragged=True, in_place=torch.transpose
    ),
    aten.unsqueeze_.default: Restructured(
        dims.insert, grows=True, keeps_ragged=True, in_place=torch.unsqueeze
    ),
}.items():
    declare(_overload, _rule)


@implements(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)
def _view(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NestedTensor:
    x, size = args[:2]
    inner, d = _inner_size("view", x, list(size))
    return NestedTensor(aten.view.default(x._values, inner), x._structure, d)


def _inner_size(op: str, x: NestedTensor, size: list[Any]) -> tuple[list[Any], int]:
    """The size of the values for a new size of `x`, and where the ragged dim is in it."""
    d = _ragged_position(op, x, size)
    r, shape = x._ragged_dim, x._values.shape
    pre, post = shape[: r - 1], shape[r:]
    return [*_filled(size[1:d], pre), shape[r - 1], *_filled(size[d + 1 :], post)], d


def _ragged_position(op: str, x: NestedTensor, size: list[Any]) -> int:
    """Which entry of the new size stands for the ragged dim."""
    ragged = x._structure.ragged_size
    for d, n in enumerate(size):
        if _compat.is_ragged_size(n):
            if d == 0 or not _compat.same_ragged_size(n, ragged):
                break
            return d
    else:
        open_dims = [d for d, n in enumerate(size) if d > 0 and isinstance(n, int) and n == -1]
        if len(open_dims) == 1:
            return open_dims[0]
        structure = x._structure
        if not structure.is_traced and structure.max_seqlen == structure.min_seqlen:
            before = math.prod(x._values.shape[: x._ragged_dim - 1])
            for d in range(1, len(size)):
                if size[d] == structure.max_seqlen and math.prod(size[1:d]) == before:
                    return d
    raise errors.bad_shape(
        op,
        f"size {tuple(size)} for {errors.describe(x)}",
        "the batch size first and the ragged size, or -1, where the ragged dim goes",
        "Use x.shape[i] of the ragged dim in the size, or flatten x.values() instead.",
    )


def _filled(size: list[Any], shape: Sequence[Any]) -> list[Any]:
    """`size` with a -1 replaced, so that the ragged dim alone may be open."""
    known = [n for n in size if not (isinstance(n, int) and n == -1)]
    if len(known) == len(size):
        return size
    missing = math.prod(shape) // max(math.prod(known), 1)
    return [missing if isinstance(n, int) and n == -1 else n for n in size]


def _sizes(given: tuple[Any, ...], named: dict[str, Any], *names: str) -> list[Any]:
    """A size passed as numbers, as one sequence or by name."""
    for name in names:
        if name in named:
            return list(named[name])
    if len(given) == 1 and isinstance(given[0], (list, tuple)):
        return list(given[0])
    return list(given)


def _rows_only(x: NestedTensor, size: list[Any]) -> bool:
    """Whether `size` merges batch and ragged dim: (-1, *), without a batch size in front."""
    if not size or x._ragged_dim != 1:
        return False
    first, rest = size[0], size[1:]
    if not (isinstance(first, int) and first == -1) or any(map(_compat.is_ragged_size, size)):
        return False
    per_row = math.prod(x._values.shape[1:])
    return not any(isinstance(n, int) and n == -1 for n in rest) and math.prod(rest) == per_row


def _reshape(x: Any, *given: Any, **named: Any) -> Tensor:
    size = _sizes(given, named, "shape", "size")
    if _rows_only(x, size):
        rows = bridge.compact_values(x) if x._structure.has_gaps else packed(x)
        return rows.reshape(size)
    inner, d = _inner_size("reshape", x, size)
    return seen(packed(x).reshape(inner), x, d)


def _view_named(x: Any, *given: Any, **named: Any) -> Tensor:
    dtype = named.get("dtype", given[0] if given else None)
    if isinstance(dtype, torch.dtype):
        if x._ragged_dim == x.dim() - 1 and dtype.itemsize != x.dtype.itemsize:
            raise errors.no_ragged_dim("view", x, x._ragged_dim)
        return seen(packed(x).view(dtype), x)
    size = _sizes(given, named, "size", "shape")
    if _rows_only(x, size):
        if x._structure.has_gaps:
            raise errors.bad_shape(
                "view",
                f"size {tuple(size)} for {errors.describe(x)} with gaps between its components",
                "components without gaps",
                "Use x.reshape, which copies.",
            )
        return packed(x).view(size)
    inner, d = _inner_size("view", x, size)
    return seen(packed(x).view(inner), x, d)


def _view_as(x: Any, other: Tensor) -> Tensor:
    return _view_named(x, *other.shape)


def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    rank, r = x.dim(), x._ragged_dim
    first, last = dims.canonical(start_dim, rank), dims.canonical(end_dim, rank)
    if first > last:
        raise errors.bad_shape(
            "flatten", f"start_dim {first} after end_dim {last}", "start_dim first", "Swap them."
        )
    if first == last:
        return x
    if first == 0:
        if r > last:
            raise errors.no_batch_dim("flatten", x, 0)
        rows = bridge.compact_values(x) if x._structure.has_gaps else packed(x)
        if r == 1:  # tokens in their order
            return rows.flatten(0, last - 1)
        # each component in turn, its own dims in their order
        return torch.cat([c.flatten(0, last - 1) for c in x.unbind()])
    if r < first or r > last:
        values = packed(x).flatten(first - 1, last - 1)
        return seen(values, x, r - (last - first) if r > last else r)
    if first < r:
        raise errors.no_ragged_dim("flatten", x, r)
    # the features of a row lie together: a component of n rows becomes n times as many elements
    factor = math.prod(x._values.shape[r:last])
    structure = scaled(x._structure, factor)
    return seen(packed(x).flatten(first - 1, last - 1), x, r, structure)


def scaled(structure: Structure, factor: Any) -> Structure:
    """Every length and offset `factor` times as large; made once."""

    def make() -> Structure:
        host = None if structure.is_traced or structure._host is None else structure.host_lengths()
        low, high = structure.known_min_seqlen, structure.known_max_seqlen
        return Structure.find(
            structure.offsets * factor,
            None if structure.lengths is None else structure.lengths * factor,
            min_seqlen=None if low is None else low * factor,
            max_seqlen=None if high is None else high * factor,
            host_lengths=None if host is None else [n * factor for n in host],
        )

    return structure.derived(f"scaled {factor}", make)


def _unflatten(x: Any, dim: int, sizes: Sequence[int]) -> Tensor:
    d = inner_dim("unflatten", x, dim)
    values = packed(x).unflatten(d, tuple(sizes))
    r = x._ragged_dim
    return seen(values, x, r if d + 1 > r else r + len(sizes) - 1)


def _squeeze(x: Any, dim: Any = None) -> Tensor:
    values, r = packed(x), x._ragged_dim
    if dim is None:
        named = [d for d in range(1, x.dim()) if d != r]
    else:
        given = (dim,) if isinstance(dim, int) else dim
        named = [inner_dim("squeeze", x, d) + 1 for d in given]
    gone = [d for d in named if values.shape[d - 1] == 1]
    if not gone:
        return seen(values, x)
    return seen(values.squeeze(tuple(d - 1 for d in gone)), x, dims.drop(r, gone))


def _squeeze_(x: Any, dim: Any = None) -> Tensor:
    """One in-place step per dim that goes, below autograd `x` itself changes its shape."""
    r = x._ragged_dim
    given = range(1, x.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    named = [d if dim is None else inner_dim("squeeze", x, d) + 1 for d in given if d != r]
    for d in sorted((d for d in named if x._values.shape[d - 1] == 1), reverse=True):
        bridge.below(aten.squeeze_.dim, x, d)
    return x


@implements(aten.squeeze_.dim)
def _squeeze_below(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim = args
    d = inner_dim("squeeze_", x, dim)
    if x._values.shape[d] != 1:
        return x
    r = dims.drop(x._ragged_dim, (d + 1,))
    return x.become(NestedTensor(x._values.squeeze(d), x._structure, r))


def _expand(x: Any, *given: Any, **named: Any) -> Tensor:
    size = _sizes(given, named, "size")
    new = len(size) - x.dim()
    if new > 0:
        raise errors.bad_shape(
            "expand",
            f"size {tuple(size)} for {errors.describe(x)}",
            f"{x.dim()} sizes, since new dims come before the batch dim",
            "Insert the dims first: x.unsqueeze(dim).",
        )
    structure, r = x._structure, x._ragged_dim
    for d, n in ((0, size[0]), (r, size[r])):
        if isinstance(n, int) and n == -1:
            continue
        if d == 0:
            fits = structure.is_traced or n == structure.batch_size
        elif _compat.is_ragged_size(n):
            fits = _compat.same_ragged_size(n, structure.ragged_size)
        else:
            fits = not structure.is_traced and structure.min_seqlen == structure.max_seqlen == n
        if not fits:
            raise errors.bad_shape(
                "expand",
                f"size {tuple(size)} for {errors.describe(x)}",
                "the sizes of batch and ragged dim, or -1 for them",
                "Use x.repeat to have components or rows more than once.",
            )
    inner = [*size[1:r], -1, *size[r + 1 :]]
    return seen(packed(x).expand(inner), x)


def _expand_as(x: Any, other: Tensor) -> Tensor:
    if not isinstance(x, NestedTensor):
        # a dense operand takes the rows of the nested one
        return x + torch.zeros_like(other, dtype=x.dtype)
    if isinstance(other, NestedTensor) and other._structure is not x._structure:
        x = bridge.align(x, other, "expand_as")
    return _expand(x, *other.shape)


def _diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    a, b = inner_dim("diagonal", x, dim1), inner_dim("diagonal", x, dim2)
    r = dims.drop(x._ragged_dim, (a + 1, b + 1))
    return seen(packed(x).diagonal(offset, a, b), x, r)


def _unfold(x: Any, dimension: int, size: int, step: int) -> Tensor:
    return seen(packed(x).unfold(inner_dim("unfold", x, dimension), size, step), x)


def _contiguous(x: Any, memory_format: torch.memory_format | None = None) -> Tensor:
    wanted = torch.contiguous_format if memory_format is None else memory_format
    if x.is_contiguous(memory_format=wanted):
        return x
    # a compiler, which names the format, means the values: the gaps of a gradient stay
    y = bridge.compact(x) if memory_format is None else x
    rows = bridge.values(y).contiguous(memory_format=wanted)
    return bridge.wrap(rows, y._structure, y._ragged_dim, x)


def _t(x: Any) -> Tensor:
    raise errors.no_batch_dim("t", x, 0)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "reshape": _reshape,
    "view_as": _view_as,
    "reshape_as": lambda x, other: _reshape(x, *other.shape),
    "flatten": _flatten,
    "unflatten": _unflatten,
    "squeeze": _squeeze,
    "expand": _expand,
    "expand_as": _expand_as,
    "diagonal": _diagonal,
    "unfold": _unfold,
    "contiguous": _contiguous,
    "ravel": lambda x: _flatten(x),
}
for _name, _handler in _FUNCTIONS.items():
    declare_named(_name, one_node(_name, _handler))
declare_named("view", one_node("view", _view_named), but=(aten.view.default,))
declare_named("squeeze_", one_node("squeeze_", _squeeze_), aten=())
declare_named("t", one_node("t", _t))
declare_named("t_", one_node("t_", _t))


# ---- complex numbers ------------------------------------------------------------------------------------------------
def _of_values(name: str, function: Any, grows: int = 0) -> Any:
    def handler(x: Any) -> Tensor:
        if grows < 0 and x._ragged_dim == x.dim() - 1:
            raise errors.no_ragged_dim(name, x, x._ragged_dim)
        return seen(function(packed(x)), x)

    return one_node(name, handler)


declare_named("view_as_real", _of_values("view_as_real", torch.view_as_real, 1))
declare_named("view_as_complex", _of_values("view_as_complex", torch.view_as_complex, -1))
declare_named("real", _of_values("real", torch.real))
declare_named("imag", _of_values("imag", torch.imag))
declare_function(_of_values("real", torch.real), torch.Tensor.real.__get__)  # type: ignore[attr-defined]
declare_function(_of_values("imag", torch.imag), torch.Tensor.imag.__get__)  # type: ignore[attr-defined]
declare_named("conj", _of_values("conj", torch.conj))
declare_named("resolve_conj", _of_values("resolve_conj", torch.resolve_conj))
declare_named("resolve_neg", _of_values("resolve_neg", torch.resolve_neg))
