"""Attention over packed rows on CUDA: torch's flash and memory-efficient kernels, called directly.

Both want int32 `cu_seqlens` without gaps. Offsets of another kind are converted once a tensor;
sequences with gaps between them are moved together first, on the device, without reading lengths.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from njt.attention.varlen_call import Call
from njt.attention.varlen_memo import Memo

aten = torch.ops.aten

_memo = Memo()
_FROM_TOP_LEFT = 1  # the kernel's number for "query i sees keys 0..i"


class Packed(NamedTuple):
    """`cu_seqlens`, and with gaps the source of each packed row (`total` where there is none)."""

    cu_seqlens: Tensor
    rows: Tensor | None

    def read(self, x: Tensor) -> Tensor:
        """The rows of the sequences, without gaps."""
        if self.rows is None:
            return x
        # rows past the end are outside of cu_seqlens: any row will do
        return x.index_select(0, self.rows.clamp(max=x.shape[0] - 1))

    def write(self, x: Tensor, total: int) -> Tensor:
        """The rows back at their places, 0 in the gaps."""
        if self.rows is None:
            return x
        spread = x.new_zeros(total + 1, *x.shape[1:])
        return spread.index_copy_(0, self.rows, x)[:total]


@functools.cache
def has_flash(device: torch.device) -> bool:
    """Whether torch was built with flash attention and the GPU can run it."""
    return torch.backends.cuda.is_flash_attention_available() and (
        torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
    )


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, call: Call, keep: bool = True
) -> tuple[Tensor, ...]:
    """Output (total_q, H, D), logsumexp (H, total_q), seed, seed_offset."""
    if _is_empty(query, key, call):
        return torch.zeros_like(query), *flash_state(query, call)
    q_rows, k_rows = _sides(query, key, call)
    out, logsumexp, seed, seed_offset, _ = aten._flash_attention_forward.default(
        q_rows.read(query),
        k_rows.read(key),
        k_rows.read(value),
        q_rows.cu_seqlens,
        k_rows.cu_seqlens,
        call.max_q,
        call.max_k,
        call.dropout_p,
        call.is_causal,
        False,
        scale=call.scale,
    )
    return q_rows.write(out, query.shape[0]), logsumexp, seed, seed_offset


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    seed: Tensor,
    seed_offset: Tensor,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key, value."""
    if _is_empty(query, key, call):
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    q_rows, k_rows = _sides(query, key, call)
    grad_q, grad_k, grad_v = aten._flash_attention_backward.default(
        _rows_dense(q_rows.read(grad_out)),
        q_rows.read(query),
        k_rows.read(key),
        k_rows.read(value),
        q_rows.read(out),
        logsumexp,
        q_rows.cu_seqlens,
        k_rows.cu_seqlens,
        call.max_q,
        call.max_k,
        call.dropout_p,
        call.is_causal,
        seed,
        seed_offset,
        scale=call.scale,
    )
    return (
        q_rows.write(grad_q, query.shape[0]),
        k_rows.write(grad_k, key.shape[0]),
        k_rows.write(grad_v, key.shape[0]),
    )


def efficient_forward(
    query: Tensor, key: Tensor, value: Tensor, call: Call, keep: bool = True
) -> tuple[Tensor, ...]:
    """Output (total_q, H, D), logsumexp (B, H, max_q rounded up to 32), seed, seed_offset."""
    if _is_empty(query, key, call):
        return torch.zeros_like(query), *efficient_state(query, call)
    q_rows, k_rows = _sides(query, key, call)
    heads = query.shape[1]
    out, logsumexp, seed, seed_offset, _, _ = aten._efficient_attention_forward.default(
        q_rows.read(query).unsqueeze(0),
        _expand(k_rows.read(key), heads).unsqueeze(0),
        _expand(k_rows.read(value), heads).unsqueeze(0),
        None,
        q_rows.cu_seqlens,
        k_rows.cu_seqlens,
        call.max_q,
        call.max_k,
        call.dropout_p,
        _FROM_TOP_LEFT if call.is_causal else 0,
        keep,
        scale=call.scale,
    )
    out = _clear_blind(out.squeeze(0), q_rows, k_rows)
    return q_rows.write(out, query.shape[0]), logsumexp, seed, seed_offset


def efficient_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    seed: Tensor,
    seed_offset: Tensor,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key, value."""
    if _is_empty(query, key, call):
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    q_rows, k_rows = _sides(query, key, call)
    heads, heads_k = query.shape[1], key.shape[1]
    grad_q, grad_k, grad_v, _ = aten._efficient_attention_backward.default(
        _rows_dense(q_rows.read(grad_out)).unsqueeze(0),
        q_rows.read(query).unsqueeze(0),
        _expand(k_rows.read(key), heads).unsqueeze(0),
        _expand(k_rows.read(value), heads).unsqueeze(0),
        None,
        q_rows.read(out).unsqueeze(0),
        q_rows.cu_seqlens,
        k_rows.cu_seqlens,
        call.max_q,
        call.max_k,
        logsumexp,
        call.dropout_p,
        seed,
        seed_offset,
        _FROM_TOP_LEFT if call.is_causal else 0,
        False,
        scale=call.scale,
    )
    return (
        q_rows.write(_clear_blind(grad_q.squeeze(0), q_rows, k_rows), query.shape[0]),
        k_rows.write(_collect(grad_k.squeeze(0), heads_k), key.shape[0]),
        k_rows.write(_collect(grad_v.squeeze(0), heads_k), key.shape[0]),
    )


def flash_state(query: Tensor, call: Call) -> tuple[Tensor, ...]:
    """Shapes of logsumexp, seed and seed_offset."""
    new, device = torch.empty, query.device
    return (
        new(query.shape[1], query.shape[0], dtype=torch.float32, device=device),
        new(2, dtype=torch.uint64, device=device),
        new((), dtype=torch.uint64, device=device),
    )


def efficient_state(query: Tensor, call: Call) -> tuple[Tensor, ...]:
    """Shapes of logsumexp, seed and seed_offset."""
    new, device = torch.empty, query.device
    batch, rounded = call.q_offsets.shape[0] - 1, (call.max_q + 31) // 32 * 32
    return (
        new(batch, query.shape[1], rounded, dtype=torch.float32, device=device),
        new((), dtype=torch.int64, device=device),
        new((), dtype=torch.int64, device=device),
    )


def seeds_to_keep(query: Tensor, call: Call, seeds: list[Tensor]) -> tuple[Tensor, ...]:
    """The seeds with the shapes and the device that a tracer was promised.

    Where the kernels leave them depends on dropout, on graph capture and on torch's version.
    """
    if call.dropout_p:
        return tuple(seed.to(query.device) for seed in seeds)
    state = flash_state if call.backend == "flash" else efficient_state
    return state(query, call)[1:]


def seeds_to_use(call: Call, seeds: list[Tensor]) -> list[Tensor]:
    """The kept seeds where the backward kernel reads them: on the host, unless in a capture."""
    if not call.dropout_p or call.backend != "efficient":
        return seeds
    if torch.cuda.is_current_stream_capturing():
        return seeds
    return [seed.cpu() for seed in seeds]


def _is_empty(query: Tensor, key: Tensor, call: Call) -> bool:
    # the kernels refuse sizes of zero
    return not (query.numel() and key.numel() and call.max_q and call.max_k)


def _sides(query: Tensor, key: Tensor, call: Call) -> tuple[Packed, Packed]:
    q = _packed(call.q_offsets, call.q_lengths, query.shape[0])
    if call.k_offsets is call.q_offsets and call.k_lengths is call.q_lengths:
        return q, q
    return q, _packed(call.k_offsets, call.k_lengths, key.shape[0])


def _packed(offsets: Tensor, lengths: Tensor | None, total: int) -> Packed:
    if lengths is None and offsets.dtype == torch.int32:
        return Packed(offsets, None)
    if torch.cuda.is_current_stream_capturing():
        # what a capture computes holds nothing before its replay: not to be kept
        return _make_packed(offsets, lengths, total)
    stream = torch.cuda.current_stream(offsets.device).cuda_stream
    sources = (offsets,) if lengths is None else (offsets, lengths)
    return _memo.get(sources, (total, stream), lambda: _make_packed(offsets, lengths, total))


def _make_packed(offsets: Tensor, lengths: Tensor | None, total: int) -> Packed:
    if lengths is None:
        return Packed(offsets.to(torch.int32), None)
    ends = lengths.cumsum(0)
    starts = ends - lengths
    place = torch.arange(total, device=offsets.device)
    sequence = torch.searchsorted(ends, place, right=True)
    inside = sequence < ends.shape[0]
    sequence = sequence.clamp(max=ends.shape[0] - 1)
    rows = torch.where(inside, offsets[sequence] + (place - starts[sequence]), total)
    cu_seqlens = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
    return Packed(cu_seqlens, rows)


def _clear_blind(x: Tensor, q_rows: Packed, k_rows: Packed) -> Tensor:
    """Rows of sequences without keys set to 0: the kernel never comes to write them."""
    if q_rows is k_rows:
        return x
    place = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    sequence = torch.searchsorted(q_rows.cu_seqlens[1:], place, right=True)
    # rows past the last sequence count as the last one's
    empty = k_rows.cu_seqlens.diff() == 0
    blind = empty[sequence.clamp_(max=empty.shape[0] - 1)]
    return x.masked_fill_(blind[:, None, None], 0.0)


def _expand(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _collect(grad: Tensor, heads_k: int) -> Tensor:
    if grad.shape[1] == heads_k:
        return grad
    return grad.unflatten(1, (heads_k, -1)).sum(2)


def _rows_dense(x: Tensor) -> Tensor:
    # gradients of a sum arrive expanded, with strides of 0 that the kernels don't take
    return x if x.stride(-1) == 1 and x.stride(0) != 0 and x.stride(1) != 0 else x.contiguous()
