"""The general fallback: segments grouped by length within a factor of two, one small padded block a group.

Right for any operator that has a dense form over one dim, on any device, and differentiable. It reads the lengths back
(or takes `host_lengths`), so it is for eager only; the padded blocks together hold less than twice the rows.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from njt.kernels.segments_index import segment_lengths

__all__ = ["bucketed"]

Blockwise = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, ...]]


def _groups(
    sizes: Tensor, host_lengths: Sequence[int] | None
) -> tuple[Tensor, list[tuple[int, int, int, int]]]:
    """Segments by rising length, and the groups as (first, last + 1, shortest, longest) in that order."""
    host = sizes.cpu() if host_lengths is None else torch.tensor(host_lengths, dtype=torch.int64)
    rising, order = host.long().sort(stable=True)
    edges = torch.tensor([0, *(1 << k for k in range(40))])
    cuts = torch.searchsorted(rising, edges, right=True).tolist()
    spans = [(a, b) for a, b in zip([0, *cuts[:-1]], cuts, strict=True) if b > a]
    return order.to(sizes.device), [(a, b, int(rising[a]), int(rising[b - 1])) for a, b in spans]


def bucketed(
    fn: Blockwise,
    values: Tensor,
    offsets: Tensor,
    *,
    lengths: Tensor | None = None,
    dim: int = 0,
    padding: float | int | bool = 0,
    keeps_rows: bool = False,
    host_lengths: Sequence[int] | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Runs `fn` on padded blocks of segments of like length.

    Args:
        fn: (block, mask) -> result(s). `block` is (n, width, *rest) with the ragged dim at 1, `mask` (n, width) is
            True on rows of segments; what is past them holds `padding`. An empty segment is one row of padding.
        values: (*pre, total, *post), with the ragged dim at `dim`.
        offsets: (B + 1,), int32 or int64.
        lengths: (B,) where there are gaps.
        dim: where the ragged dim lies.
        padding: what fills the blocks.
        keeps_rows: whether results are (n, width, *rest), to be packed again, or (n, *result), one for each segment.
        host_lengths: the lengths as numbers; given, nothing is read back from a device.
    Returns:
        As many results as `fn` gives: (*pre, total, *post) with 0 in gaps, or (B, *result).
    """
    rows = values.movedim(dim, 0)
    sizes, starts = segment_lengths(offsets, lengths).long(), offsets[:-1].long()
    order, groups = _groups(sizes, host_lengths)
    if not groups:  # B = 0: an empty block tells the shapes and dtypes of the results
        order, groups = order, [(0, 0, 1, 1)]
    results: list[tuple[Tensor, ...]] = []
    indices: list[Tensor] = []
    single = False
    for first, last, shortest, longest in groups:
        width = max(longest, 1)
        chosen = order[first:last]
        step = torch.arange(width, device=values.device)
        index = starts[chosen, None] + step
        mask = step < sizes[chosen, None]
        full = shortest == width
        if full:
            block = rows[index]
        elif rows.shape[0]:
            block = rows[torch.where(mask, index, 0)]
            block = block.masked_fill(~mask.view(*mask.shape, *[1] * (rows.dim() - 1)), padding)
        else:
            block = rows.new_full((len(chosen), width, *rows.shape[1:]), padding)
        out = fn(block, mask)
        single = isinstance(out, Tensor)
        outs = (out,) if isinstance(out, Tensor) else out
        if keeps_rows:
            outs = tuple(o.flatten(0, 1) if full else o[mask] for o in outs)
            indices.append(index.flatten() if full else index[mask])
        results.append(outs)
    joined = [
        torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*results, strict=True)
    ]
    if keeps_rows:
        index = torch.cat(indices)
        packed = [
            j.new_zeros(rows.shape[0], *j.shape[1:]).index_copy(0, index, j).movedim(0, dim)
            for j in joined
        ]
    else:
        back = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=order.device)
        )
        packed = [j[back] for j in joined]
    return packed[0] if single else tuple(packed)
