"""Both copies in Triton: flat runs of words, so that rows of any width move at the speed of memory.

values (P, total_length, R) words, offsets (B + 1,) <-> padded (B, P, width, R) words. In both shapes the rows of
one segment are one contiguous run, so a program copies a piece of a run and never divides by R. Words are as
wide as the row allows, whatever the dtype: the copy is bit for bit.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from njt.kernels.padding_plan import filler_bytes

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def _packed_to_padded_kernel(
    values,
    offsets,
    lengths,
    padded,
    pad_even,
    pad_odd,
    rows,
    width,
    R,
    P,
    blocks,
    HAS_LENGTHS: tl.constexpr,
    LEFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # one program writes BLOCK words of the plane of one (segment, pre index); int64 because planes pass 2**31
    program = tl.program_id(0).to(tl.int64)
    plane, block = program // blocks, program % blocks
    b, p = plane // P, plane % P
    start = tl.load(offsets + b).to(tl.int64)
    if HAS_LENGTHS:  # noqa: SIM108, Triton compiles one branch only
        length = tl.load(lengths + b).to(tl.int64)
    else:
        length = tl.load(offsets + b + 1).to(tl.int64) - start
    kept = tl.minimum(length, width)
    shift = 0
    first = start
    if LEFT:
        shift = width - kept
        first = start + length - kept
    # offsets that point outside of the rows: filler, no read there
    low = shift + tl.maximum(-first, 0)
    high = shift + tl.minimum(kept, rows - first)
    i = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    inside = (i >= low * R) & (i < high * R)
    word = tl.load(values + (p * rows + first - shift) * R + i, mask=inside, other=0)
    filler = tl.where((i & 1) == 0, pad_even, pad_odd).to(word.dtype)
    tl.store(padded + plane * width * R + i, tl.where(inside, word, filler), mask=i < width * R)


@triton.jit
def _padded_to_packed_kernel(
    padded,
    offsets,
    lengths,
    values,
    rows,
    width,
    R,
    P,
    B,
    blocks,
    HAS_LENGTHS: tl.constexpr,
    LEFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # one program writes every `blocks`-th piece of the run of one (segment, pre index)
    program = tl.program_id(0).to(tl.int64)
    plane, block = program // blocks, program % blocks
    b, p = plane // P, plane % P
    start = tl.load(offsets + b).to(tl.int64)
    if HAS_LENGTHS:  # noqa: SIM108, Triton compiles one branch only
        length = tl.load(lengths + b).to(tl.int64)
    else:
        length = tl.load(offsets + b + 1).to(tl.int64) - start
    kept = tl.minimum(length, width)
    shift = 0
    skipped = 0
    if LEFT:
        shift = width - kept
        skipped = length - kept
    # the run of rows that this segment writes, counted from its start and kept within the rows
    first = tl.maximum(-start, 0)
    last = length
    if not HAS_LENGTHS:
        # no row stays as it was: the first and the last segment also clear what lies before and behind
        first = tl.where(b == 0, -start, first)
        last = tl.where(b == B - 1, rows - start, last)
    first, last = first * R, tl.minimum(last, rows - start) * R
    low, high = skipped * R, (skipped + kept) * R
    source = padded + (plane * width + shift - skipped) * R
    target = values + (p * rows + start) * R
    for piece in range(block, (last - first + BLOCK - 1) // BLOCK, blocks):
        i = first + piece * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        word = tl.load(source + i, mask=(i >= low) & (i < high), other=0)
        tl.store(target + i, word, mask=i < last)


def packed_to_padded(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    width: int,
    padding: float,
    values_dim: int,
    left: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Launch for njt::packed_to_padded. Arguments were checked: no check, no `.item()`, no sync here."""
    batch, shape = offsets.shape[0] - 1, values.shape
    size = (batch, *shape[:values_dim], width, *shape[values_dim + 1 :])
    padded = torch.empty(size, dtype=values.dtype, device=values.device) if out is None else out
    if not padded.numel():
        return padded
    source = values.contiguous()
    planes, row = _planes(shape, values_dim)
    word = _word_size(row * values.element_size(), source, padded)
    words = row * values.element_size() // word
    even, odd = filler(padding, values.dtype, word)
    block, blocks = _grid(width * words)
    _packed_to_padded_kernel[(batch * planes * blocks,)](
        _as_words(source, word),
        offsets,
        offsets if lengths is None else lengths,
        _as_words(padded, word),
        even,
        odd,
        shape[values_dim],
        width,
        words,
        planes,
        blocks,
        lengths is not None,
        left,
        block,
    )
    return padded


def padded_to_packed(
    padded: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    total_length: int,
    values_dim: int,
    left: bool,
    partial: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Launch for njt::padded_to_packed; every row is written by the kernel, gaps are cleared before.

    The device is not asked where the offsets end, so `partial` makes no difference: rows behind are 0.
    """
    inner = padded.shape[1:]
    size = (*inner[:values_dim], total_length, *inner[values_dim + 1 :])
    clear = lengths is not None or padded.shape[0] == 0
    if out is None:
        make = torch.zeros if clear else torch.empty
        packed = make(size, dtype=padded.dtype, device=padded.device)
    else:
        packed = out.zero_() if clear else out
    if not packed.numel() or padded.shape[0] == 0:
        return packed
    source = padded.contiguous()
    planes, row = _planes(inner, values_dim)
    word = _word_size(row * padded.element_size(), source, packed)
    words, width = row * padded.element_size() // word, inner[values_dim]
    block, blocks = _grid(width * words)
    _padded_to_packed_kernel[(padded.shape[0] * planes * blocks,)](
        _as_words(source, word),
        offsets,
        offsets if lengths is None else lengths,
        _as_words(packed, word),
        total_length,
        width,
        words,
        planes,
        padded.shape[0],
        blocks,
        lengths is not None,
        left,
        block,
    )
    return packed


def _planes(shape: torch.Size, values_dim: int) -> tuple[int, int]:
    """Products of the sizes before and after the row dim."""
    before = after = 1
    for d, n in enumerate(shape):
        if d < values_dim:
            before *= n
        elif d > values_dim:
            after *= n
    return before, after


def _word_size(row_bytes: int, *tensors: Tensor) -> int:
    """The widest word that divides a row and the address of every tensor."""
    together = row_bytes
    for t in tensors:
        together |= t.data_ptr()
    return min(together & -together, 8)


def _as_words(x: Tensor, word: int) -> Tensor:
    return x.view(-1).view(_WORDS[word])


def _grid(plane: int) -> tuple[int, int]:
    """Words a program and programs a plane: enough work to hide latency, enough programs to fill the chip."""
    block = max(64, min(2048, triton.next_power_of_2(plane)))
    return block, max(triton.cdiv(plane, block), 1)


def filler(padding: float, dtype: torch.dtype, word: int) -> tuple[int, int]:
    """The padding value as words: what an even and an odd word of a row of filler hold, as signed numbers."""
    key = (repr(padding), dtype, word)  # by its text: -0.0 and 0.0 are equal, and other bits
    found = _FILLERS.get(key)
    if found is None:
        both = (filler_bytes(padding, dtype) * 16)[: 2 * word]
        code = {8: "<q", 4: "<i", 2: "<h", 1: "<B"}[word]
        found = struct.unpack(code, both[:word])[0], struct.unpack(code, both[word:])[0]
        _FILLERS[key] = found
    return found


_FILLERS: dict[tuple[str, torch.dtype, int], tuple[int, int]] = {}
