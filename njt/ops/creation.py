"""Copies, casts and factories that follow a nested tensor's structure."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from njt import _compat, errors
from njt._compat import OpOverload
from njt.registry import declare, declare_named, implements
from njt.rules.call import Call, user_name
from njt.rules.pointwise import Pointwise
from njt.tensor import NestedTensor

aten = torch.ops.aten


class Like:
    """A factory over the values of the first argument: batch, ragged dim and gaps as they are there."""

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        layout = kwargs.get("layout")
        if layout not in (None, torch.jagged):
            raise errors.bad_value(
                user_name(func), f"layout={layout}", "layout=torch.jagged", "Leave it out."
            )
        kwargs = {k: v for k, v in kwargs.items() if k != "layout"}
        args = tuple(a._values if isinstance(a, NestedTensor) else a for a in args)
        out = func(*args, **kwargs)
        if out.device == x._values.device:
            return x.with_values(out)
        return NestedTensor(out, x._structure.to(out.device), x._ragged_dim)


for _name in [
    "empty_like",
    "ones_like",
    "zeros_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
    "_to_copy",
    "bernoulli",
    "poisson",
    "pin_memory",
    "_pin_memory",
    "normal_functional",
]:
    for _overload_name in getattr(aten, _name).overloads():
        if not _overload_name.endswith("out"):
            declare(getattr(getattr(aten, _name), _overload_name), Like())


@implements(aten.clone.default)
def _clone(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    return x.with_values(func(x._values, **kwargs))


@implements(aten.detach.default, aten.alias.default)
def _detach(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].with_values(func(args[0]._values))


class NewSized:
    """`x.new_*(size)`: nested if the size holds a ragged size, dense if not."""

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call(func, args, kwargs)
        x, size = call.nested, call["size"]
        kwargs = {k: v for k, v in kwargs.items() if k != "layout"}
        ragged = [d for d, n in enumerate(size) if _compat.is_ragged_size(n)]
        if not ragged:
            return func(x._values, *args[1:], **kwargs)
        if not _compat.same_ragged_size(size[ragged[0]], x._structure.ragged_size):
            raise errors.bad_shape(
                call.name,
                f"size {tuple(size)} with a ragged size of another tensor",
                f"the ragged size of {errors.describe(x)}",
                "Call it on the tensor that the size comes from.",
            )
        d = ragged[0]
        rows = x._values.shape[x._ragged_dim - 1]
        inner = [*size[1:d], rows, *size[d + 1 :]]
        out = func(x._values, inner, *args[2:], **kwargs)
        return NestedTensor(out, x._structure.to(out.device), d)


for _name in ("new_empty", "new_zeros", "new_ones", "new_full"):
    declare(getattr(aten, _name).default, NewSized())


@implements(aten.new_empty_strided.default)
def _new_empty_strided(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = Call(func, args, kwargs)
    x, size, stride = call.nested, call["size"], call["stride"]
    kwargs = {k: v for k, v in kwargs.items() if k != "layout"}
    ragged = [d for d, n in enumerate(size) if _compat.is_ragged_size(n)]
    if not ragged:
        return func(x._values, size, stride, **kwargs)
    d = ragged[0]
    inner = [*size[1:d], x._values.shape[x._ragged_dim - 1], *size[d + 1 :]]
    out = func(x._values, inner, list(stride[1:]), **kwargs)
    made = NestedTensor(out, x._structure.to(out.device), d)
    if x._structure.has_gaps:
        # autograd makes its scratch gradient of a base this way and writes through views of it
        out.zero_()
        made._scratch = True
    return made


_write = Pointwise()


@implements(aten.copy_.default)
def _copy_(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = Call(func, args, kwargs)
    x, source = call["self"], call["src"]
    if not isinstance(x, NestedTensor):
        raise errors.bad_type(
            "copy_",
            "a nested source for a dense tensor",
            "a nested target",
            "Pad the source first.",
        )
    if isinstance(source, Tensor) and source.device != x.device:
        if isinstance(source, NestedTensor):
            structure = source._structure.to(x.device)
            source = NestedTensor(source._values.to(x.device), structure, source._ragged_dim)
        elif source.dim():
            source = source.to(x.device)
    if isinstance(source, NestedTensor) and _compat.written_back(x._values):
        x._values.copy_(source._values)  # its gaps are still those of x
        return x
    if x._structure.has_gaps and isinstance(source, Tensor):
        # rows are copied into place one by one, which converts nothing
        source = source.to(x.dtype)
    return _write(func, (x, source, call["non_blocking"]), {})


def _type_as(x: Any, other: Tensor) -> Tensor:
    return x.to(device=other.device, dtype=other.dtype)


declare_named("type_as", _type_as, aten=())
