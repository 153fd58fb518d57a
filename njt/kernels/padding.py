"""Packed rows to a padded rectangle and back: schema, checks, fake, autograd, choice of implementation.

values (*pre, total_length, *post), offsets (B + 1,) <-> padded (B, *pre, width, *post). Each copy is the other's
gradient, so both are differentiable any number of times. Plain tensors only; the functions here are thin
over `torch.ops.njt.packed_to_padded` and `torch.ops.njt.padded_to_packed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from njt import _compat
from njt.kernels import padding_cpu, padding_inductor, padding_triton

_LIBRARY = torch.library.Library("njt", "FRAGMENT")
_LIBRARY.define(
    "packed_to_padded(Tensor values, Tensor offsets, Tensor? lengths, SymInt width, Scalar padding, "
    "int values_dim, bool left) -> Tensor"
)
_LIBRARY.define(
    "padded_to_packed(Tensor padded, Tensor offsets, Tensor? lengths, SymInt total_length, "
    "int values_dim, bool left) -> Tensor"
)

# implementation of both copies by device type; "triton" serves every device that Triton serves
IMPLEMENTATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "CPU": (padding_cpu.packed_to_padded, padding_cpu.padded_to_packed),
    "CUDA": (padding_triton.packed_to_padded, padding_triton.padded_to_packed),
}
for _key, (_pad, _unpad) in IMPLEMENTATIONS.items():
    _LIBRARY.impl("packed_to_padded", _pad, _key)
    _LIBRARY.impl("padded_to_packed", _unpad, _key)
_BY_DEVICE = {key.lower(): both for key, both in IMPLEMENTATIONS.items()}
_PLAIN = (Tensor, torch.nn.Parameter)


def packed_to_padded(
    values: Tensor,
    offsets: Tensor,
    width: int,
    padding: float = 0.0,
    *,
    lengths: Tensor | None = None,
    values_dim: int = 0,
    left: bool = False,
) -> Tensor:
    """Copies packed rows into a rectangle, filling what is left with `padding`.

    Args:
        values: (*pre, total_length, *post), any dtype, any strides.
        offsets: (B + 1,) int32 or int64, start of each segment among the rows.
        width: rows of the rectangle; a longer segment is cut, and its cut rows get gradient 0.
        padding: filler, converted to the dtype of `values` once.
        lengths: (B,) rows in use of each segment where there are gaps.
        values_dim: the dim of the rows, the number of dims in `pre`.
        left: whether segments stand at the right end of the rectangle, padding on their left.
    Returns:
        (B, *pre, width, *post), new contiguous memory, bit for bit.
    Raises:
        RuntimeError: ranks, dtypes or devices that don't fit; a negative width; on CPU, segments outside the
            rows (on a GPU such rows are filler; `check_offsets` asks).

    >>> packed_to_padded(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]), 2, -1)
    tensor([[ 1, -1],
            [ 2,  3]])
    """
    _check("packed_to_padded", values, offsets, lengths, values_dim)
    if isinstance(width, int) and width < 0:
        raise RuntimeError(
            f"packed_to_padded(): got width {width}. Expected 0 or more. Pass the longest length."
        )
    args = (values, offsets, lengths, width, padding, values_dim, left)
    if _plain(values, offsets, lengths):
        if values.requires_grad and torch.is_grad_enabled():
            return _PadPlain.apply(*args)
        return _BY_DEVICE[values.device.type][0](*args)
    if _compat.functorch_active():
        return _Pad.apply(*args)
    return torch.ops.njt.packed_to_padded.default(*args)


def padded_to_packed(
    padded: Tensor,
    offsets: Tensor,
    total_length: int | None = None,
    *,
    lengths: Tensor | None = None,
    values_dim: int = 0,
    left: bool = False,
) -> Tensor:
    """Copies the rows in use of a rectangle into packed rows; padding is never read into the result.

    Args:
        padded: (B, *pre, width, *post), any dtype, any strides.
        offsets: (B + 1,) int32 or int64, where each segment starts in the result.
        total_length: rows of the result. Default: the last offset, read from the device.
        lengths: (B,) rows in use of each segment where the result has gaps.
        values_dim: the dim of the rows in the result, the number of dims in `pre`.
        left: whether segments stand at the right end of the rectangle.
    Returns:
        (*pre, total_length, *post), new memory; rows that the width does not reach and gap rows are 0.
    Raises:
        RuntimeError: ranks, dtypes, devices or batch sizes that don't fit; on CPU, a total that is not
            the last offset.

    >>> padded_to_packed(torch.tensor([[1, -1], [2, 3]]), torch.tensor([0, 1, 3]))
    tensor([1, 2, 3])
    """
    _check("padded_to_packed", padded, offsets, lengths, values_dim, batched=True)
    if isinstance(padded.shape[0], int) and padded.shape[0] != offsets.shape[0] - 1:
        raise RuntimeError(
            f"padded_to_packed(): got padded {tuple(padded.shape)} and {offsets.shape[0]} offsets. "
            f"Expected one offset more than the batch size. Check the batch dims."
        )
    if total_length is None:
        total_length = offsets[-1].item()  # type: ignore[assignment]
    args = (padded, offsets, lengths, total_length, values_dim, left)
    if _plain(padded, offsets, lengths):
        if padded.requires_grad and torch.is_grad_enabled():
            return _UnpadPlain.apply(*args)
        return _BY_DEVICE[padded.device.type][1](*args)
    if _compat.functorch_active():
        return _Unpad.apply(*args)
    return torch.ops.njt.padded_to_packed.default(*args)


def _plain(x: Tensor, offsets: Tensor, lengths: Tensor | None) -> bool:
    """Whether nobody watches or rewrites operators, so that a call may go past the dispatcher."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in _PLAIN
        and type(offsets) in _PLAIN
        and (lengths is None or type(lengths) in _PLAIN)
        and x.device.type in _BY_DEVICE
        and _compat.operators_run_as_they_are()
        and not _compat.profiling()
        and not x.is_conj()
        and not x.is_neg()
    )


def _check(
    op: str,
    x: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    values_dim: int,
    batched: bool = False,
) -> None:
    for name, vector in (("offsets", offsets), ("lengths", lengths)):
        if vector is None:
            continue
        if vector.dim() != 1 or vector.dtype not in (torch.int64, torch.int32):
            raise RuntimeError(
                f"{op}(): got {name} {tuple(vector.shape)} of {vector.dtype}. Expected one dim of "
                f"int32 or int64. Pass {name}.flatten().long()."
            )
        if vector.device != x.device:
            raise RuntimeError(
                f"{op}(): got rows on {x.device} and {name} on {vector.device}. Expected one device. "
                f"Move it: {name}.to({str(x.device)!r})."
            )
    rank = x.dim() - batched
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


def check_offsets(offsets: Tensor, lengths: Tensor | None, rows: int) -> None:
    """Reads offsets and lengths and compares them with the number of rows they point into.

    Args:
        offsets: (B + 1,); lengths: (B,) or None. On a GPU this waits for the device.
        rows: rows of the packed values.
    Raises:
        RuntimeError: offsets don't start at 0, fall, or pass `rows`; with lengths, a segment leaves the rows.

    >>> check_offsets(torch.tensor([0, 2, 5]), None, 5)
    """
    padding_cpu.Plan(offsets, lengths).check("check_offsets", rows)


# two and more ragged dims


def nested_to_padded(
    values: Tensor, offsets: Sequence[Tensor], widths: Sequence[int], padding: float = 0.0
) -> Tensor:
    """Several ragged dims at once: the innermost offsets cut rows, the outer ones cut segments.

    Args:
        values: (total_length, *post).
        offsets: outermost first; level k + 1 has as many segments as level k has rows.
        widths: size of the rectangle at each level.
        padding: filler.
    Returns:
        (B, *widths, *post).
    Raises:
        RuntimeError: another number of widths than of offsets.

    >>> two = [torch.tensor([0, 1, 2]), torch.tensor([0, 2, 3])]
    >>> nested_to_padded(torch.tensor([1, 2, 3]), two, [1, 2]).tolist()
    [[[1, 2]], [[3, 0]]]
    """
    _check_levels("nested_to_padded", offsets, widths)
    for level, width in zip(reversed(offsets), reversed(widths)):
        values = packed_to_padded(values, level, width, padding)
    return values


def padded_to_nested(padded: Tensor, offsets: Sequence[Tensor]) -> Tensor:
    """The reverse of `nested_to_padded`.

    Args:
        padded: (B, *widths, *post), one width per level.
        offsets: outermost first.
    Returns:
        (total_length, *post).
    """
    _check_levels("padded_to_nested", offsets, padded.shape[1 : len(offsets) + 1])
    for level in offsets:
        padded = padded_to_packed(padded, level)
    return padded


def _check_levels(op: str, offsets: Sequence[Tensor], widths: Sequence[Any]) -> None:
    if not offsets or len(offsets) != len(widths):
        raise RuntimeError(
            f"{op}(): got {len(offsets)} offsets tensors and {len(widths)} widths. Expected one width "
            f"per offsets tensor, outermost first. Check the lists."
        )


# for tracers


def _tell_inductor() -> None:
    # not torch.compiler.is_compiling(): torch 2.11 says no while Dynamo runs fakes
    if _compat.compiler_at_work():
        padding_inductor.register()


def _padded_shape(values: Tensor, offsets: Tensor, width: Any, values_dim: int) -> list[Any]:
    shape = values.shape
    return [offsets.shape[0] - 1, *shape[:values_dim], width, *shape[values_dim + 1 :]]


@torch.library.register_fake("njt::packed_to_padded", lib=_LIBRARY)
def _packed_to_padded_fake(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    width: Any,
    padding: float,
    values_dim: int,
    left: bool,
) -> Tensor:
    _tell_inductor()
    return values.new_empty(_padded_shape(values, offsets, width, values_dim))


@torch.library.register_fake("njt::padded_to_packed", lib=_LIBRARY)
def _padded_to_packed_fake(
    padded: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    total_length: Any,
    values_dim: int,
    left: bool,
) -> Tensor:
    _tell_inductor()
    inner = padded.shape[1:]
    return padded.new_empty([*inner[:values_dim], total_length, *inner[values_dim + 1 :]])


# each the other's backward


def _pad_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, offsets, lengths, _, _, ctx.values_dim, ctx.left = inputs
    ctx.rows = values.shape[ctx.values_dim]
    ctx.save_for_backward(offsets, lengths)


def _pad_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    offsets, lengths = ctx.saved_tensors
    packed = torch.ops.njt.padded_to_packed.default(
        grad, offsets, lengths, ctx.rows, ctx.values_dim, ctx.left
    )
    return packed, *[None] * 6


def _unpad_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    padded, offsets, lengths, _, ctx.values_dim, ctx.left = inputs
    ctx.width = padded.shape[ctx.values_dim + 1]
    ctx.save_for_backward(offsets, lengths)


def _unpad_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    offsets, lengths = ctx.saved_tensors
    padded = torch.ops.njt.packed_to_padded.default(
        grad, offsets, lengths, ctx.width, 0, ctx.values_dim, ctx.left
    )
    return padded, *[None] * 5


torch.library.register_autograd(
    "njt::packed_to_padded", _pad_backward, setup_context=_pad_setup, lib=_LIBRARY
)
torch.library.register_autograd(
    "njt::padded_to_packed", _unpad_backward, setup_context=_unpad_setup, lib=_LIBRARY
)


# the same past the dispatcher, and for torch.func: one node, whose backward is the public function again


class _Pad(torch.autograd.Function):
    """packed_to_padded; a dim that vmap adds is one more dim before the rows."""

    @staticmethod
    def forward(
        values: Tensor,
        offsets: Tensor,
        lengths: Tensor | None,
        width: int,
        padding: float,
        values_dim: int,
        left: bool,
    ) -> Tensor:
        if _plain(values, offsets, lengths):
            pad = _BY_DEVICE[values.device.type][0]
            return pad(values, offsets, lengths, width, padding, values_dim, left)
        return packed_to_padded(
            values, offsets, width, padding, lengths=lengths, values_dim=values_dim, left=left
        )

    setup_context = staticmethod(_pad_setup)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        offsets, lengths = ctx.saved_tensors
        kept = {"lengths": lengths, "values_dim": ctx.values_dim, "left": ctx.left}
        return padded_to_packed(grad, offsets, ctx.rows, **kept), *[None] * 6

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        values, offsets, lengths, width, padding, values_dim, left = args
        _check_vmap("packed_to_padded", in_dims)
        values = values.movedim(in_dims[0], 0)
        kept = {"lengths": lengths, "values_dim": values_dim + 1, "left": left}
        return packed_to_padded(values, offsets, width, padding, **kept), 1


class _Unpad(torch.autograd.Function):
    """padded_to_packed; a dim that vmap adds is one more dim before the rows."""

    @staticmethod
    def forward(
        padded: Tensor,
        offsets: Tensor,
        lengths: Tensor | None,
        total_length: int,
        values_dim: int,
        left: bool,
    ) -> Tensor:
        if _plain(padded, offsets, lengths):
            unpad = _BY_DEVICE[padded.device.type][1]
            return unpad(padded, offsets, lengths, total_length, values_dim, left)
        return padded_to_packed(
            padded, offsets, total_length, lengths=lengths, values_dim=values_dim, left=left
        )

    setup_context = staticmethod(_unpad_setup)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        offsets, lengths = ctx.saved_tensors
        kept = {"lengths": lengths, "values_dim": ctx.values_dim, "left": ctx.left}
        return packed_to_padded(grad, offsets, ctx.width, **kept), *[None] * 5

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        padded, offsets, lengths, total_length, values_dim, left = args
        _check_vmap("padded_to_packed", in_dims)
        padded = padded.movedim(in_dims[0], 1)
        kept = {"lengths": lengths, "values_dim": values_dim + 1, "left": left}
        return padded_to_packed(padded, offsets, total_length, **kept), 0


# with a separate setup_context, torch looks up signatures in each call: 30 us that plain calls don't pay


class _PadPlain(torch.autograd.Function):
    """packed_to_padded outside of torch.func."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        _pad_setup(ctx, args, args[0])
        return _BY_DEVICE[args[0].device.type][0](*args)

    backward = staticmethod(_Pad.backward)


class _UnpadPlain(torch.autograd.Function):
    """padded_to_packed outside of torch.func."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        _unpad_setup(ctx, args, args[0])
        return _BY_DEVICE[args[0].device.type][1](*args)

    backward = staticmethod(_Unpad.backward)


def _check_vmap(op: str, in_dims: tuple[Any, ...]) -> None:
    if in_dims[1] is not None or in_dims[2] is not None:
        raise RuntimeError(
            f"{op}(): got offsets or lengths that vmap runs over. Expected one structure for all. "
            f"Loop over structures."
        )
