"""Both copies for inductor: plain torch that fuses with its neighbours, so that no rectangle is written between.

Only inductor sees these decompositions; every other backend keeps the operators. What a packed row knows of
its segment is computed from the offsets alone, alike in every call, so that one graph computes it once.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from njt import _compat

aten = torch.ops.aten


def _generated(dtype: torch.dtype) -> bool:
    """Whether inductor generates code for masked loads of `dtype`."""
    return not dtype.is_complex and "float8" not in str(dtype)


def packed_to_padded(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    width: Any,
    padding: float,
    values_dim: int,
    left: bool,
) -> Any:
    """njt::packed_to_padded as a masked gather; NotImplemented leaves the operator as it is."""
    if not _generated(values.dtype):
        return NotImplemented
    starts = offsets[:-1]
    sizes = offsets[1:] - starts if lengths is None else lengths
    t = torch.arange(width, device=values.device)
    if left:
        t = t - (width - sizes[:, None])
        used, row = t >= 0, starts[:, None] + t
    else:
        used, row = t < sizes[:, None], starts[:, None] + t
    rows = values.movedim(values_dim, 0)
    mask = used.view(*used.shape, *[1] * (values.dim() - 1))
    picked = _masked_index(rows, mask, [row], padding)
    return picked.movedim(1, values_dim + 1).contiguous()


def padded_to_packed(
    padded: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    total_length: Any,
    values_dim: int,
    left: bool,
    partial: bool = False,
) -> Any:
    """njt::padded_to_packed as a masked gather through the segment of each row."""
    if not _generated(padded.dtype):
        return NotImplemented
    width = padded.shape[values_dim + 1]
    row = torch.arange(total_length, device=padded.device, dtype=offsets.dtype)
    batch = offsets.shape[0] - 1
    segment = torch.searchsorted(offsets, row, right=True) - 1
    segment = segment.clamp(0, batch - 1)
    t = row - offsets[segment]
    sizes = offsets[1:] - offsets[:-1] if lengths is None else lengths
    used = (t < sizes[segment]) & (t >= 0)
    if left:
        t = t + width - sizes[segment]
    used = used & (t >= 0) & (t < width)
    rows = padded.movedim(values_dim + 1, 1)
    mask = used.view(-1, *[1] * (rows.dim() - 2))
    picked = _masked_index(rows, mask, [segment, t], 0)
    return picked.movedim(0, values_dim).contiguous()


def _masked_index(x: Tensor, mask: Tensor, index: list[Tensor], filler: float) -> Tensor:
    """x[index] where the mask holds: no address outside is ever read, not even of an empty `x`."""
    if x.dtype.is_floating_point and x.dtype.itemsize == 1:
        # torch's masked load knows no fp8: bytes move as they are
        byte = torch.full((), filler, dtype=x.dtype, device=x.device).view(torch.uint8)
        picked = aten._unsafe_masked_index(x.view(torch.uint8), mask, index, 0)
        return torch.where(mask, picked, byte).view(x.dtype)
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        filler = bool(filler) if x.dtype is torch.bool else int(filler)
    return aten._unsafe_masked_index(x, mask, index, filler)


@functools.cache
def register() -> None:
    """Tells inductor, once, when a graph with one of the operators is first traced."""
    ops = torch.ops.njt
    _compat.register_inductor_decomposition(ops.packed_to_padded.default, packed_to_padded)
    _compat.register_inductor_decomposition(ops.padded_to_packed.default, padded_to_packed)
