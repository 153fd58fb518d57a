"""The two copies as operators: schema, checks, implementation by device, fakes, gradients.

values (*pre, total_length, *post), offsets (B + 1,) <-> padded (B, *pre, width, *post). Every way in, a direct call of
`torch.ops.njt.*` too, goes through the checks here. What a device holds is read on CPU only: on a GPU, shapes,
dtypes and devices are checked, and the kernel touches nothing outside, whatever the offsets say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from njt import _compat
from njt.kernels import derivatives, padding_cpu, padding_filler, padding_inductor, padding_triton

_LIBRARY = torch.library.Library("njt", "FRAGMENT")
_PAD = "Tensor values, Tensor offsets, Tensor? lengths, SymInt width, Scalar padding, int values_dim, bool left"
_UNPAD = (
    "Tensor padded, Tensor offsets, Tensor? lengths, SymInt total_length, int values_dim, bool left, "
    "bool partial=False"
)
for _name, _arguments in ("packed_to_padded", _PAD), ("padded_to_packed", _UNPAD):
    _LIBRARY.define(f"{_name}({_arguments}) -> Tensor")
    _LIBRARY.define(f"{_name}.out({_arguments}, *, Tensor(a!) out) -> Tensor(a!)")

# implementation of both copies by device type; Triton serves every device that it knows
IMPLEMENTATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "cpu": (padding_cpu.packed_to_padded, padding_cpu.padded_to_packed),
    "cuda": (padding_triton.packed_to_padded, padding_triton.padded_to_packed),
}
_INDEX_DTYPES = (torch.int64, torch.int32)


# checks


def check_pad(
    values: Tensor, offsets: Tensor, lengths: Tensor | None, width: Any, values_dim: int
) -> None:
    """What can be seen of a call of packed_to_padded without a look at the device."""
    op = "packed_to_padded"
    _check(op, values, offsets, lengths, values_dim, values.dim())
    if isinstance(width, int) and width < 0:
        raise RuntimeError(
            f"{op}(): got width {width}. Expected 0 or more. Pass the longest length."
        )


def check_unpad(
    padded: Tensor, offsets: Tensor, lengths: Tensor | None, total_length: Any, values_dim: int
) -> None:
    """What can be seen of a call of padded_to_packed without a look at the device."""
    op = "padded_to_packed"
    _check(op, padded, offsets, lengths, values_dim, padded.dim() - 1)
    batch = padded.shape[0]
    if isinstance(batch, int) and batch != offsets.shape[0] - 1:
        raise RuntimeError(
            f"{op}(): got padded {tuple(padded.shape)} and {offsets.shape[0]} offsets. "
            f"Expected one offset more than the batch size. Check the batch dims."
        )
    if isinstance(total_length, int) and total_length < 0:
        raise RuntimeError(
            f"{op}(): got total_length {total_length}. Expected 0 or more. Leave it out, or pass the sum of "
            f"the lengths."
        )


def _check(
    op: str, x: Tensor, offsets: Tensor, lengths: Tensor | None, values_dim: int, rank: int
) -> None:
    _check_vector(op, "offsets", offsets, x)
    if lengths is not None:
        _check_vector(op, "lengths", lengths, x)
    if not 0 <= values_dim < rank:
        raise RuntimeError(
            f"{op}(): got values_dim {values_dim} for a tensor {tuple(x.shape)}. Expected a dim in "
            f"0..{rank - 1}. Count the dims of the values, without the batch."
        )
    if offsets.shape[0] < 1 or (lengths is not None and lengths.shape[0] != offsets.shape[0] - 1):
        count = None if lengths is None else lengths.shape[0]
        raise RuntimeError(
            f"{op}(): got {offsets.shape[0]} offsets and {count} lengths. Expected one offset more "
            f"than lengths. Offsets hold the start of each segment and one end."
        )


def _check_vector(op: str, name: str, vector: Tensor, x: Tensor) -> None:
    if vector.dim() != 1 or vector.dtype not in _INDEX_DTYPES:
        raise RuntimeError(
            f"{op}(): got {name} {tuple(vector.shape)} of {vector.dtype}. Expected one dim of "
            f"int32 or int64. Pass {name}.flatten().long()."
        )
    if vector.device != x.device:
        raise RuntimeError(
            f"{op}(): got rows on {x.device} and {name} on {vector.device}. Expected one device. "
            f"Move it: {name}.to({str(x.device)!r})."
        )


def check_out(op: str, x: Tensor, size: Any, out: Tensor) -> None:
    """An `out` is taken as it is or refused: it is never resized, and no gradient goes through it."""
    if tuple(out.shape) != tuple(size) or out.dtype != x.dtype or out.device != x.device:
        raise RuntimeError(
            f"{op}(): got out {tuple(out.shape)} of {out.dtype} on {out.device}. Expected {tuple(size)} of "
            f"{x.dtype} on {x.device}. Make it so, or leave it out."
        )
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise RuntimeError(
            f"{op}(): got out= and a tensor that requires grad. Expected no gradient, for out= has none. "
            f"Leave out= away, or call under torch.no_grad()."
        )


# implementations


def pad_into(out: Tensor | None, *args: Any) -> Tensor:
    """packed_to_padded on the device of its values, into `out` if there is one; arguments were checked."""
    values, offsets, lengths, width, padding, *rest = args
    padding = padding_filler.checked("packed_to_padded", padding, values.dtype)
    run = IMPLEMENTATIONS[values.device.type][0]
    return _into(run, out, (values, offsets, lengths, width, padding, *rest))


def unpad_into(out: Tensor | None, *args: Any) -> Tensor:
    """padded_to_packed on the device of the rectangle, into `out` if there is one; arguments were checked."""
    return _into(IMPLEMENTATIONS[args[0].device.type][1], out, args)


def _into(run: Callable[..., Tensor], out: Tensor | None, args: tuple[Any, ...]) -> Tensor:
    if out is None:
        return run(*args)
    memory = out.untyped_storage().data_ptr()
    shared = any(t is not None and t.untyped_storage().data_ptr() == memory for t in args[:3])
    if shared or not out.is_contiguous():
        return out.copy_(run(*args))
    run(*args, out=out)
    torch.autograd.graph.increment_version(out)
    return out


def _packed_to_padded(*args: Any, out: Tensor | None = None) -> Tensor:
    _check_pad_call(args, out)
    return pad_into(out, *args)


def _padded_to_packed(*args: Any, out: Tensor | None = None) -> Tensor:
    _check_unpad_call(args, out)
    return unpad_into(out, *args)


def _check_pad_call(args: tuple[Any, ...], out: Tensor | None) -> None:
    values, offsets, lengths, width, padding, values_dim, _ = args
    check_pad(values, offsets, lengths, width, values_dim)
    padding_filler.checked("packed_to_padded", padding, values.dtype)
    if out is not None:
        size = padded_size(values, offsets, width, values_dim)
        check_out("packed_to_padded", values, size, out)


def _check_unpad_call(args: tuple[Any, ...], out: Tensor | None) -> None:
    padded, offsets, lengths, total_length, values_dim, *_ = args
    check_unpad(padded, offsets, lengths, total_length, values_dim)
    if out is not None:
        check_out("padded_to_packed", padded, packed_size(padded, total_length, values_dim), out)


for _key in "CPU", "CUDA":
    for _overload in "", ".out":
        _LIBRARY.impl(f"packed_to_padded{_overload}", _packed_to_padded, _key)
        _LIBRARY.impl(f"padded_to_packed{_overload}", _padded_to_packed, _key)


def padded_size(values: Tensor, offsets: Tensor, width: Any, values_dim: int) -> list[Any]:
    """(B, *pre, width, *post)."""
    shape = values.shape
    return [offsets.shape[0] - 1, *shape[:values_dim], width, *shape[values_dim + 1 :]]


def packed_size(padded: Tensor, total_length: Any, values_dim: int) -> list[Any]:
    """(*pre, total_length, *post)."""
    inner = padded.shape[1:]
    return [*inner[:values_dim], total_length, *inner[values_dim + 1 :]]


# for tracers


def _tell_inductor() -> None:
    # not torch.compiler.is_compiling(): torch 2.11 says no while Dynamo runs fakes
    if _compat.compiler_at_work():
        padding_inductor.register()


@torch.library.register_fake("njt::packed_to_padded", lib=_LIBRARY)
def _packed_to_padded_fake(*args: Any) -> Tensor:
    _tell_inductor()
    _check_pad_call(args, None)
    return args[0].new_empty(padded_size(args[0], args[1], args[3], args[5]))  # type: ignore[no-any-return]


@torch.library.register_fake("njt::padded_to_packed", lib=_LIBRARY)
def _padded_to_packed_fake(*args: Any) -> Tensor:
    _tell_inductor()
    _check_unpad_call(args, None)
    return args[0].new_empty(packed_size(args[0], args[3], args[4]))  # type: ignore[no-any-return]


@torch.library.register_fake("njt::packed_to_padded.out", lib=_LIBRARY)
def _packed_to_padded_out_fake(*args: Any, out: Tensor) -> Tensor:
    _check_pad_call(args, out)
    return out


@torch.library.register_fake("njt::padded_to_packed.out", lib=_LIBRARY)
def _padded_to_packed_out_fake(*args: Any, out: Tensor) -> Tensor:
    _check_unpad_call(args, out)
    return out


# each the other's backward


def pad_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """What the gradient of packed_to_padded needs."""
    values, offsets, lengths, _, _, ctx.values_dim, ctx.left = inputs
    ctx.rows = values.shape[ctx.values_dim]
    ctx.save_for_backward(offsets, lengths)


def _pad_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    offsets, lengths = ctx.saved_tensors
    # partial: rows behind the last offset belong to no segment, and get 0
    packed = torch.ops.njt.padded_to_packed.default(
        grad, offsets, lengths, ctx.rows, ctx.values_dim, ctx.left, True
    )
    return packed, *[None] * 6


def unpad_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """What the gradient of padded_to_packed needs."""
    padded, offsets, lengths, _, ctx.values_dim, ctx.left, _ = inputs
    ctx.width = padded.shape[ctx.values_dim + 1]
    ctx.save_for_backward(offsets, lengths)


def _unpad_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    offsets, lengths = ctx.saved_tensors
    padded = torch.ops.njt.packed_to_padded.default(
        grad, offsets, lengths, ctx.width, 0, ctx.values_dim, ctx.left
    )
    return padded, *[None] * 6


derivatives.register(_LIBRARY, "packed_to_padded", _pad_backward, pad_setup, mapped=[0])
derivatives.register(_LIBRARY, "padded_to_packed", _unpad_backward, unpad_setup, mapped=[0])
