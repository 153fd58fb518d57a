"""The kernel of both copies: runs of words, so that rows of any width move at the speed of memory.

values (P, rows, R), offsets (B + 1,) <-> padded (B, P, width, R). In both shapes the rows of one segment are one
contiguous run, so nothing here divides by R. A program moves W words at a time of each of G runs. Words are as wide
as a row and the addresses allow, whatever the dtype: the copy is bit for bit. Where rows are no whole words (NARROW)
words of the target are put together from two words of the source each, and the few at the ends of runs by bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _first_of_pad(start, length, kept, width, LEFT: tl.constexpr):
    # rows of padding before the data, and the packed row that comes first
    shift = 0
    first = start
    if LEFT:
        shift = width - kept
        first = start + length - kept
    return shift, first


# pointers and numbers are exempt from specialization, for `launch.Launcher`
_RUNTIME = [
    *("source", "target", "offsets", "lengths"),
    *("source_bytes", "runs", "rows", "width", "R", "P", "blocks", "even", "odd"),
]


@triton.jit(do_not_specialize=_RUNTIME)
def move_runs(
    source,
    target,
    offsets,
    lengths,
    source_bytes: tl.int64,
    runs: tl.int64,
    rows: tl.int64,
    width: tl.int64,
    R: tl.int64,
    P: tl.int64,
    blocks: tl.int64,
    even: tl.int64,
    odd: tl.int64,
    UNPAD: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    LEFT: tl.constexpr,
    ONE_PLANE: tl.constexpr,
    NARROW: tl.constexpr,
    WORD: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
):
    # int64 because element offsets pass 2**31
    program = tl.program_id(0).to(tl.int64)
    block = program % blocks
    run = (program // blocks) * G + tl.arange(0, G)[:, None]
    if ONE_PLANE:
        b = run
        p = run * 0
    else:
        b = run // P
        p = run % P
    real = run < runs
    start = tl.load(offsets + b, mask=real, other=0).to(tl.int64)
    if HAS_LENGTHS:
        length = tl.load(lengths + b, mask=real, other=0).to(tl.int64)
    else:
        length = tl.load(offsets + b + 1, mask=real, other=0).to(tl.int64) - start
    kept = tl.minimum(length, width)
    # rows of the target run: [first, last) written, [low, high) of them data; offsets that point outside of the
    # rows are never followed
    shift, row = _first_of_pad(start, length, kept, width, LEFT)
    if UNPAD:
        skipped = row - start
        come = run * width + shift - skipped
        go = p * rows + start
        first = tl.maximum(-start, 0)
        last = length
        if not HAS_LENGTHS:
            # no row stays as it was: the first and the last segment also clear what lies before and behind
            first = tl.where(b == 0, -start, first)
            last = tl.where(run >= runs - P, rows - start, last)
        last = tl.minimum(last, rows - start)
        low = tl.maximum(skipped, first)
        high = tl.minimum(skipped + kept, last)
    else:
        come = p * rows + row - shift
        go = run * width
        first = tl.zeros_like(run)
        last = first + width
        low = shift + tl.maximum(-row, 0)
        high = shift + tl.minimum(kept, rows - row)
    last = tl.where(real, last, first)
    empty = (high <= low) | (last <= first)
    # from rows to positions in memory: words, or bytes where rows are no whole words
    delta = (come - go) * R
    origin = go * R
    first = origin + first * R
    last = origin + last * R
    low = tl.where(empty, last, origin + low * R)
    high = tl.where(empty, last, origin + high * R)
    if NARROW:
        # words that are whole: [w0, w1) in the run, [d0, d1) of data, below f0 and from f1 of filler
        w0 = (first + 7) >> 3
        w1 = last >> 3
        d0 = (low + 7) >> 3
        d1 = high >> 3
        f0 = low >> 3
        f1 = (high + 7) >> 3
        ahead = delta >> 3
        by = (delta & 7) * 8
        # the last bytes of the source are no whole word, or none of its
        d1 = tl.where(by > 0, tl.minimum(d1, (source_bytes >> 3) - 1 - ahead), d1)
    else:
        w0 = first
        w1 = last
        d0 = low
        d1 = high
        f0 = low
        f1 = high
        ahead = delta
        by = delta * 0
    from_words = source.to(tl.pointer_type(WORD))
    to_words = target.to(tl.pointer_type(WORD))
    lane = tl.arange(0, W)[None, :]
    pieces = tl.max(tl.max(w1 - w0, 1), 0)
    for piece in range(block, (pieces + W - 1) // W, blocks):
        base = w0 + piece * W
        data = (lane >= _within(d0 - base, W)) & (lane < _within(d1 - base, W))
        ours = lane < _within(w1 - base, W)
        word = tl.load(from_words + (base + ahead) + lane, mask=data, other=0)
        if NARROW:
            above = tl.load(from_words + (base + ahead + 1) + lane, mask=data & (by > 0), other=0)
            below = word.to(tl.uint64, bitcast=True) >> by.to(tl.uint64)
            above = above.to(tl.uint64, bitcast=True) << ((64 - by) & 63).to(tl.uint64)
            word = (below | above).to(tl.int64, bitcast=True)
            ours = ours & (data | (lane < _within(f0 - base, W)) | (lane >= _within(f1 - base, W)))
            filler = even
        else:
            filler = tl.where((((base - origin).to(tl.int32) + lane) & 1) == 0, even, odd)
        tl.store(to_words + base + lane, tl.where(data, word, filler.to(WORD)), mask=ours)
    if NARROW and block == 0:
        # bytes of the words at both ends of the run and of the data, and of the last word but one of the data
        k = tl.arange(0, 64)[None, :]
        slot = k >> 3
        word_at = tl.where(slot == 0, first >> 3, tl.where(slot == 1, last >> 3, low >> 3))
        word_at = tl.where(slot >= 3, (high >> 3) - (slot - 3), word_at)
        at = word_at * 8 + (k & 7)
        ours = (slot < 5) & (at >= first) & (at < last)
        data = (at >= low) & (at < high)
        from_bytes = source.to(tl.pointer_type(tl.uint8))
        byte = tl.load(from_bytes + at + delta, mask=ours & data, other=0)
        filler = ((even >> ((k & 7) * 8)) & 255).to(tl.uint8)
        to_bytes = target.to(tl.pointer_type(tl.uint8))
        tl.store(to_bytes + at, tl.where(data, byte, filler), mask=ours)


@triton.jit
def _within(position, W: tl.constexpr):
    return tl.minimum(tl.maximum(position, 0), W).to(tl.int32)
