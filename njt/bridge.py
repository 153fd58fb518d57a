"""Between packed values and NestedTensor, both ways and differentiable: each is the other's backward.

`values` and `nested_view` are views for autograd; `wrap` is the short way for values that nobody else
holds. `align` gives a second operand the structure of the first. May import tensor, structure, errors,
_compat.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from njt import _compat, errors, tensor
from njt.structure import Structure
from njt.tensor import NestedTensor

aten = torch.ops.aten
_no_function = _compat.no_torch_function


def values(x: NestedTensor) -> Tensor:
    """The packed values of `x`, differentiable; gap rows included, their gradient is zero."""
    if x.requires_grad and torch.is_grad_enabled():
        if _compat.transforming():
            return untracked(x)._values
        if x.dtype.is_complex:
            return _ComplexValues.apply(x)
        with _no_function():
            return aten._nested_get_values.default(x)
    return x._values


def nested_view(
    values: Tensor, structure: Structure, ragged_dim: int = 1, like: NestedTensor | None = None
) -> NestedTensor:
    """A nested tensor that is a view of `values` for autograd: writes through either are seen by both."""
    if _compat.transforming():
        return NestedTensor(values, structure, ragged_dim)
    if values.dtype.is_complex and values.requires_grad and torch.is_grad_enabled():
        return _ComplexView.apply(values, structure, ragged_dim)
    dummy = _dummy() if like is None else like
    with _no_function():
        return aten._nested_view_from_jagged.default(
            values, structure.offsets, dummy, structure.lengths, ragged_dim, None, structure.extent
        )


def wrap(
    values: Tensor, structure: Structure, ragged_dim: int = 1, like: NestedTensor | None = None
) -> NestedTensor:
    """A nested tensor over values that were just computed, so that no view need be tracked."""
    if structure.is_traced or (values.requires_grad and torch.is_grad_enabled()):
        return nested_view(values, structure, ragged_dim, like)
    return NestedTensor(values, structure, ragged_dim)


def untracked(x: NestedTensor) -> NestedTensor:
    """`x` as transforms want it: its values carry the graph, not the wrapper."""
    with _no_function():
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        with _compat.outside_transforms():
            packed = aten._nested_get_values.default(x)
    return NestedTensor(packed, x._structure, x._ragged_dim)


def tracked(x: NestedTensor) -> NestedTensor:
    """The reverse of `untracked`, for what leaves the last transform."""
    packed = x._values
    if not packed.requires_grad or _compat.is_transformed(packed):
        return x
    structure = x._structure
    with _no_function(), _compat.outside_transforms():
        return aten._nested_view_from_jagged.default(
            packed, structure.offsets, x, structure.lengths, x._ragged_dim, None, structure.extent
        )


class _ComplexValues(torch.autograd.Function):
    """Packed values of a complex tensor, for which torch's own view operator has no derivative."""

    @staticmethod
    def forward(ctx: Any, x: NestedTensor) -> Tensor:
        ctx.structure, ctx.ragged_dim = x._structure, x._ragged_dim
        return x._values.view_as(x._values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> NestedTensor:
        return wrap(stored(grad), ctx.structure, ctx.ragged_dim)


class _ComplexView(torch.autograd.Function):
    """The reverse of `_ComplexValues`."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, structure: Structure, ragged_dim: int) -> NestedTensor:
        return NestedTensor(packed, structure, ragged_dim)

    @staticmethod
    def backward(ctx: Any, grad: NestedTensor) -> tuple[Tensor, None, None]:
        return without_gaps(values(grad), grad), None, None


def compact_values(x: NestedTensor) -> Tensor:
    """The values of `x` without gap rows, differentiable; the values themselves where there are no gaps."""
    packed = values(x)
    if not x._structure.has_gaps:
        return packed
    return packed.index_select(x._ragged_dim - 1, x._structure.row_index())


def compact(x: NestedTensor) -> NestedTensor:
    """The same components without gaps; `x` itself where there are none."""
    if not x._structure.has_gaps:
        return x
    return wrap(compact_values(x), x._structure.compact(), x._ragged_dim, x)


def spread(packed: Tensor, structure: Structure, rows: int, dim: int) -> Tensor:
    """Packed rows without gaps moved to where `structure` has them among `rows` rows; gaps get 0."""
    if not structure.has_gaps:
        return packed
    shape = [*packed.shape[:dim], rows, *packed.shape[dim + 1 :]]
    return packed.new_zeros(shape).index_copy(dim, structure.row_index(), packed)


def restructured(y: NestedTensor, x: NestedTensor) -> NestedTensor:
    """`y`, whose component lengths are those of `x`, seen with the structure of `x`."""
    structure = x._structure
    if y._structure is structure:
        return y
    if y._structure.same_layout(structure) or not (y._structure.has_gaps or structure.has_gaps):
        return nested_view(values(y), structure, y._ragged_dim, x)
    rows = x._values.shape[x._ragged_dim - 1]
    if structure.is_traced:
        packed = _moved(values(y), y._structure, structure, rows, y._ragged_dim - 1)
    else:
        packed = spread(compact_values(y), structure, rows, y._ragged_dim - 1)
    return wrap(packed, structure, y._ragged_dim, x)


def _moved(packed: Tensor, old: Structure, new: Structure, rows: int, dim: int) -> Tensor:
    """Rows of one structure where another, of equal lengths, has them; gaps get 0. No size hangs on data."""
    row = torch.arange(rows, device=packed.device)
    b = torch.searchsorted(new.offsets[1:].long(), row, right=True).clamp(max=new.batch_size - 1)
    t = row - new.offsets[b]
    gap = (t < 0) | (t >= new.seqlens[b])
    shape = list(packed.shape)
    # what gaps get stands behind the last row
    source = torch.where(gap, shape[dim], old.offsets[b] + t)
    shape[dim] = 1
    return torch.cat([packed, packed.new_zeros(shape)], dim).index_select(dim, source)


@_compat.one_node
def align(y: NestedTensor, x: NestedTensor, op: str) -> Any:
    """`y` with the structure of `x`; a dense (B, 1, *) if every component of `y` is one row.

    Raises:
        RuntimeError: the lengths differ. Inside a graph the check runs with the graph.
    """
    a, b = y._structure, x._structure
    if a is b:
        return y
    equal = a.same_lengths(b)
    if equal:
        return restructured(y, x)
    if equal is None:
        torch._check(a.offsets.shape[0] == b.offsets.shape[0])
        alike = a.seqlens == b.seqlens if a.has_gaps or b.has_gaps else a.offsets == b.offsets
        if not a.has_gaps and not b.has_gaps:
            torch._check(y._values.shape[y._ragged_dim - 1] == x._values.shape[x._ragged_dim - 1])
        text = f"njt.{op}(): component lengths of the operands differ"
        _compat.check_later(alike.all(), text)
        return restructured(y, x)
    if a.batch_size == b.batch_size and a.max_seqlen == a.min_seqlen == 1:
        d = y._ragged_dim - 1
        return compact_values(y).movedim(d, 0).unsqueeze(d + 1)
    raise errors.different_structures(op, x, y)


def name_of(func: Callable[..., Any]) -> str:
    """The name of a torch function as users write it."""
    return str(getattr(func, "__name__", func))


def unify(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gives all nested arguments the structure of the first."""
    first = None
    for a in args:
        if isinstance(a, NestedTensor):
            if first is None:
                first = a
            elif torch.compiler.is_compiling() or a._structure is not first._structure:
                return _unified(name_of(func), args)
    return args


def unify_named(
    func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`unify` of arguments that came by name as well; what is written to stays itself."""
    names = [k for k, a in named.items() if isinstance(a, NestedTensor) and k != "out"]
    if not names:
        return unify(func, args), named
    alike = unify(func, (*args, *(named[k] for k in names)))
    return alike[: len(args)], {**named, **dict(zip(names, alike[len(args) :]))}


def _unified(op: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    nested = [a for a in args if isinstance(a, NestedTensor)]
    first = nested[0]
    if not torch.compiler.is_compiling():
        # a batch of single rows follows the others, whichever comes first
        first = next((a for a in nested if not _single_rows(a)), first)
    return tuple(
        align(a, first, op) if isinstance(a, NestedTensor) and a is not first else a for a in args
    )


def _single_rows(x: NestedTensor) -> bool:
    structure = x._structure
    return not structure.is_traced and structure.max_seqlen == structure.min_seqlen == 1


def below(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of `func` that does not come back to its handler but goes to the operators."""
    if _compat.transforming():
        return tensor._hooks["operators"](func, args, kwargs)
    with _no_function():
        return func(*args, **kwargs)


tensor._hooks["unify"] = unify
tensor._hooks["unify_named"] = unify_named
tensor._hooks["complex_values"] = values


_DUMMY: list[NestedTensor] = []


def _dummy() -> NestedTensor:
    """A nested tensor without data that brings a call to our class when no other is at hand."""
    if not _DUMMY:
        offsets = torch.zeros(3, device="meta", dtype=torch.int64)
        structure = Structure.find(offsets, min_seqlen=2, max_seqlen=3)
        _DUMMY.append(NestedTensor(torch.zeros(3, 3, device="meta"), structure))
    return _DUMMY[0]


_dummy()  # now: made during a trace it would belong to that trace for good


def masked_for_backward(x: NestedTensor) -> Tensor:
    """The values of a gradient: rows in gaps belong to nobody and must not carry what they hold."""
    return without_gaps(x._values.detach(), x)


def stored(packed: Tensor) -> Tensor:
    """`packed` with memory: a gradient of zeros without it is nothing that operators on values can read."""
    return packed.clone() if _compat.is_zero_tensor(packed) else packed


def without_gaps(packed: Tensor, x: NestedTensor) -> Tensor:
    """The values of `x`, zero in gap rows."""
    # the gradient of a step function is a tensor without storage, zero in gaps as well
    if not x._structure.has_gaps or _compat.is_zero_tensor(packed):
        return packed
    return torch.where(rows_in_use(x, packed), packed, packed.new_zeros(()))


def rows_in_use(x: NestedTensor, packed: Tensor | None = None) -> Tensor:
    """A mask that broadcasts to the values of `x`, or to others of its rows: False in gaps."""
    d, packed = x._ragged_dim - 1, x._values if packed is None else packed
    shape = [1] * packed.dim()
    shape[d] = -1
    return x._structure.row_mask(packed.shape[d]).view(shape)


def is_traced(x: NestedTensor) -> bool:
    """Whether `x` is part of a graph that is being recorded."""
    return x._structure.is_traced or _compat.proxy_tracing()


def running_backward() -> bool:
    """Whether the autograd engine runs the present operator."""
    return _compat.in_backward()
