"""Segment kernels in plain Python loops: the definition that every implementation is tested against.

A segment operator is the dense operator, once a segment, on the rows of that segment alone. `values` is
(*pre, total, *post) with the ragged dim at `dim`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["bounds", "per_segment", "rowwise"]


def bounds(offsets: Tensor, lengths: Tensor | None) -> list[tuple[int, int]]:
    """First row and one past the last row of every segment."""
    starts = offsets.tolist()
    stops = (
        starts[1:]
        if lengths is None
        else [s + n for s, n in zip(starts, lengths.tolist(), strict=False)]
    )
    return list(zip(starts, stops, strict=False))


def per_segment(
    dense: Callable[[Tensor, int], Tensor],
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    dim: int,
) -> Tensor:
    """(B, *pre, *post): `dense(segment, dim)` drops the ragged dim of one segment."""
    return torch.stack(
        [dense(values.narrow(dim, a, b - a), dim) for a, b in bounds(offsets, lengths)]
    )


def rowwise(
    dense: Callable[[Tensor, int], Tensor],
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    dim: int,
) -> Tensor:
    """(*pre, total, *post): `dense(segment, dim)` keeps the shape of one segment; rows in gaps are 0."""
    where = bounds(offsets, lengths)
    done = [dense(values.narrow(dim, a, b - a), dim) for a, b in where]
    dtype = done[0].dtype if done else values.dtype
    parts, row = [], 0
    for (a, b), part in zip(where, done, strict=True):
        parts += [torch.zeros_like(values.narrow(dim, row, a - row), dtype=dtype), part]
        row = b
    parts.append(torch.zeros_like(values.narrow(dim, row, values.shape[dim] - row), dtype=dtype))
    return torch.cat(parts, dim)
