"""The padding copies in plain Python loops: the definition that every implementation is tested against."""

from __future__ import annotations

import torch
from torch import Tensor


def _segments(offsets: Tensor, lengths: Tensor | None) -> list[tuple[int, int]]:
    starts = offsets.tolist()
    sizes = offsets.diff().tolist() if lengths is None else lengths.tolist()
    return list(zip(starts, sizes))


def packed_to_padded(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    width: int,
    padding: float,
    values_dim: int,
    left: bool,
) -> Tensor:
    """njt::packed_to_padded."""
    shape = list(values.shape)
    shape[values_dim] = width
    padded = torch.full(
        (offsets.shape[0] - 1, *shape), padding, dtype=values.dtype, device=values.device
    )
    for row, (start, length) in zip(padded, _segments(offsets, lengths)):
        for t in range(length):
            at = width - length + t if left else t
            if 0 <= at < width:
                row.select(values_dim, at).copy_(values.select(values_dim, start + t))
    return padded


def padded_to_packed(
    padded: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    total_length: int,
    values_dim: int,
    left: bool,
    partial: bool = False,
) -> Tensor:
    """njt::padded_to_packed."""
    shape, width = list(padded.shape[1:]), padded.shape[values_dim + 1]
    shape[values_dim] = total_length
    packed = torch.zeros(shape, dtype=padded.dtype, device=padded.device)
    for row, (start, length) in zip(padded, _segments(offsets, lengths)):
        for t in range(length):
            at = width - length + t if left else t
            if 0 <= at < width:
                packed.select(values_dim, start + t).copy_(row.select(values_dim, at))
    return packed
