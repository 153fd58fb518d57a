"""Segment kernels on the CPU: ATen calls that read the values once.

values (*pre, total, *post), ragged dim at `dim`; per segment (B, *pre, *post). Below autograd, on real tensors only.
"""

import torch
from torch import Tensor

from njt.kernels.segments_index import known_gapless, row_index, segment_lengths

__all__ = ["segment_sum"]

# an fp32 running sum of this many rows is as good as a dense sum; longer segments are summed in pieces
PIECE = 64


def _bags(rows: Tensor, index: Tensor, starts: Tensor, mean: bool = False) -> Tensor:
    """(len(starts) - 1, Q): sums of rows[index[starts[i]:starts[i + 1]]], fp32 inside for half types."""
    return torch.ops.aten._embedding_bag_forward_only(
        rows, index, starts, False, int(mean), False, None, True
    )[0]


def _pieces(starts: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Cuts bags of `sizes` beginning at `starts` into pieces: starts of the pieces, and the pieces of each bag."""
    counts = (sizes + PIECE - 1).div(PIECE, rounding_mode="floor")
    ends = counts.cumsum(0)
    total = int(ends[-1])
    bag = torch.repeat_interleave(torch.arange(len(sizes)), counts, output_size=total)
    within = torch.arange(total) - (ends - counts)[bag]
    bounds = torch.cat([starts[bag] + within * PIECE, starts[-1:]])
    return bounds, torch.cat([ends.new_zeros(1), ends])


def segment_sum(
    values: Tensor, offsets: Tensor, lengths: Tensor | None, dim: int, mean: bool = False
) -> Tensor:
    """(B, *pre, *post): sum or mean of real floating values; half types add up in fp32 and round once."""
    pre, post = values.shape[:dim], values.shape[dim + 1 :]
    P, T, Q, B = pre.numel(), values.shape[dim], post.numel(), offsets.shape[0] - 1
    if B == 0 or P == 0 or Q == 0 or T == 0:
        return values.new_full((B, *pre, *post), torch.nan if mean else 0)
    rows = values.reshape(P * T, Q)
    sizes = segment_lengths(offsets, lengths).long()
    if known_gapless(offsets, lengths, T):
        index, bounds, count = torch.arange(P * T), offsets.long(), T
    else:
        index = row_index(offsets, lengths)
        bounds, count = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]), len(index)
        if P > 1:
            index = (torch.arange(P)[:, None] * T + index).flatten()
    if P > 1:
        bounds = torch.cat(
            [
                (torch.arange(P)[:, None] * count + bounds[:-1]).flatten(),
                bounds.new_tensor([P * count]),
            ]
        )
        sizes = sizes.repeat(P)
    exact = values.dtype == torch.float64 or values.dtype.itemsize < 4 or int(sizes.max()) <= PIECE
    if exact:
        out = _bags(rows, index, bounds, mean)
    else:
        pieces, owners = _pieces(bounds, sizes)
        parts = _bags(rows, index, pieces).double()
        out = _bags(parts, torch.arange(len(parts)), owners)
        if mean:
            out = out / sizes[:, None]
        out = out.to(values.dtype)
    if mean and exact:
        out = torch.where(sizes[:, None] > 0, out, torch.nan)
    return out.view(P, B, Q).transpose(0, 1).reshape(B, *pre, *post)
