"""Segment reductions in Triton: every value read once, no buffer of B * width.

values (P, T, Q), the ragged dim in the middle; per segment (B, P, Q). Pieces of a long segment go to a buffer that a
second kernel joins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from njt.kernels import segments_triton_pieces as pieces
from njt.kernels.segments_triton_pieces import ACC, blocks, own_rows, pair, planes

__all__ = ["fold"]


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _less(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _finite(m):
    # what may be subtracted: where the maximum is infinite the sum of exp alone tells the result
    return tl.where((m == float("inf")) | (m == float("-inf")), 0.0, m)


@triton.jit
def _joined(acc, v, OP: tl.constexpr):
    if OP == "amax":
        return _greater(acc, v)
    if OP == "amin":
        return _less(acc, v)
    if OP == "prod":
        return acc * v
    return acc + v


@triton.jit
def _folded(acc, OP: tl.constexpr):
    if OP == "amax":
        return tl.reduce(acc, 1, _greater)
    if OP == "amin":
        return tl.reduce(acc, 1, _less)
    if OP == "prod":
        return tl.reduce(acc, 1, _times)
    return tl.sum(acc, 1)


@triton.jit
def _fold_kernel(
    x,
    y,
    offsets,
    lengths,
    out,
    parts,
    B,
    T,
    P,
    Q,
    blocks_q,
    R: tl.constexpr,
    OP: tl.constexpr,
    IDENTITY: tl.constexpr,
    ACC: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    CUTS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    # one program folds one piece of one segment, or BLOCK_B whole segments; int64 because T * Q passes 2**31
    program = tl.program_id(0).to(tl.int64)
    q = (program % blocks_q) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    p = program // blocks_q % P
    k = program // blocks_q // P
    b, cut = pair(k, offsets, B, R, CUTS, BLOCK_B)
    start, stop, low, high = own_rows(offsets, lengths, b, B, T, HAS_LENGTHS)
    first, last = start, stop
    if CUTS:
        first, last = tl.maximum(start, cut * R), tl.minimum(stop, (cut + 1) * R)
    longest = tl.max(last - first, 0)
    t = tl.arange(0, BLOCK_T)
    here = (b < B)[:, None] & (q < Q)[None, :]
    each_at = (b[:, None] * P + p) * Q + q[None, :]
    if OP == "ties":
        each = tl.load(y + each_at, mask=here, other=0).to(ACC)[:, None, :]
    acc = tl.full((BLOCK_B, BLOCK_T, BLOCK_Q), IDENTITY, ACC)
    total = tl.full((BLOCK_B, BLOCK_T, BLOCK_Q), 0, ACC)
    for done in range(0, longest, BLOCK_T):
        row = first[:, None] + done + t[None, :]
        inside = (row < last[:, None])[:, :, None] & (q < Q)[None, None, :]
        at = (p * T + row)[:, :, None] * Q + q[None, None, :]
        v = tl.load(x + at, mask=inside, other=IDENTITY).to(ACC)
        if OP == "ties":
            v = tl.where((v == each) & inside, 1, 0).to(ACC)
        if OP == "dot":
            v *= tl.load(y + at, mask=inside, other=0).to(ACC)
        if OP == "logsumexp":
            top = tl.maximum(acc, v)
            kept = tl.where(acc == float("-inf"), 0.0, tl.exp(_finite(acc) - _finite(top)))
            total = total * kept + tl.exp(v - _finite(top))
            acc = top
        else:
            acc = _joined(acc, v, OP)
    if OP == "logsumexp":
        top = tl.max(acc, 1)
        kept = tl.where(acc == float("-inf"), 0.0, tl.exp(_finite(acc) - _finite(top)[:, None, :]))
        result = tl.log(tl.sum(total * kept, 1)) + _finite(top)
    else:
        result = _folded(acc, OP)
    if CUTS:
        first_cut, last_cut = low // R, tl.maximum(high - 1, low) // R
        here = here & (cut <= last_cut)[:, None]
        single = (first_cut == last_cut)[:, None]
        slot = (k * P + p) * Q + q[None, :]
        tl.store(parts + slot, result, mask=here & (single == 0))
        here = here & single
    tl.store(out + each_at, result.to(out.dtype.element_ty), mask=here)


@triton.jit
def _fold_parts_kernel(
    parts,
    offsets,
    out,
    B,
    T,
    P,
    Q,
    blocks_q,
    R: tl.constexpr,
    OP: tl.constexpr,
    IDENTITY: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    # one program joins the pieces of one segment, where there is more than one
    program = tl.program_id(0).to(tl.int64)
    q = (program % blocks_q) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    p = program // blocks_q % P
    b = program // blocks_q // P
    _, _, low, high = own_rows(offsets, offsets, b, B, T, False)
    first, last = low // R, tl.maximum(high - 1, low) // R
    if last > first:
        t = tl.arange(0, BLOCK_T)
        acc = tl.full((1, BLOCK_T, BLOCK_Q), IDENTITY, ACC)
        total = tl.full((1, BLOCK_T, BLOCK_Q), 0, ACC)
        for done in range(first, last + 1, BLOCK_T):
            cut = done + t
            inside = (cut <= last)[None, :, None] & (q < Q)[None, None, :]
            at = ((b + cut) * P + p)[None, :, None] * Q + q[None, None, :]
            v = tl.load(parts + at, mask=inside, other=IDENTITY).to(ACC)
            if OP == "logsumexp":
                top = tl.maximum(acc, v)
                kept = tl.where(acc == float("-inf"), 0.0, tl.exp(_finite(acc) - _finite(top)))
                total = total * kept + tl.exp(v - _finite(top))
                acc = top
            else:
                acc = _joined(acc, v, OP)
        if OP == "logsumexp":
            top = tl.max(acc, 1)
            kept = tl.where(
                acc == float("-inf"), 0.0, tl.exp(_finite(acc) - _finite(top)[:, None, :])
            )
            result = tl.log(tl.sum(total * kept, 1)) + _finite(top)
        else:
            result = _folded(acc, OP)
        at = (b * P + p) * Q + q
        tl.store(out + at[None, :], result.to(out.dtype.element_ty), mask=(q < Q)[None, :])


# ---- launch: the caller has checked shapes and devices; no check, no `.item()`, no sync -----------
_TORCH = {tl.float64: torch.float64, tl.float32: torch.float32, tl.int64: torch.int64}


def _identity(op: str, dtype: torch.dtype) -> float | int:
    if op in ("sum", "dot", "ties"):
        return 0
    if op == "prod":
        return 1
    if dtype.is_floating_point:
        return float("inf") if op == "amin" else float("-inf")
    return torch.iinfo(dtype).max if op == "amin" else torch.iinfo(dtype).min


def fold(
    x: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    dim: int,
    op: str,
    *,
    max_seqlen: int | None = None,
    y: Tensor | None = None,
    dtype: torch.dtype | None = None,
    cuts: bool | None = None,
) -> Tensor:
    """(B, *pre, *post): sum, amax, amin, prod, logsumexp of x, dot, the sum of x * y, or ties, how often x is y[b].

    Half types are folded in fp32; `dtype` is the one to round to, the one of x if left out.
    """
    B, T = offsets.shape[0] - 1, x.shape[dim]
    P, Q = planes(x.shape, dim)
    shape = (B, *x.shape[:dim], *x.shape[dim + 1 :])
    out = torch.empty(shape, dtype=dtype or x.dtype, device=x.device)
    if not out.numel():
        return out
    identity = _identity(op, x.dtype)
    if T == 0:
        return out.fill_(identity)
    acc = ACC.get(x.dtype, tl.int64)
    cuts = pieces.is_cut(B, T, max_seqlen) if cuts is None else cuts
    block_b, block_t, block_q = blocks(B, T, Q, cuts)
    blocks_q = triton.cdiv(Q, block_q)
    pairs = B + (T - 1) // pieces.CUT if cuts else triton.cdiv(B, block_b)
    parts = torch.empty((pairs, P, Q), dtype=_TORCH[acc], device=x.device) if cuts else out
    x = x.contiguous()
    _fold_kernel[(pairs * P * blocks_q,)](
        x,
        x if y is None else y.contiguous(),
        offsets,
        offsets if lengths is None else lengths,
        out,
        parts,
        B,
        T,
        P,
        Q,
        blocks_q,
        pieces.CUT,
        op,
        identity,
        acc,
        lengths is not None,
        cuts,
        block_b,
        block_t,
        block_q,
    )
    if cuts:
        _fold_parts_kernel[(B * P * blocks_q,)](
            parts,
            offsets,
            out,
            B,
            T,
            P,
            Q,
            blocks_q,
            pieces.CUT,
            "sum" if op in ("dot", "ties") else op,
            identity,
            acc,
            min(pieces.TILE // block_q, 16),
            block_q,
        )
    return out
