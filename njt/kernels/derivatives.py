"""Derivatives of njt's own operators, in every mode of torch: one backward formula serves them all.

`register` stands where torch.library.register_autograd would, which knows neither torch.func nor forward mode. A
backward is linear in its cotangent, so the tangent of a result is the derivative of the backward: a second formula is
needed where a backward is not written in a way that can be differentiated at 0. Under vmap a mapped dim is one more
feature. Plain tensors only; may import _compat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import new_class
from typing import Any

import torch
from torch import Tensor

from njt import _compat

Formula = Callable[..., Any]


def register(
    library: torch.library.Library,
    name: str,
    backward: Formula,
    setup: Formula,
    *,
    mapped: Sequence[int] | None = None,
    jvp: Formula | None = None,
) -> None:
    """Gives an operator of `library` its derivatives.

    Args:
        name: of the operator, without namespace; its arguments are positional.
        backward: (ctx, *cotangents) -> a gradient or None for each argument; linear in the cotangents, and made
            of operators that can be differentiated again.
        setup: (ctx, inputs, output) saves what the formulas need.
        mapped: positions of the arguments whose trailing dims are features, as are the result's: vmap adds one.
            Default: vmap runs the operator in a loop.
        jvp: (ctx, *tangents) -> tangent of the result, if it can't be had from `backward`.
    """
    op = getattr(getattr(torch.ops, library.ns), name).default
    plain, under = _functions(op, backward, setup, mapped, pushed(backward) if jvp is None else jvp)

    def run(keyset: Any, *args: Any) -> Any:
        forward_mode = _compat.transforming()
        if forward_mode or _compat.wants_gradient(args):
            return plain.apply(*_compat.with_defaults(op, args), (keyset, forward_mode))
        return _compat.below_autograd(op, keyset, args)

    def run_under(*args: Any) -> Any:
        return under.apply(*_compat.with_defaults(op, args))

    library.impl(name, run, "Autograd", with_keyset=True)
    library.impl(name, run_under, _compat.UNDER_TRANSFORMS)


def _functions(
    op: Any, backward: Formula, setup: Formula, mapped: Sequence[int] | None, jvp: Formula
) -> tuple[Any, Any]:
    """The operator as a node of autograd: by itself, and for torch.func, which takes a separate setup."""

    def forward(ctx: Any, *args: Any) -> Any:
        *operands, (keyset, forward_mode) = args
        out = _compat.below_autograd(op, keyset, operands)
        if not forward_mode:
            setup(ctx, tuple(operands), out)
            return out
        out = _own(out)
        setup(_Saving(ctx), tuple(operands), out)
        ctx.size = _size(out)
        return out

    def plain_backward(ctx: Any, *grads: Any) -> Any:
        return *backward(ctx, *grads), None

    def plain_jvp(ctx: Any, *tangents: Any) -> Any:
        return jvp(ctx, *tangents[:-1])

    def setup_under(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        setup(_Saving(ctx), inputs, output)
        ctx.size = _size(output)

    def jvp_under(ctx: Any, *tangents: Any) -> Any:
        # torch turns forward mode off for a jvp, but tangents of outer levels are to be followed
        with _compat.following_tangents():
            return jvp(_Primals(ctx), *tangents)

    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        batched = [i for i, d in enumerate(in_dims) if d is not None]
        if mapped is not None and set(batched) <= set(mapped):
            trailing = [
                _trailing(a, in_dims[i], info.batch_size) if i in mapped else a
                for i, a in enumerate(args)
            ]
            out = op(*trailing)
            return out, out.dim() - 1
        parts = [
            op(*(a if d is None else a.select(d, k) for a, d in zip(args, in_dims)))
            for k in range(info.batch_size)
        ]
        if isinstance(parts[0], Tensor):
            return torch.stack(parts), 0
        return tuple(map(torch.stack, zip(*parts))), (0,) * len(parts[0])

    def node(**methods: Formula) -> Any:
        body = {n: staticmethod(f) for n, f in methods.items()}
        return new_class(
            op.name(), (torch.autograd.Function,), {}, lambda space: space.update(body)
        )

    plain = node(forward=forward, backward=plain_backward, jvp=plain_jvp)
    under = node(
        forward=lambda *args: op(*args),
        setup_context=setup_under,
        backward=backward,
        jvp=jvp_under,
        vmap=vmap,
    )
    return plain, under


def _trailing(a: Tensor, dim: int | None, size: int) -> Tensor:
    if dim is None:
        return a.unsqueeze(-1).expand(*a.shape, size)
    return a.movedim(dim, -1)


def _own(out: Any) -> Any:
    """Results that are no views, which torch would want tangents of the very same strides for."""
    if isinstance(out, tuple):
        return tuple(map(_own, out))
    return out.clone() if _compat.is_view(out) else out


def _size(out: Any) -> tuple[Any, ...]:
    first = out if isinstance(out, Tensor) else out[0]
    return tuple(first.shape), first.dtype


class _Saving:
    """A ctx that saves for both directions."""

    def __init__(self, ctx: Any) -> None:
        object.__setattr__(self, "ctx", ctx)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.ctx.save_for_backward(*tensors)
        self.ctx.save_for_forward(*tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.ctx, name, value)


class _Primals:
    """A ctx whose saved tensors are without the tangents of the level at work."""

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx
        self.saved_tensors = tuple(
            t if t is None else _compat.unpack_dual(t, level=0)[0] for t in ctx.saved_tensors
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


class _Asking:
    """A ctx whose formulas shall give a gradient for every argument that has a tangent."""

    def __init__(self, ctx: Any, tangents: Sequence[Any]) -> None:
        self.ctx = ctx
        self.needs_input_grad = tuple(t is not None for t in tangents)
        self.saved_tensors = ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


def pushed(backward: Formula) -> Formula:
    """The tangent of a result of one tensor by the transpose of its backward."""

    def jvp(ctx: Any, *tangents: Any) -> Any:
        asked = _Asking(ctx, tangents)
        shape, dtype = ctx.size
        given = [t for t in tangents if t is not None]
        pairs: list[Tensor] = []

        def pull(cotangent: Tensor) -> tuple[Tensor, ...]:
            found = backward(asked, cotangent)
            both = [(g, t) for g, t in zip(found, tangents) if g is not None and t is not None]
            pairs[:] = [t for _, t in both]
            return tuple(g for g, _ in both)

        if not given or (not dtype.is_floating_point and not dtype.is_complex):
            return None
        zero = given[0].new_zeros(shape, dtype=dtype)
        push = torch.func.vjp(pull, zero)[1]
        return push(tuple(pairs))[0]

    return jvp
