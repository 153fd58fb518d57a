"""Softmax and broadcast inside segments in Triton: rows written from the values and one entry a segment.

values (P, T, Q), the ragged dim in the middle; per segment (B, P, Q). Rows in gaps get 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from njt.kernels import segments_triton_pieces as pieces
from njt.kernels.segments_triton_pieces import ACC, blocks, own_rows, pair, planes

__all__ = ["spread"]


@triton.jit
def _spread_kernel(
    x,
    y,
    per_segment,
    offsets,
    lengths,
    out,
    B,
    T,
    P,
    Q,
    blocks_q,
    R: tl.constexpr,
    OP: tl.constexpr,
    ACC: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    CUTS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    # one program writes the rows of one piece of one segment, or of BLOCK_B segments, and 0 in the gaps behind them
    program = tl.program_id(0).to(tl.int64)
    q = (program % blocks_q) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    p = program // blocks_q % P
    k = program // blocks_q // P
    b, cut = pair(k, offsets, B, R, CUTS, BLOCK_B)
    start, stop, low, high = own_rows(offsets, lengths, b, B, T, HAS_LENGTHS)
    if CUTS:
        low, high = tl.maximum(low, cut * R), tl.minimum(high, (cut + 1) * R)
    longest = tl.max(high - low, 0)
    here = (b < B)[:, None] & (q < Q)[None, :]
    each_at = (b[:, None] * P + p) * Q + q[None, :]
    each = tl.load(per_segment + each_at, mask=here, other=0).to(ACC)[:, None, :]
    if OP == "ties":
        share = tl.load(y + each_at, mask=here, other=0).to(ACC)[:, None, :]
    if (OP == "softmax") | (OP == "log_softmax"):
        # as in the dense operator, one +inf makes all of its segment nan
        each = tl.where(each == float("inf"), float("nan"), each)
    t = tl.arange(0, BLOCK_T)
    for done in range(0, longest, BLOCK_T):
        row = low[:, None] + done + t[None, :]
        owned = (row < high[:, None])[:, :, None] & (q < Q)[None, None, :]
        real = ((row >= start[:, None]) & (row < stop[:, None]))[:, :, None] & owned
        at = (p * T + row)[:, :, None] * Q + q[None, None, :]
        if OP == "copy":
            v = tl.broadcast_to(each, (BLOCK_B, BLOCK_T, BLOCK_Q))
        else:
            v = tl.load(x + at, mask=real, other=0).to(ACC)
            if OP == "softmax":
                v = tl.exp(v - each)
            elif OP == "log_softmax":
                v = v - each
            elif OP == "ties":
                v = tl.where(v == each, share, 0.0)
            else:
                result = tl.load(y + at, mask=real, other=0).to(ACC)
                if OP == "softmax_backward":  # noqa: SIM108 the compiler drops one branch
                    v = result * (v - each)
                else:
                    v = v - tl.exp(result) * each
        tl.store(out + at, tl.where(real, v, 0).to(out.dtype.element_ty), mask=owned)


# ---- launch: the caller has checked shapes and devices; no check, no `.item()`, no sync -----------
def spread(
    per_segment: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    dim: int,
    op: str,
    total: int,
    *,
    max_seqlen: int | None = None,
    x: Tensor | None = None,
    y: Tensor | None = None,
    dtype: torch.dtype | None = None,
    cuts: bool | None = None,
) -> Tensor:
    """(*pre, total, *post), 0 in gaps: copy of the segment's entry e, softmax exp(x - e), log_softmax x - e,
    softmax_backward y * (x - e), log_softmax_backward x - exp(y) * e, ties y[b] where x is e."""
    B, inner = offsets.shape[0] - 1, per_segment.shape[1:]
    shape = (*inner[:dim], total, *inner[dim:])
    out = torch.empty(shape, dtype=dtype or per_segment.dtype, device=per_segment.device)
    if not out.numel():
        return out
    if B == 0:
        return out.zero_()
    P, Q = planes(out.shape, dim)
    cuts = pieces.is_cut(B, total, max_seqlen) if cuts is None else cuts
    block_b, block_t, block_q = blocks(B, total, Q, cuts)
    blocks_q = triton.cdiv(Q, block_q)
    pairs = B + (total - 1) // pieces.CUT if cuts else triton.cdiv(B, block_b)
    per_segment = per_segment.contiguous()
    _spread_kernel[(pairs * P * blocks_q,)](
        per_segment if x is None else x.contiguous(),
        per_segment if y is None else y.contiguous(),
        per_segment,
        offsets,
        offsets if lengths is None else lengths,
        out,
        B,
        total,
        P,
        Q,
        blocks_q,
        pieces.CUT,
        op,
        ACC.get(per_segment.dtype, tl.int64),
        lengths is not None,
        cuts,
        block_b,
        block_t,
        block_q,
    )
    return out
