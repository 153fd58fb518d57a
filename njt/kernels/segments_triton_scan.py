"""Scans inside segments in Triton: one program walks through one segment, a tile of rows at a time.

values (P, T, Q), the ragged dim in the middle. The result of every row up to the tile is carried in one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["DTYPES", "scan"]

_TILE = 2048  # elements a program holds
_ACC = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.int64: tl.int64,
    torch.int32: tl.int32,
}
DTYPES = tuple(_ACC)


@triton.jit
def _add_logs(a, b):
    top = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    least = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    # equal ones are apart, since inf - inf is nan
    return tl.where(a == b, a + 0.6931471805599453, top + tl.log(1.0 + tl.exp(least - top)))


@triton.jit
def _chain(a, x, b, y):
    # y[t] = x[t] + a[t] * y[t - 1], of two neighbouring stretches
    return a * b, b * x + y


@triton.jit
def _later_max(x, i, y, j):
    # a tie goes to the later row, and nan stays
    late = ((y >= x) & (x == x)) | (y != y)
    return tl.where(late, y, x), tl.where(late, j, i)


@triton.jit
def _later_min(x, i, y, j):
    late = ((y <= x) & (x == x)) | (y != y)
    return tl.where(late, y, x), tl.where(late, j, i)


@triton.jit
def _scan_kernel(
    x,
    decay,
    offsets,
    lengths,
    out,
    T,
    P,
    Q,
    blocks_q,
    OP: tl.constexpr,
    ACC: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    # int64 because T * Q passes 2**31
    program = tl.program_id(0).to(tl.int64)
    q = (program % blocks_q) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    p = program // blocks_q % P
    b = program // blocks_q // P
    start = tl.load(offsets + b).to(tl.int64)
    size = tl.load(offsets + b + 1).to(tl.int64) - start
    if HAS_LENGTHS:
        size = tl.load(lengths + b).to(tl.int64)
    t = tl.arange(0, BLOCK_T)
    carry = tl.full((1, BLOCK_Q), 0, ACC)
    carried_index = tl.full((1, BLOCK_Q), 0, tl.int64)
    if OP == "cumprod":
        carry += 1
    if OP == "logcumsumexp":
        carry += float("-inf")
    for done in range(0, size, BLOCK_T):
        spot = done + t
        index = spot
        if REVERSE:
            index = size - 1 - spot
        inside = (spot < size)[:, None] & (q < Q)[None, :]
        at = (p * T + start + index)[:, None] * Q + q[None, :]
        v = tl.load(x + at, mask=inside, other=0).to(ACC)
        last = tl.minimum(size - done, BLOCK_T) - 1
        if (OP == "cummax") | (OP == "cummin"):
            i = tl.broadcast_to(index[:, None].to(tl.int64), (BLOCK_T, BLOCK_Q))
            if OP == "cummax":
                v, i = tl.associative_scan((v, i), 0, _later_max)
                joined, joined_i = _later_max(carry, carried_index, v, i)
            else:
                v, i = tl.associative_scan((v, i), 0, _later_min)
                joined, joined_i = _later_min(carry, carried_index, v, i)
            v = tl.where(done > 0, joined, v)  # before the first tile nothing is carried
            i = tl.where(done > 0, joined_i, i)
            carried_index = tl.sum(tl.where((t == last)[:, None], i, 0), 0, keep_dims=True)
            tl.store(out + at, i, mask=inside)
        else:
            if OP == "cumsum":
                v = tl.cumsum(v, 0) + carry
            elif OP == "cumprod":
                v = tl.cumprod(v, 0) * carry
            elif OP == "logcumsumexp":
                v = _add_logs(tl.associative_scan(v, 0, _add_logs), carry)
            else:
                a = tl.load(decay + at, mask=inside, other=0).to(ACC)
                a, v = tl.associative_scan((a, v), 0, _chain)
                v = v + a * carry
            tl.store(out + at, v.to(out.dtype.element_ty), mask=inside)
        carry = tl.sum(tl.where((t == last)[:, None], v, 0), 0, keep_dims=True)


def scan(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    dim: int,
    op: str,
    reverse: bool,
    *,
    decay: Tensor | None = None,
) -> Tensor:
    """Launch: cumsum, cumprod, logcumsumexp, recurrence, or the indices of cummax and cummin; 0 in gaps.

    The caller has checked shapes and devices: no check, no `.item()`, no sync here.
    """
    B, T = offsets.shape[0] - 1, values.shape[dim]
    P = values.shape[:dim].numel()
    Q = values.shape[dim + 1 :].numel()
    dtype = torch.int64 if op in ("cummax", "cummin") else values.dtype
    # rows that no segment holds are not visited
    out = torch.zeros(values.shape, dtype=dtype, device=values.device)
    if not out.numel() or B == 0:
        return out
    block_q = min(triton.next_power_of_2(Q), 32)
    blocks_q = triton.cdiv(Q, block_q)
    mean = triton.next_power_of_2(max(T // B, 1))
    block_t = max(min(_TILE // block_q, 4 ** (mean.bit_length() // 2)), 4)
    values = values.contiguous()
    _scan_kernel[(B * P * blocks_q,)](
        values,
        values if decay is None else decay.contiguous(),
        offsets,
        offsets if lengths is None else lengths,
        out,
        T,
        P,
        Q,
        blocks_q,
        op,
        _ACC[values.dtype],
        lengths is not None,
        reverse,
        block_t,
        block_q,
    )
    return out
