"""Attention over packed rows in Triton, for batches of many short sequences.

query (total_q, H, D), key (total_k, Hk, D), value (total_k, Hk, D) -> (total_q, H, D), logsumexp
(H, total_q). A list of tiles, one entry for each block of rows of each sequence, gives every program
work of its own: a rectangle of sequences by longest length would leave most of them idle. Starts and
lengths are read as they are, so gaps cost nothing. Imported on first use: Triton is optional.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from njt.attention.varlen_call import Call
from njt.attention.varlen_memo import Memo

_memo = Memo()
_LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _scores(
    q, k, rows, columns, q_length, k_length, scale, CAUSAL: tl.constexpr, PRECISION: tl.constexpr
):
    # (rows, columns), in units of log 2, -inf where a query does not see a key
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * _LOG2E)
    seen = columns[None, :] < k_length
    if CAUSAL:
        seen = seen & (columns[None, :] <= rows[:, None])
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _rows_of(base, start, place, length, stride, d, D):
    # (places, BLOCK_D) rows of one head; int64 because rows * stride passes 2**31
    row = (start + place).to(tl.int64)
    return tl.load(
        base + row[:, None] * stride + d[None, :],
        mask=(place < length)[:, None] & (d < D)[None, :],
        other=0.0,
    )


@triton.jit
def _put_rows(base, x, start, place, length, stride, d, D):
    row = (start + place).to(tl.int64)
    tl.store(
        base + row[:, None] * stride + d[None, :],
        x.to(base.dtype.element_ty),
        mask=(place < length)[:, None] & (d < D)[None, :],
    )


@triton.jit
def _forward_kernel(
    query, key, value, out, logsumexp, tiles, q_starts, q_lengths, k_starts, k_lengths,
    q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head, total_q, scale, D, GROUP,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # one program: one tile of queries of one head
    b = tl.load(tiles + 2 * tl.program_id(0))
    if b < 0:
        return
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    head = tl.program_id(1).to(tl.int64)
    q_start, q_length = tl.load(q_starts + b), tl.load(q_lengths + b)
    k_start, k_length = tl.load(k_starts + b), tl.load(k_lengths + b)
    d = tl.arange(0, BLOCK_D)
    rows = first + tl.arange(0, BLOCK_M)
    q = _rows_of(query + head * q_head, q_start, rows, q_length, q_row, d, D)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    stop = tl.minimum(k_length, first + BLOCK_M) if CAUSAL else k_length
    for n in range(0, stop, BLOCK_N):
        columns = n + tl.arange(0, BLOCK_N)
        k = _rows_of(key + head // GROUP * k_head, k_start, columns, k_length, k_row, d, D)
        v = _rows_of(value + head // GROUP * v_head, k_start, columns, k_length, v_row, d, D)
        s = _scores(q, k, rows, columns, q_length, k_length, scale, CAUSAL, PRECISION)
        # the first block holds key 0, which every query sees: the maximum is finite from then on
        higher = tl.maximum(top, tl.max(s, 1))
        weights = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None]
        sums += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top = higher
    safe = tl.where(total == 0.0, 1.0, total)
    _put_rows(out + head * o_head, sums / safe[:, None], q_start, rows, q_length, o_row, d, D)
    place = head * total_q + (q_start + rows).to(tl.int64)
    tl.store(logsumexp + place, (top + tl.log2(safe)) / _LOG2E, mask=rows < q_length)


@triton.jit
def _backward_query_kernel(
    grad_out, query, key, value, out, logsumexp, delta, grad_q,
    tiles, q_starts, q_lengths, k_starts, k_lengths,
    g_row, g_head, q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head,
    total_q, scale, D, GROUP, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # one program: one tile of queries of one head; also leaves sum(grad_out * out) for the keys
    b = tl.load(tiles + 2 * tl.program_id(0))
    if b < 0:
        return
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    head = tl.program_id(1).to(tl.int64)
    q_start, q_length = tl.load(q_starts + b), tl.load(q_lengths + b)
    k_start, k_length = tl.load(k_starts + b), tl.load(k_lengths + b)
    d = tl.arange(0, BLOCK_D)
    rows = first + tl.arange(0, BLOCK_M)
    q = _rows_of(query + head * q_head, q_start, rows, q_length, q_row, d, D)
    g = _rows_of(grad_out + head * g_head, q_start, rows, q_length, g_row, d, D)
    o = _rows_of(out + head * o_head, q_start, rows, q_length, o_row, d, D)
    product = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    place = head * total_q + (q_start + rows).to(tl.int64)
    tl.store(delta + place, product, mask=rows < q_length)
    top = tl.load(logsumexp + place, mask=rows < q_length, other=0.0) * _LOG2E
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    stop = tl.minimum(k_length, first + BLOCK_M) if CAUSAL else k_length
    for n in range(0, stop, BLOCK_N):
        columns = n + tl.arange(0, BLOCK_N)
        k = _rows_of(key + head // GROUP * k_head, k_start, columns, k_length, k_row, d, D)
        v = _rows_of(value + head // GROUP * v_head, k_start, columns, k_length, v_row, d, D)
        s = _scores(q, k, rows, columns, q_length, k_length, scale, CAUSAL, PRECISION)
        weights = tl.exp2(s - top[:, None])
        grad_weights = tl.dot(g, tl.trans(v), input_precision=PRECISION)
        grad_scores = weights * (grad_weights - product[:, None]) * scale
        sums += tl.dot(grad_scores.to(k.dtype), k, input_precision=PRECISION)
    _put_rows(grad_q + head * o_head, sums, q_start, rows, q_length, o_row, d, D)


@triton.jit
def _backward_key_kernel(
    grad_out, query, key, value, logsumexp, delta, grad_k, grad_v,
    tiles, q_starts, q_lengths, k_starts, k_lengths,
    g_row, g_head, q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head,
    total_q, scale, D, GROUP, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # one program: one tile of keys of one head, over all queries of all heads that share it
    b = tl.load(tiles + 2 * tl.program_id(0))
    if b < 0:
        return
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    head_k = tl.program_id(1).to(tl.int64)
    q_start, q_length = tl.load(q_starts + b), tl.load(q_lengths + b)
    k_start, k_length = tl.load(k_starts + b), tl.load(k_lengths + b)
    d = tl.arange(0, BLOCK_D)
    columns = first + tl.arange(0, BLOCK_N)
    k = _rows_of(key + head_k * k_head, k_start, columns, k_length, k_row, d, D)
    v = _rows_of(value + head_k * v_head, k_start, columns, k_length, v_row, d, D)
    sums_k = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    sums_v = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    begin = first // BLOCK_M * BLOCK_M if CAUSAL else 0
    for member in range(GROUP):
        head = head_k * GROUP + member
        for m in range(begin, q_length, BLOCK_M):
            rows = m + tl.arange(0, BLOCK_M)
            q = _rows_of(query + head * q_head, q_start, rows, q_length, q_row, d, D)
            g = _rows_of(grad_out + head * g_head, q_start, rows, q_length, g_row, d, D)
            place = head * total_q + (q_start + rows).to(tl.int64)
            # rows past the end weigh nothing: exp2(-inf)
            top = tl.load(logsumexp + place, mask=rows < q_length, other=float("inf")) * _LOG2E
            product = tl.load(delta + place, mask=rows < q_length, other=0.0)
            s = _scores(q, k, rows, columns, q_length, k_length, scale, CAUSAL, PRECISION)
            weights = tl.exp2(s - top[:, None])
            sums_v += tl.dot(tl.trans(weights.to(g.dtype)), g, input_precision=PRECISION)
            grad_weights = tl.dot(g, tl.trans(v), input_precision=PRECISION)
            grad_scores = weights * (grad_weights - product[:, None]) * scale
            sums_k += tl.dot(tl.trans(grad_scores.to(q.dtype)), q, input_precision=PRECISION)
    _put_rows(grad_k + head_k * o_head, sums_k, k_start, columns, k_length, o_row, d, D)
    _put_rows(grad_v + head_k * o_head, sums_v, k_start, columns, k_length, o_row, d, D)


class Tiling(NamedTuple):
    """Block sizes and launch options of one kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Side(NamedTuple):
    """Starts and lengths (B,), and the tiles (n, 2): sequence, or -1 for none, and first row."""

    starts: Tensor
    lengths: Tensor
    tiles: Tensor


# by kernel; not measured yet
TILINGS = {
    "forward": Tiling(64, 64, 4, 2),
    "backward_query": Tiling(64, 64, 4, 2),
    "backward_key": Tiling(64, 64, 4, 2),
}


def forward(
    query: Tensor, key: Tensor, value: Tensor, call: Call, keep: bool = True
) -> tuple[Tensor, ...]:
    """Output (total_q, H, D), logsumexp (H, total_q); rows of no sequence get 0."""
    query, key, value = (_features_adjacent(x) for x in (query, key, value))
    total_q, heads, width = query.shape
    new = torch.empty if call.q_lengths is None else torch.zeros
    out = new(query.shape, dtype=query.dtype, device=query.device)
    logsumexp = new(heads, total_q, dtype=torch.float32, device=query.device)
    tiling = TILINGS["forward"]
    q = _side(call.q_offsets, call.q_lengths, total_q, tiling.block_m)
    k = _side(call.k_offsets, call.k_lengths, key.shape[0], tiling.block_n)
    if out.numel() and q.tiles.numel():
        _forward_kernel[q.tiles.shape[0], heads](
            query, key, value, out, logsumexp, q.tiles, q.starts, q.lengths, k.starts, k.lengths,
            *_strides(query, key, value, out), total_q, call.scale, width,
            heads // key.shape[1], **_constants(query, call, tiling),
        )  # fmt: skip
    return out, logsumexp


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *rest: Call | Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, contiguous; rows of no sequence get 0."""
    call = rest[-1]
    assert isinstance(call, Call)
    grad_out, query, key, value = (_features_adjacent(x) for x in (grad_out, query, key, value))
    total_q, heads, width = query.shape
    grads = tuple(
        (torch.empty if lengths is None else torch.zeros)(x.shape, dtype=x.dtype, device=x.device)
        for x, lengths in ((query, call.q_lengths), (key, call.k_lengths), (value, call.k_lengths))
    )
    delta = torch.empty_like(logsumexp)
    for name in ("backward_query", "backward_key"):
        tiling = TILINGS[name]
        q = _side(call.q_offsets, call.q_lengths, total_q, tiling.block_m)
        k = _side(call.k_offsets, call.k_lengths, key.shape[0], tiling.block_n)
        places = q.starts, q.lengths, k.starts, k.lengths
        sizes = total_q, call.scale, width, heads // key.shape[1]
        constants = _constants(query, call, tiling)
        if name == "backward_query" and q.tiles.numel() and grads[0].numel():
            _backward_query_kernel[q.tiles.shape[0], heads](
                grad_out, query, key, value, out, logsumexp, delta, grads[0], q.tiles, *places,
                *_strides(grad_out, query, key, value, grads[0]), *sizes, **constants,
            )  # fmt: skip
        elif name == "backward_key" and k.tiles.numel() and grads[1].numel():
            _backward_key_kernel[k.tiles.shape[0], key.shape[1]](
                grad_out, query, key, value, logsumexp, delta, grads[1], grads[2], k.tiles, *places,
                *_strides(grad_out, query, key, value, grads[1]), *sizes, **constants,
            )  # fmt: skip
    return grads  # type: ignore[return-value]


def _side(offsets: Tensor, lengths: Tensor | None, total: int, block: int) -> Side:
    sources = (offsets,) if lengths is None else (offsets, lengths)
    if offsets.is_cuda and torch.cuda.is_current_stream_capturing():
        return _make_side(offsets, lengths, total, block)
    stream = torch.cuda.current_stream(offsets.device).cuda_stream if offsets.is_cuda else 0
    key = total, block, stream
    found: Side = _memo.get(sources, key, lambda: _make_side(offsets, lengths, total, block))
    return found


def _make_side(offsets: Tensor, lengths: Tensor | None, total: int, block: int) -> Side:
    starts = offsets[:-1]
    lengths = offsets.diff() if lengths is None else lengths
    batch = starts.shape[0]
    ends = ((lengths + (block - 1)) // block).cumsum(0)
    # as many as there can be: the true count is known to the device only
    place = torch.arange(total // block + batch if batch else 0, device=offsets.device)
    sequence = torch.searchsorted(ends, place, right=True)
    before = torch.nn.functional.pad(ends, (1, 0))[sequence]
    first = (place - before) * block
    sequence = torch.where(sequence < batch, sequence, -1)
    return Side(starts, lengths, torch.stack([sequence, first], 1).to(torch.int32))


def _constants(query: Tensor, call: Call, tiling: Tiling) -> dict[str, object]:
    return {
        "CAUSAL": call.is_causal,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_D": max(16, triton.next_power_of_2(query.shape[2])),
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(s for x in tensors for s in x.stride()[:2])


def _features_adjacent(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()
