"""Both copies in Triton: which kernel, how wide its words, how its programs share the work.

values (*pre, total_length, *post), offsets (B + 1,) <-> padded (B, *pre, width, *post). The kernel is in
`padding_triton_runs`. Arguments were checked before; nothing here waits for the device.
"""

from __future__ import annotations

import math
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from njt.kernels.launch import Launcher
from njt.kernels.padding_filler import element_bytes
from njt.kernels.padding_triton_runs import move_runs

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}
_NARROW_FROM = 256  # bytes of a run; below, its ends are most of it
_move = Launcher(move_runs)


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
    """Launch for njt::packed_to_padded."""
    batch, shape = offsets.shape[0] - 1, values.shape
    padded = out
    if padded is None:
        size = (batch, *shape[:values_dim], width, *shape[values_dim + 1 :])
        padded = torch.empty(size, dtype=values.dtype, device=values.device)
    if not padded.numel():
        return padded
    planes = math.prod(shape[:values_dim])
    _copy(
        values.contiguous(),
        padded,
        offsets,
        lengths,
        (planes, shape[values_dim], width, padded.numel() // (batch * planes * width)),
        left,
        padding=padding,
        unpad=False,
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
    batch, *inner = padded.shape
    clear = lengths is not None or batch == 0
    if out is None:
        size = (*inner[:values_dim], total_length, *inner[values_dim + 1 :])
        make = torch.zeros if clear else torch.empty
        packed = make(size, dtype=padded.dtype, device=padded.device)
    else:
        packed = out.zero_() if clear else out
    if not packed.numel() or batch == 0:
        return packed
    planes = math.prod(inner[:values_dim])
    _copy(
        padded.contiguous(),
        packed,
        offsets,
        lengths,
        (planes, total_length, inner[values_dim], packed.numel() // (planes * total_length)),
        left,
        padding=0.0,
        unpad=True,
    )
    return packed


def _copy(
    source: Tensor,
    target: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    sizes: tuple[int, int, int, int],
    left: bool,
    padding: float,
    unpad: bool,
) -> None:
    """One launch; sizes: planes, rows of the packed side, width of the padded side, elements a row."""
    planes, rows, width, row = sizes
    itemsize = source.element_size()
    runs = (offsets.shape[0] - 1) * planes
    row *= itemsize
    together = row | source.data_ptr() | target.data_ptr()
    word = min(together & -together, 8)
    run_bytes = target.numel() * itemsize // runs  # of the target: on the mean, or each
    narrow = (
        word < 4 and run_bytes >= _NARROW_FROM and not (source.data_ptr() | target.data_ptr()) & 7
    )
    if narrow:
        word, steps = 8, row
    else:
        steps = row // word
    even, odd = filler(padding, source.dtype, word)
    G, W, blocks = (_unpad_tile if unpad else _pad_tile)(run_bytes // word, runs)
    _move(
        -(-runs // G) * blocks,
        (source, target),
        (offsets, offsets if lengths is None else lengths),
        (source.numel() * itemsize, runs, rows, width, steps, planes, blocks, even, odd),
        (unpad, lengths is not None, left, planes == 1, narrow, _WORDS[word], G, W),
    )


# Runs at once, words at once of each, and programs a run. A tile of 2048 words hides the latency of memory, few
# tiles are few kernels to compile.


def _pad_tile(words: int, runs: int) -> tuple[int, int, int]:
    """All runs are as long as one another, and are written to their end."""
    W = 2048 if words > 768 else 512 if words > 192 else 128
    G = 2048 // W
    return (G if runs >= 256 * G else 1), W, max(triton.cdiv(words, W), 1)


def _unpad_tile(words: int, runs: int) -> tuple[int, int, int]:
    """`words` is the mean: programs for the longest would idle in most runs, so they come back for more instead."""
    W = 2048 if words > 640 else 512 if words > 96 else 128
    G = 2048 // W
    blocks = max(1, words * 3 // (2 * W)) if W == 2048 else 1
    return (G if runs >= 256 * G else 1), W, blocks


def filler(padding: float, dtype: torch.dtype, word: int) -> tuple[int, int]:
    """The padding value as words: what an even and an odd word of a row of filler hold, as signed numbers."""
    key = (repr(padding), dtype, word)  # by its text: -0.0 and 0.0 are equal, and other bits
    found = _FILLERS.get(key)
    if found is None:
        both = (element_bytes(padding, dtype) * 16)[: 2 * word]
        code = {8: "<q", 4: "<i", 2: "<h", 1: "<B"}[word]
        found = struct.unpack(code, both[:word])[0], struct.unpack(code, both[word:])[0]
        _FILLERS[key] = found
    return found


_FILLERS: dict[tuple[str, torch.dtype, int], tuple[int, int]] = {}
