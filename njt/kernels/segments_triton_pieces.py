"""How segments are dealt out to Triton programs: several short ones each, or long ones in pieces.

values (P, T, Q), the ragged dim in the middle. Segments that may be long are cut at every R-th row of `values`. Of the
pairs (segment, cut) that meet, the k-th one has k = segment + cut, so a program finds its pair by a binary search in
the offsets: no list of work is made, and the host never sees a length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = [
    "ACC",
    "CUT",
    "DTYPES",
    "TILE",
    "blocks",
    "is_cut",
    "own_rows",
    "pair",
    "planes",
]

CUT = 512  # rows of a piece of a long segment
WHOLE = 1024  # a segment of up to so many rows is one program's work
TILE = 4096  # elements a program holds
ACC = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
}
DTYPES = (*ACC, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@triton.jit
def own_rows(offsets, lengths, b, B, T, HAS_LENGTHS: tl.constexpr):
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
def pair(k, offsets, B, R, CUTS: tl.constexpr, BLOCK_B: tl.constexpr):
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


def planes(shape: torch.Size, dim: int) -> tuple[int, int]:
    before = after = 1
    for d, n in enumerate(shape):
        if d < dim:
            before *= n
        elif d > dim:
            after *= n
    return before, after


def blocks(B: int, T: int, Q: int, cuts: bool) -> tuple[int, int, int]:
    """Segments, rows and columns of a program's tile, from the mean length: the true ones stay on the device."""
    columns = min(triton.next_power_of_2(Q), 128)
    room = TILE // columns
    if cuts:
        return 1, min(room, CUT), columns
    rows = min(room, triton.next_power_of_2(max(T // B, 1)))
    rows = 4 ** (rows.bit_length() // 2)  # few sizes, few compilations
    return max(1, min(room // rows // 4, 64)), rows, columns


def is_cut(B: int, T: int, max_seqlen: int | None) -> bool:
    """Whether segments are cut: those of unknown length only if the mean says that some are long."""
    if max_seqlen is not None:
        return max_seqlen > WHOLE
    return WHOLE < T and T >= 32 * B
