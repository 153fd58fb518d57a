"""Packed rows to a padded rectangle and back: what the package calls.

values (*pre, total_length, *post), offsets (B + 1,) <-> padded (B, *pre, width, *post). Each copy is the other's
gradient, so both are differentiable any number of times. Plain tensors only; the functions here stand for
`torch.ops.njt.packed_to_padded` and `torch.ops.njt.padded_to_packed`, and go past the dispatcher where nobody
watches it. Several ragged dims: `padding_levels`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from njt import _compat
from njt.kernels import padding_ops as ops
from njt.kernels.padding_plan import plan_of

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
    out: Tensor | None = None,
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
        out: (B, *pre, width, *post) of the dtype and device of `values`, any strides; where the result goes.
    Returns:
        (B, *pre, width, *post), new contiguous memory or `out`, bit for bit.
    Raises:
        RuntimeError: ranks, dtypes or devices that don't fit; a negative width; an `out` of another shape,
            dtype or device, or with a gradient asked for; on CPU, segments outside the rows (on a GPU such
            rows are filler; `check_offsets` asks).

    >>> packed_to_padded(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]), 2, -1)
    tensor([[ 1, -1],
            [ 2,  3]])
    """
    ops.check_pad(values, offsets, lengths, width, values_dim)
    args = (values, offsets, lengths, width, padding, values_dim, left)
    plain = _plain(values, offsets, lengths)
    if out is not None:
        size = ops.padded_size(values, offsets, width, values_dim)
        ops.check_out("packed_to_padded", values, size, out)
        if plain and type(out) in _PLAIN:
            return ops.pad_into(out, *args)
        return out.copy_(torch.ops.njt.packed_to_padded.default(*args))
    if plain:
        if values.requires_grad and torch.is_grad_enabled():
            return _Pad.apply(*args)
        return ops.pad_into(None, *args)
    return torch.ops.njt.packed_to_padded.default(*args)


def padded_to_packed(
    padded: Tensor,
    offsets: Tensor,
    total_length: int | None = None,
    *,
    lengths: Tensor | None = None,
    values_dim: int = 0,
    left: bool = False,
    partial: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Copies the rows in use of a rectangle into packed rows; padding is never read into the result.

    Args:
        padded: (B, *pre, width, *post), any dtype, any strides.
        offsets: (B + 1,) int32 or int64, where each segment starts in the result.
        total_length: rows of the result. Default: the last offset, read from the device.
        lengths: (B,) rows in use of each segment where the result has gaps.
        values_dim: the dim of the rows in the result, the number of dims in `pre`.
        left: whether segments stand at the right end of the rectangle.
        partial: whether `total_length` may be more than the last offset; the rows behind it are 0.
        out: (*pre, total_length, *post) of the dtype and device of `padded`, any strides; where the result goes.
    Returns:
        (*pre, total_length, *post), new memory or `out`; rows that the width does not reach and gap rows are 0.
    Raises:
        RuntimeError: ranks, dtypes, devices or batch sizes that don't fit; an `out` of another shape, dtype or
            device, or with a gradient asked for; on CPU, a total that is not the last offset (on a GPU that
            would wait for the device: rows behind the last offset are 0, rows behind the total left out).

    >>> padded_to_packed(torch.tensor([[1, -1], [2, 3]]), torch.tensor([0, 1, 3]))
    tensor([1, 2, 3])
    """
    ops.check_unpad(padded, offsets, lengths, total_length, values_dim)
    if total_length is None:
        total_length = offsets[-1].item()  # type: ignore[assignment]
    args = (padded, offsets, lengths, total_length, values_dim, left, partial)
    plain = _plain(padded, offsets, lengths)
    if out is not None:
        size = ops.packed_size(padded, total_length, values_dim)
        ops.check_out("padded_to_packed", padded, size, out)
        if plain and type(out) in _PLAIN:
            return ops.unpad_into(out, *args)
        return out.copy_(torch.ops.njt.padded_to_packed.default(*args))
    if plain:
        if padded.requires_grad and torch.is_grad_enabled():
            return _Unpad.apply(*args)
        return ops.unpad_into(None, *args)
    return torch.ops.njt.padded_to_packed.default(*args)


def _plain(x: Tensor, offsets: Tensor, lengths: Tensor | None) -> bool:
    """Whether nobody watches or rewrites operators, so that a call may go past the dispatcher."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in _PLAIN
        and type(offsets) in _PLAIN
        and (lengths is None or type(lengths) in _PLAIN)
        and x.device.type in ops.IMPLEMENTATIONS
        and _compat.operators_run_as_they_are()
        and not _compat.profiling()
        and not x.is_conj()
        and not x.is_neg()
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
    plan_of(offsets.cpu(), None if lengths is None else lengths.cpu()).check("check_offsets", rows)


# past the dispatcher with a gradient: one node, whose backward is the public function again


class _Pad(torch.autograd.Function):
    """packed_to_padded for `_plain` calls; all others meet the operator, which knows transforms too."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        ops.pad_setup(ctx, args, args[0])
        return ops.pad_into(None, *args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        offsets, lengths = ctx.saved_tensors
        kept = {"lengths": lengths, "values_dim": ctx.values_dim, "left": ctx.left}
        packed = padded_to_packed(grad, offsets, ctx.rows, partial=True, **kept)
        return packed, *[None] * 6


class _Unpad(torch.autograd.Function):
    """padded_to_packed, alike."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        ops.unpad_setup(ctx, args, args[0])
        return ops.unpad_into(None, *args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        offsets, lengths = ctx.saved_tensors
        kept = {"lengths": lengths, "values_dim": ctx.values_dim, "left": ctx.left}
        return packed_to_padded(grad, offsets, ctx.width, **kept), *[None] * 6
