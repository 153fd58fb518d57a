"""Segment reductions, softmax and broadcast in Triton: every value read once a pass, no buffer of B * width.

values (P, T, Q), the ragged dim in the middle; per segment (B, P, Q). A pass is one of two kernels: `fold` reduces the
rows of a segment, `spread` writes rows from the values and one entry a segment. Segments that may be long are cut at
every R-th row of `values`. Of the pairs (segment, cut) that meet, the k-th one has k = segment + cut, so a program
finds its pair by a binary search in the offsets: no list of work is made, and the host never sees a length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["fold", "spread"]

CUT = 512  # rows of a piece of a long segment
WHOLE = 1024  # a segment of up to so many rows is one program's work
_TILE = 4096  # elements a program holds


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
def _own_rows(offsets, lengths, b, B, T, HAS_LENGTHS: tl.constexpr):
    """First and last real row + 1 of segments b, and the rows that they answer for: gaps go to the one before."""
    inside = b < B
    start = tl.load(offsets + b, mask=inside, other=0).to(tl.int64)
    following = tl.load(offsets + b + 1, mask=inside, other=0).to(tl.int64)
    stop = following
    if HAS_LENGTHS:
        stop = start + tl.load(lengths + b, mask=inside, other=0).to(tl.int64)
    low = tl.where(b == 0, 0, start)
    high = tl.where(b == B - 1, T, following)
    return start, stop, tl.where(inside, low, 0), tl.where(inside, high, 0)


@triton.jit
def _pair(k, offsets, B, R, CUTS: tl.constexpr, BLOCK_B: tl.constexpr):
    """Segments (BLOCK_B,) of program k, and its cut."""
    if CUTS:
        low, high = k * 0, k * 0 + B - 1
        while low < high:  # the last segment whose first pair is at or before k
            middle = (low + high + 1) // 2
            if middle + tl.load(offsets + middle).to(tl.int64) // R <= k:
                low = middle
            else:
                high = middle - 1
        return low + tl.arange(0, BLOCK_B), k - low
    return k * BLOCK_B + tl.arange(0, BLOCK_B), k * 0


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
    b, cut = _pair(k, offsets, B, R, CUTS, BLOCK_B)
    start, stop, low, high = _own_rows(offsets, lengths, b, B, T, HAS_LENGTHS)
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
    _, _, low, high = _own_rows(offsets, offsets, b, B, T, False)
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
    b, cut = _pair(k, offsets, B, R, CUTS, BLOCK_B)
    start, stop, low, high = _own_rows(offsets, lengths, b, B, T, HAS_LENGTHS)
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
_ACC = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
}
_TORCH = {tl.float64: torch.float64, tl.float32: torch.float32, tl.int64: torch.int64}
DTYPES = (*_ACC, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _identity(op: str, dtype: torch.dtype) -> float | int:
    if op in ("sum", "dot", "ties"):
        return 0
    if op == "prod":
        return 1
    if dtype.is_floating_point:
        return float("inf") if op == "amin" else float("-inf")
    return torch.iinfo(dtype).max if op == "amin" else torch.iinfo(dtype).min


def _planes(shape: torch.Size, dim: int) -> tuple[int, int]:
    before = after = 1
    for d, n in enumerate(shape):
        if d < dim:
            before *= n
        elif d > dim:
            after *= n
    return before, after


def _blocks(B: int, T: int, Q: int, cuts: bool) -> tuple[int, int, int]:
    """Segments, rows and columns of a program's tile, from the mean length: the true ones stay on the device."""
    columns = min(triton.next_power_of_2(Q), 128)
    room = _TILE // columns
    if cuts:
        return 1, min(room, CUT), columns
    rows = min(room, triton.next_power_of_2(max(T // B, 1)))
    rows = 4 ** (rows.bit_length() // 2)  # few sizes, few compilations
    return max(1, min(room // rows // 4, 64)), rows, columns


def _cut(B: int, T: int, max_seqlen: int | None) -> bool:
    """Whether segments are cut: those of unknown length only if the mean says that some are long."""
    if max_seqlen is not None:
        return max_seqlen > WHOLE
    return WHOLE < T and T >= 32 * B


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
    P, Q = _planes(x.shape, dim)
    shape = (B, *x.shape[:dim], *x.shape[dim + 1 :])
    out = torch.empty(shape, dtype=dtype or x.dtype, device=x.device)
    if not out.numel():
        return out
    identity = _identity(op, x.dtype)
    if T == 0:
        return out.fill_(identity)
    acc = _ACC.get(x.dtype, tl.int64)
    cuts = _cut(B, T, max_seqlen) if cuts is None else cuts
    block_b, block_t, block_q = _blocks(B, T, Q, cuts)
    blocks_q = triton.cdiv(Q, block_q)
    pairs = B + (T - 1) // CUT if cuts else triton.cdiv(B, block_b)
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
        CUT,
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
            CUT,
            "sum" if op in ("dot", "ties") else op,
            identity,
            acc,
            min(_TILE // block_q, 16),
            block_q,
        )
    return out


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
    P, Q = _planes(out.shape, dim)
    cuts = _cut(B, total, max_seqlen) if cuts is None else cuts
    block_b, block_t, block_q = _blocks(B, total, Q, cuts)
    blocks_q = triton.cdiv(Q, block_q)
    pairs = B + (total - 1) // CUT if cuts else triton.cdiv(B, block_b)
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
        CUT,
        op,
        _ACC.get(per_segment.dtype, tl.int64),
        lengths is not None,
        cuts,
        block_b,
        block_t,
        block_q,
    )
    return out
