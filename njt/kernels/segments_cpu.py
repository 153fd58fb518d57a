"""Segment kernels on the CPU: ATen calls that read the values once.

values (*pre, total, *post), ragged dim at `dim`; per segment (B, *pre, *post). Below autograd, on real tensors only.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from njt.kernels.segments_index import known_gapless, row_index, segment_ids, segment_lengths
from njt.kernels.segments_torch import wide

__all__ = ["argument", "scan", "segment_sum", "softmax", "softmax_backward", "views"]

aten = torch.ops.aten

# a running sum in fp32 loses little over so many rows; segments longer than two of them are summed in pieces
PIECE = 128
# a call a segment costs less than what it saves from so many elements a segment on
VIEW = 1024
# elements of a buffer that stays in the cache: fresh memory costs more than arithmetic
BUFFER = 32768


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
    exact = (
        values.dtype == torch.float64 or values.dtype.itemsize < 4 or int(sizes.max()) <= 2 * PIECE
    )
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


def views(
    values: Tensor, offsets: Tensor, lengths: Tensor | None, dim: int
) -> list[tuple[int, int]] | None:
    """First row and number of rows of each segment, if segments are large enough for a call each."""
    B = offsets.shape[0] - 1
    if values.numel() < VIEW * B:
        return None
    starts = offsets.tolist()
    sizes = segment_lengths(offsets, lengths).tolist()
    return [(a, n) for a, n in zip(starts, sizes) if n]


def _result(values: Tensor, offsets: Tensor, lengths: Tensor | None, dim: int) -> Tensor:
    """Memory for a result like values, with 0 in gaps."""
    make = torch.empty if known_gapless(offsets, lengths, values.shape[dim]) else torch.zeros
    return make(values.shape, dtype=values.dtype)


def each(
    dense: Callable[..., object],
    inputs: tuple[Tensor, ...],
    out: Tensor,
    spans: list[tuple[int, int]],
    dim: int,
) -> Tensor:
    """Runs `dense(*segments, out=segment)` on each segment, in place."""
    sizes = [n for _, n in spans]
    if sum(sizes) == out.shape[dim]:  # one call cuts them all
        for *parts, target in zip(*(x.split(sizes, dim) for x in inputs), out.split(sizes, dim)):
            dense(*parts, out=target)
    else:
        for start, n in spans:
            dense(*(x.narrow(dim, start, n) for x in inputs), out=out.narrow(dim, start, n))
    return out


def _row_blocks(rows: Tensor, per_segment: Tensor, ids: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows, each with its segments' entries in a buffer that is used again for the next."""
    step = max(1, BUFFER // max(rows[:1].numel(), 1))
    buffer = per_segment.new_empty(min(step, len(rows)), *per_segment.shape[1:])
    for start in range(0, len(rows), step):
        block = slice(start, min(start + step, len(rows)))
        taken = buffer[: block.stop - start]
        torch.index_select(per_segment, 0, ids[block], out=taken)
        yield block, taken


def softmax(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    ids: Tensor | None,
    dim: int,
    log: bool,
) -> Tensor | None:
    """None where plain torch calls do as well: no rows, or the ragged dim inside small segments."""
    spans = views(values, offsets, lengths, dim)
    if spans is not None:
        dense = aten._log_softmax.out if log else aten._softmax.out
        out = _result(values, offsets, lengths, dim)
        return each(lambda x, out: dense(x, dim, False, out=out), (values,), out, spans, dim)
    T, B = values.shape[dim], offsets.shape[0] - 1
    if dim or T == 0 or B == 0 or not known_gapless(offsets, lengths, T):
        return None
    ids = segment_ids(offsets, lengths, T) if ids is None else ids
    x = values.to(wide(values.dtype))
    index = ids.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    top = x.new_full((B, *x.shape[1:]), -torch.inf).scatter_reduce_(0, index, x, "amax")
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    exps = torch.empty_like(out) if log else out
    for block, taken in _row_blocks(x, top, ids):
        torch.sub(x[block], taken, out=out[block])
        torch.exp(out[block], out=exps[block])
    total = segment_sum(exps, offsets, lengths, 0)
    for block, taken in _row_blocks(x, total.log_() if log else total, ids):
        (out[block].sub_ if log else out[block].div_)(taken)
    return out.to(values.dtype)


def softmax_backward(
    grad: Tensor,
    output: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    ids: Tensor | None,
    dim: int,
    log: bool,
) -> Tensor | None:
    spans = views(output, offsets, lengths, dim)
    if spans is not None:
        dense = aten._log_softmax_backward_data.out if log else aten._softmax_backward_data.out
        name = "out" if log else "grad_input"

        def backward(g: Tensor, y: Tensor, out: Tensor) -> None:
            dense(g, y, dim, y.dtype, **{name: out})

        out = _result(output, offsets, lengths, dim)
        return each(backward, (grad, output), out, spans, dim)
    T, B = output.shape[dim], offsets.shape[0] - 1
    if dim or T == 0 or B == 0 or not known_gapless(offsets, lengths, T):
        return None
    ids = segment_ids(offsets, lengths, T) if ids is None else ids
    g, y = grad.to(wide(grad.dtype)), output.to(wide(output.dtype))
    out = torch.empty_like(y, memory_format=torch.contiguous_format)
    inner = segment_sum(g if log else torch.mul(g, y, out=out), offsets, lengths, 0)
    for block, taken in _row_blocks(y, inner, ids):
        if log:  # g - exp(y) * sum
            torch.exp(y[block], out=out[block])
            torch.sub(g[block], taken.mul_(out[block]), out=out[block])
        else:  # y * (g - sum) = g * y - y * sum
            out[block].sub_(taken.mul_(y[block]))
    return out.to(output.dtype)


def scan(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    dim: int,
    name: str,
    reverse: bool,
) -> Tensor | None:
    """None where segments are too small for a call each."""
    spans = views(values, offsets, lengths, dim)
    if spans is None:
        return None
    if name in ("cummax", "cummin"):
        both = getattr(torch, name)

        def dense(x: Tensor, out: Tensor) -> None:
            if reverse:
                out.copy_(both(x.flip(dim), dim).indices.flip(dim)).neg_().add_(x.shape[dim] - 1)
            else:
                out.copy_(both(x, dim).indices)

        indices = torch.zeros(values.shape, dtype=torch.int64)
        return each(dense, (values,), indices, spans, dim)
    single = getattr(torch, name)

    def running(x: Tensor, out: Tensor) -> None:
        if reverse:
            out.copy_(single(x.flip(dim), dim).flip(dim))
        else:
            single(x, dim, out=out)

    return each(running, (values,), _result(values, offsets, lengths, dim), spans, dim)


def argument(
    values: Tensor,
    best: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    ids: Tensor,
    dim: int,
) -> Tensor:
    """(B, *pre, *post): index in its segment of the first row that is `best` or nan; -1 without one."""
    rows = values.movedim(dim, 0)
    B, width, far = len(best), best[:1].numel(), torch.iinfo(torch.int64).max
    out = torch.full(best.shape, far)
    if B == 0 or values.numel() == 0:
        return out.fill_(-1)
    slots = torch.cat([best, best[:1]])  # gaps take any entry, and are dropped below
    has_nan = values.is_floating_point() and bool(best.isnan().any())
    words: list[Tensor] = []
    firsts: list[Tensor] = []
    flags = torch.zeros(max(BUFFER, width) + 8, dtype=torch.bool)
    for block, taken in _row_blocks(rows, slots, ids):
        n = taken.numel()
        found = flags[:n].view(taken.shape)
        torch.eq(rows[block], taken, out=found)
        if has_nan:
            found |= rows[block].isnan()
        flags[n:].zero_()
        # few are found: look for them eight at a time
        eights = flags[: n + 8 - n % 8].view(torch.int64)
        word = eights.nonzero()[:, 0]
        words.append(eights[word])
        firsts.append(word * 8 + block.start * width)
    which, byte = torch.cat(words).view(torch.uint8).view(-1, 8).nonzero(as_tuple=True)
    place = torch.cat(firsts)[which] + byte
    row, column = place.div(width, rounding_mode="floor"), place % width
    segment = ids[row]
    inside = segment < B
    row, segment, column = row[inside], segment[inside], column[inside]
    index = row - offsets.long()[segment]
    out.view(-1).scatter_reduce_(0, segment * width + column, index, "amin")
    return out.masked_fill_(out == far, -1)
