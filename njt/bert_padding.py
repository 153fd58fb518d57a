"""`unpad_input` and `pad_input` as users of flash-attn's helpers know them: rows by a mask, and back.

Plain tensors on both sides. The mask may have holes anywhere, so rows move by index; each copy is the
other's gradient, any number of times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from njt import _compat


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Keeps the rows that a mask allows, one sequence after another.

    Args:
        hidden_states: (B, S, *), any dtype.
        attention_mask: (B, S), bool or integers, nonzero where a row is in use.
        unused_mask: (B, S), nonzero for rows that are kept though not in use; no row is in both masks.
    Returns:
        rows (total_nnz, *); indices (total_nnz,) int64 of these rows in (B * S, *); cu_seqlens (B + 1,) int32;
        the longest sequence as a number, which waits for the device; seqused (B,) int32, rows in use.
    Raises:
        RuntimeError: a mask of another shape than (B, S).

    >>> rows, indices, cu_seqlens, longest, used = unpad_input(
    ...     torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    ... )
    >>> rows, indices, cu_seqlens.tolist(), longest, used.tolist()
    (tensor([1, 2, 3]), tensor([0, 1, 3]), [0, 2, 3], 2, [2, 1])
    """
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and (mask.dim() != 2 or mask.shape != hidden_states.shape[:2]):
            raise RuntimeError(
                f"unpad_input(): got hidden_states {tuple(hidden_states.shape)} and {name} "
                f"{tuple(mask.shape)}. Expected a mask of shape (batch, seqlen). Give one entry a row."
            )
    used = attention_mask != 0
    kept = used if unused_mask is None else used | (unused_mask != 0)
    seqlens = kept.sum(1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(seqlens.max()) if seqlens.numel() else 0
    flat = hidden_states.flatten(0, 1)
    rows = _take(flat, indices, flat.shape[0])
    return rows, indices, cu_seqlens, longest, used.sum(1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Puts rows back where `unpad_input` took them from; the rest is 0.

    Args:
        hidden_states: (total_nnz, *), any dtype.
        indices: (total_nnz,) as `unpad_input` returned them, no row twice.
        batch: B.
        seqlen: S.
    Returns:
        (B, S, *), new memory.
    Raises:
        RuntimeError: another number of indices than rows.

    >>> pad_input(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]), 2, 3)
    tensor([[1, 2, 0],
            [3, 0, 0]])
    """
    if indices.dim() != 1 or indices.shape[0] != hidden_states.shape[0]:
        raise RuntimeError(
            f"pad_input(): got {hidden_states.shape[0]} rows and indices {tuple(indices.shape)}. "
            f"Expected one index a row. Pass the indices that unpad_input returned."
        )
    return _put(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _take(x: Tensor, indices: Tensor, rows: int) -> Tensor:
    # transforms know these operators; that no row comes twice is a matter of speed
    if _compat.transforming():
        return x.index_select(0, indices)
    return _Take.apply(x, indices, rows)


def _put(x: Tensor, indices: Tensor, rows: int) -> Tensor:
    if _compat.transforming():
        return x.new_zeros(rows, *x.shape[1:]).index_copy(0, indices, x)
    return _Put.apply(x, indices, rows)


class _Take(torch.autograd.Function):
    """x[indices]; no row is taken twice, so that its gradient is a copy and no sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor, rows: int) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(indices)
        return x.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Put.apply(grad, *ctx.saved_tensors, ctx.rows), None, None


class _Put(torch.autograd.Function):
    """Zeros with rows of x at indices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor, rows: int) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(indices)
        return x.new_zeros(rows, *x.shape[1:]).index_copy_(0, indices, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Take.apply(grad, *ctx.saved_tensors, ctx.rows), None, None
