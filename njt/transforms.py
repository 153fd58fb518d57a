"""torch.func (grad, vjp, jvp, vmap, and what is made of them) and forward mode, over functions of nested tensors.

A transform wraps and follows the values, never the nested tensor, whose structure is data to it. While one is at work
every call arrives here: handlers run as always, rules on values that the transform watches. Rows in gaps hold 1
wherever an operator computes, so that no gradient meets what lies there; in gradients and tangents they are 0.
May import bridge, tensor, registry, errors, dims, _compat. Importing it teaches torch.func.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from njt import _compat, bridge, errors, registry, tensor
from njt.tensor import NestedTensor

aten = torch.ops.aten

# functions that compute nothing: rows in gaps may stay what they are
_VIEWS = frozenset(
    {
        *("T", "H", "mT", "mH", "adjoint", "real", "imag", "view_as_real", "view_as_complex"),
        *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "contiguous", "to"),
        *("transpose", "permute", "swapdims", "swapaxes", "movedim", "moveaxis"),
        *("squeeze", "unsqueeze", "expand", "expand_as", "narrow", "select", "slice", "diagonal"),
        *("split", "chunk", "tensor_split", "unbind", "detach", "alias", "values"),
        *("hsplit", "vsplit", "dsplit", "split_with_sizes", "unsafe_split", "unsafe_chunk"),
        *("t", "conj", "resolve_conj", "resolve_neg", "ravel", "unfold", "as_strided"),
        *("linalg_diagonal", "broadcast_tensors"),
        *("numel", "nelement", "element_size", "is_shared", "is_pinned", "record_stream"),
        *("storage_offset", "storage", "untyped_storage", "data_ptr"),
        *("__getitem__", "__setitem__", "__get__", "__set__"),
    }
)


def _each(a: Any, change: Callable[[NestedTensor], Any]) -> Any:
    """`a`, or what is in it, with `change` of every nested tensor."""
    if isinstance(a, NestedTensor):
        return change(a)
    if type(a) in (list, tuple):
        return type(a)(_each(e, change) for e in a)
    if type(a) is dict:
        return {k: _each(e, change) for k, e in a.items()}
    return a


def _first(a: Any) -> NestedTensor | None:
    """The first nested tensor in arguments."""
    if isinstance(a, (list, tuple)):
        return next((x for x in map(_first, a) if x is not None), None)
    return a if isinstance(a, NestedTensor) else None


def _filled(x: NestedTensor) -> NestedTensor:
    """`x` with rows in gaps that every operator and its derivative can take."""
    if not x._structure.has_gaps:
        return x
    packed = x._values
    one = 1 if packed.is_floating_point() or packed.is_complex() else 0
    filled = torch.where(bridge.rows_in_use(x), packed, packed.new_full((), one))
    return NestedTensor(filled, x._structure, x._ragged_dim)


# calls


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Every call of a torch function with a nested argument while a transform is at work."""
    own = _OWN.get(func)
    if own is not None:
        return own(*args, **kwargs)
    changed = [bridge.name_of(func)]

    def enter(x: NestedTensor) -> NestedTensor:
        if _compat.tangents_are_dropped(x._values):
            raise _not_followed(changed[0], x)
        y = bridge.untracked(x)
        if y is not x and _writes(changed[0]):
            raise errors.unsupported(
                changed[0],
                "a nested tensor that requires grad, to be written to under a transform",
                "a tensor that the transformed function made, or one of its arguments",
                "Clone it first: x.clone().",
            )
        return y

    args, kwargs = _each(args, enter), _each(kwargs, enter)
    handler = registry.FUNCTIONS.get(func)
    if handler is not None:
        if not (changed[0] in _VIEWS or _writes(changed[0])):
            args, kwargs = _each(args, _filled), _each(kwargs, _filled)
        return handler(*args, **kwargs)
    if len(args) > 1:
        args = bridge.unify(func, args)
    try:
        return _operators(func, args, kwargs)
    except errors.Undeclared as missing:
        return tensor._hooks["undeclared"](func, args, kwargs, missing)


def _operators(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return _compat.call_on_wrappers(func, args, kwargs, _operator)


def _writes(name: str) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    return (
        in_place or name == "__setitem__" or (name.startswith("__i") and name not in _NOT_WRITING)
    )


_NOT_WRITING = ("__index__", "__int__", "__invert__", "__iter__")


def _operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operator of such a call, its transforms in force."""
    if _first((args, tuple(kwargs.values()))) is None:
        return func(*args, **kwargs)
    own = _OWN_OPERATORS.get(func)
    if own is not None:
        return own(*args, **kwargs)
    rule = registry.lookup(func)
    if registry.is_composite(rule):
        return _compat.decompose_on_wrappers(func, args, kwargs, _operator)
    if _computes(func):
        args, kwargs = _each(args, _filled), _each(kwargs, _filled)
    return rule(func, args, kwargs)


@cache
def _computes(func: Any) -> bool:
    """Whether an operator makes new values: no view, nothing written, no mere question."""
    schema = _compat.schema(func)
    parts = (*schema.arguments, *schema.returns)
    makes = any("Tensor" in str(r.type) for r in schema.returns)
    return makes and all(a.alias_info is None for a in parts)


def _not_followed(op: str, x: NestedTensor) -> NotImplementedError:
    return errors.unsupported(
        op,
        f"{errors.describe(x)} with a tangent inside of an autograd.Function",
        "a function whose tangents are known",
        "Write the function over the values and give it a jvp, or use torch operators.",
    )


# refusals


def _no_functionalize(*args: Any) -> Any:
    raise errors.unsupported(
        "functionalize",
        errors.describe(_first(args)),
        "dense tensors",
        "Pass x.values() and x.offsets(), and make the nested tensor inside.",
    )


def _no_jacobian(*args: Any, **options: Any) -> Any:
    raise errors.unsupported(
        "jacrev or jacfwd",
        errors.describe(_first(args)),
        "dense tensors, of which each element has a row or column",
        "Write the function from values to values: x.values().",
    )


def _no_function(*args: Any) -> Any:
    raise errors.unsupported(
        "autograd.Function",
        f"{errors.describe(_first(args))} under torch.func",
        "dense operands",
        "Write the function over the values: Function.apply(x.values()).",
    )


# what is said of the values where it is asked of the tensor


def _requires_grad(x: NestedTensor) -> bool:
    with _compat.no_torch_function():
        own = x.requires_grad
    return own or x._values.requires_grad


def _set_requires_grad(x: NestedTensor, requires_grad: bool = True) -> NestedTensor:
    if _compat.functorch_active():
        x._values.requires_grad_(requires_grad)
        return x
    with _compat.no_torch_function():
        return torch.Tensor.requires_grad_(x, requires_grad)  # type: ignore[return-value]


def _as_sequence(a: Any) -> Sequence[Any]:
    return a if isinstance(a, (list, tuple)) else (a,)


def _grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **options: Any) -> Any:
    """torch.autograd.grad over the values of what is nested."""
    return _pull(torch.autograd.grad, outputs, inputs, grad_outputs, *args, **options)


def _pull(
    dense: Any, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **options: Any
) -> tuple[Any, ...]:
    """Gradients by the dense function; gap rows neither give nor get one.

    A pullback is called when its transform is over: only values still know of the graph then.
    """
    outputs, inputs = _as_sequence(outputs), _as_sequence(inputs)
    given = [None] * len(outputs) if grad_outputs is None else _as_sequence(grad_outputs)
    cotangents = [_like(g, y, "grad") for g, y in zip(given, outputs, strict=True)]
    found = dense(
        tuple(bridge.values(y) if isinstance(y, NestedTensor) else y for y in outputs),
        tuple(x._values if isinstance(x, NestedTensor) else x for x in inputs),
        None if grad_outputs is None else tuple(cotangents),
        *args,
        **options,
    )
    return tuple(
        bridge.tracked(_derivative(g, x)) if isinstance(x, NestedTensor) and g is not None else g
        for g, x in zip(found, inputs)
    )


def _like(t: Any, x: Any, op: str) -> Any:
    """The values of a cotangent or tangent of `x`, 0 in gaps."""
    if t is None or not (isinstance(t, NestedTensor) or isinstance(x, NestedTensor)):
        return t
    fits = isinstance(t, NestedTensor) and isinstance(x, NestedTensor)
    if fits:
        t = bridge.align(t, x, op)
        fits = isinstance(t, NestedTensor) and t._ragged_dim == x._ragged_dim
        fits = fits and t._values.shape == x._values.shape
    if not fits:
        raise errors.bad_shape(
            op,
            f"{errors.describe(t)} for {errors.describe(x)}",
            "a tensor of the same shape and structure",
            "Make it like the other: torch.ones_like(x).",
        )
    return bridge.without_gaps(bridge.values(t), t)


def _derivative(packed: Tensor, x: NestedTensor) -> NestedTensor:
    """A gradient or tangent of `x`, over memory that operators can read and 0 in gaps."""
    kept = bridge.without_gaps(bridge.stored(packed), x)
    return NestedTensor(kept, x._structure, x._ragged_dim)


def _make_dual(x: Any, tangent: Any, **options: Any) -> NestedTensor:
    inner, packed = _like(tangent, x, "make_dual"), bridge.values(x)
    if (packed.is_conj(), packed.is_neg()) != (inner.is_conj(), inner.is_neg()):
        # views of such a pair are an error inside of torch
        inner, packed = (t.resolve_conj().resolve_neg() for t in (inner, packed))
    dual = _compat.make_dual(packed, inner, **options)
    return NestedTensor(dual, x._structure, x._ragged_dim)


def _unpack_dual(x: NestedTensor, **options: Any) -> tuple[Any, Any]:
    primal, inner = _compat.unpack_dual(bridge.values(x), **options)
    tangent = None if inner is None else _derivative(inner, x)
    out = NestedTensor(primal, x._structure, x._ragged_dim)
    if not _compat.functorch_active():
        return bridge.tracked(out), None if tangent is None else bridge.tracked(tangent)
    return out, tangent


_OWN: dict[Any, Callable[..., Any]] = {
    torch.Tensor.requires_grad.__get__: _requires_grad,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__set__: _set_requires_grad,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad_: _set_requires_grad,
    torch.autograd.grad: _grad,
    _compat.custom_function_call: _no_function,
    _compat.make_dual: _make_dual,
    _compat.unpack_dual: _unpack_dual,
}


def _view_from_jagged(
    packed: Tensor, offsets: Tensor, like: Any, lengths: Any = None, ragged_dim: Any = 1, *rest: Any
) -> NestedTensor:
    structure = tensor.Structure.find(offsets, lengths, extent=rest[1] if len(rest) > 1 else None)
    return NestedTensor(packed, structure, 1 if ragged_dim is None else ragged_dim)


_OWN_OPERATORS: dict[Any, Callable[..., Any]] = {
    aten._nested_get_values.default: bridge.values,
    aten.values.default: bridge.values,
    aten._nested_view_from_jagged.default: _view_from_jagged,
}


# the doors of torch.func


def _wrap_for_grad(dense: Any, x: NestedTensor, level: int) -> NestedTensor:
    packed = bridge.untracked(x)._values
    return NestedTensor(dense(packed, level), x._structure, x._ragged_dim)


def _unwrap_for_grad(dense: Any, x: NestedTensor, level: int) -> NestedTensor:
    return bridge.tracked(NestedTensor(dense(x._values, level), x._structure, x._ragged_dim))


def _add_batch_dim(dense: Any, x: NestedTensor, dim: int, level: int) -> NestedTensor:
    r = x._ragged_dim
    if dim in (0, r):
        what = "batch" if dim == 0 else "ragged"
        raise errors.unsupported(
            "vmap",
            f"in_dims={dim}, the {what} dim of {errors.describe(x)}",
            "a dense dim of the nested tensor, or None",
            "Components differ in length: write the function for the whole batch, or loop over x.unbind().",
        )
    packed = dense(bridge.untracked(x)._values, dim - 1, level)
    return NestedTensor(packed, x._structure, r - (dim < r))


def _remove_batch_dim(dense: Any, x: NestedTensor, level: int, size: int, dim: int) -> NestedTensor:
    rank = x.dim() + 1
    at = dim % rank if -rank <= dim < rank else dim
    if at == 0:
        raise errors.unsupported(
            "vmap",
            f"out_dims={dim} for {errors.describe(x)}",
            "a place behind the batch dim, which comes first",
            "Pass out_dims=1 or more, or return a dense tensor: y.values().",
        )
    packed = dense(x._values, level, size, at - 1)
    r = x._ragged_dim
    return bridge.tracked(NestedTensor(packed, x._structure, r + (at <= r)))


def _is_batched(dense: Any, x: NestedTensor) -> bool:
    return bool(dense(x._values))


def _linearize(function: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[..., Any]]:
    """torch.func.linearize, which runs the function anew for each tangent: no graph is kept."""

    def push(*tangents: Any) -> Any:
        return torch.func.jvp(function, primals, tangents)[1]

    return function(*primals), push


tensor._hooks["transformed"] = _call
tensor._hooks["operators"] = _operators
_compat.teach_transforms(
    NestedTensor,
    {
        "eager_transforms._wrap_for_grad": _wrap_for_grad,
        "eager_transforms._unwrap_for_grad": _unwrap_for_grad,
        "eager_transforms._wrap_functional_tensor": _no_functionalize,
        "eager_transforms._autograd_grad": _pull,
        "eager_transforms._chunked_standard_basis_for_": _no_jacobian,
        "vmap._add_batch_dim": _add_batch_dim,
        "vmap._remove_batch_dim": _remove_batch_dim,
        "vmap.is_batchedtensor": _is_batched,
        "autograd_function._unwrap_for_grad": _no_function,
        "autograd_function._add_batch_dim": _no_function,
    },
)
_compat.door_in_function(torch.func.linearize, NestedTensor, _linearize)
