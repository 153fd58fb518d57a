"""Where segments lie: ids, positions and row indices computed from offsets alone.

Segment b of `total` packed rows is [offsets[b], offsets[b + 1]) or, with `lengths`,
[offsets[b], offsets[b] + lengths[b]). Segments come in order and do not overlap; rows outside all of them are gaps.
Imports torch and _compat only. No function reads a value back from a device, except where it says so.
"""

import torch
from torch import Tensor

from njt import _compat

__all__ = ["is_eager", "known_gapless", "positions", "row_index", "segment_ids", "segment_lengths"]


def is_eager(x: Tensor) -> bool:
    """Whether `x` is an ordinary tensor with memory, so that a path which looks at its values is open."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and not _compat.is_transformed(x)
    )


def segment_lengths(offsets: Tensor, lengths: Tensor | None) -> Tensor:
    """(B,) rows of each segment, in the dtype of `offsets`."""
    return offsets.diff() if lengths is None else lengths


def known_gapless(offsets: Tensor, lengths: Tensor | None, total: int) -> bool:
    """True only where it is free to see that every one of the `total` rows is in a segment: on a CPU, in eager."""
    if lengths is not None or not is_eager(offsets) or offsets.device.type != "cpu":
        return False
    return int(offsets[0]) == 0 and int(offsets[-1]) == total


def segment_ids(offsets: Tensor, lengths: Tensor | None, total: int) -> Tensor:
    """(total,) int64: the segment each row belongs to, and B for rows in gaps.

    >>> segment_ids(torch.tensor([0, 2, 2, 5]), torch.tensor([1, 0, 3]), 6)
    tensor([0, 3, 2, 2, 2, 3])
    """
    B = offsets.shape[0] - 1
    rows = torch.arange(total, device=offsets.device)
    if B == 0:
        return torch.zeros_like(rows)
    if known_gapless(offsets, lengths, total):
        segments = torch.arange(B, device=offsets.device)
        return torch.repeat_interleave(segments, offsets.diff(), output_size=total)
    ends = offsets[1:] if lengths is None else offsets[:-1] + lengths
    # the last start at or below a row; of equal starts only the last one can hold rows
    found = torch.bucketize(rows, offsets[:-1].long(), right=True) - 1
    first = found.clamp(min=0)
    return torch.where((found >= 0) & (rows < ends.long()[first]), first, B)


def positions(offsets: Tensor, ids: Tensor) -> Tensor:
    """(total,) int64: the index of each row in its segment, and 0 for rows in gaps."""
    B = offsets.shape[0] - 1
    if B == 0:
        return torch.zeros_like(ids)
    rows = torch.arange(ids.shape[0], device=ids.device)
    return torch.where(ids < B, rows - offsets.long()[ids.clamp(max=B - 1)], 0)


def row_index(offsets: Tensor, lengths: Tensor | None, count: int | None = None) -> Tensor:
    """(count,) int64: the rows inside segments, in order, so that `values[row_index]` has no gaps.

    Args:
        offsets: (B + 1,).
        lengths: (B,) or None.
        count: the sum of all lengths; left out, it is read back from the device.
    """
    sizes = segment_lengths(offsets, lengths).long()
    if sizes.shape[0] == 0:
        return sizes
    if count is None:
        count = int(sizes.sum())
    ends = sizes.cumsum(0)
    shift = offsets[:-1].long() - (
        ends - sizes
    )  # how far each segment lies from its place without gaps
    return torch.arange(count, device=offsets.device) + torch.repeat_interleave(
        shift, sizes, output_size=count
    )
