"""Which segment operators run in Triton, and how each is made of `fold` and `spread`.

Every function gives None where Triton is not installed or does not know the dtype: plain torch calls run then.
"""

import torch
from torch import Tensor

from njt.kernels.segments_index import segment_lengths
from njt.kernels.segments_torch import wide

try:
    from njt.kernels import segments_triton_scan
    from njt.kernels.segments_triton_fold import fold
    from njt.kernels.segments_triton_pieces import DTYPES
    from njt.kernels.segments_triton_spread import spread
except ImportError:  # Triton is on Linux only
    segments_triton_scan = None  # type: ignore[assignment]
    DTYPES = ()

__all__ = ["broadcast", "reduce", "scan", "softmax", "softmax_backward", "ties"]


def _knows(*tensors: Tensor) -> bool:
    return all(t.dtype in DTYPES for t in tensors)


def reduce(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    dim: int,
    max_seqlen: int | None,
    name: str,
) -> Tensor | None:
    dtype = values.dtype
    if dtype == torch.bool:
        out = reduce(values.view(torch.uint8), offsets, lengths, dim, max_seqlen, name)
        return None if out is None else out.to(torch.bool)
    if dtype.is_complex and name in ("sum", "mean"):
        parts = torch.view_as_real(values.resolve_conj())
        out = reduce(parts, offsets, lengths, dim, max_seqlen, name)
        return None if out is None else torch.view_as_complex(out)
    if not _knows(values):
        return None
    if name == "mean":
        total = fold(values, offsets, lengths, dim, "sum", max_seqlen=max_seqlen, dtype=wide(dtype))
        sizes = segment_lengths(offsets, lengths).view(-1, *[1] * (values.dim() - 1))
        return (total / sizes).to(dtype)
    return fold(values, offsets, lengths, dim, name, max_seqlen=max_seqlen)


def broadcast(
    per_segment: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    dim: int,
    max_seqlen: int | None,
    total: int,
) -> Tensor | None:
    if per_segment.dtype == torch.bool:
        as_bytes = per_segment.view(torch.uint8)
        out = broadcast(as_bytes, offsets, lengths, dim, max_seqlen, total)
        return None if out is None else out.view(torch.bool)
    if per_segment.dtype.is_complex:
        parts = torch.view_as_real(per_segment.resolve_conj())
        out = broadcast(parts, offsets, lengths, dim, max_seqlen, total)
        return None if out is None else torch.view_as_complex(out)
    if not _knows(per_segment):
        return None
    return spread(per_segment, offsets, lengths, dim, "copy", total, max_seqlen=max_seqlen)


def ties(
    grad: Tensor,
    values: Tensor,
    output: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    dim: int,
    max_seqlen: int | None,
) -> Tensor | None:
    if not _knows(values):
        return None
    count = fold(
        values,
        offsets,
        lengths,
        dim,
        "ties",
        max_seqlen=max_seqlen,
        y=output,
        dtype=wide(values.dtype),
    )
    return spread(
        output,
        offsets,
        lengths,
        dim,
        "ties",
        values.shape[dim],
        max_seqlen=max_seqlen,
        x=values,
        y=grad / count,
        dtype=values.dtype,
    )


def softmax(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    dim: int,
    max_seqlen: int | None,
    log: bool,
) -> Tensor | None:
    if not (_knows(values) and values.is_floating_point()):
        return None
    norm = fold(
        values,
        offsets,
        lengths,
        dim,
        "logsumexp",
        max_seqlen=max_seqlen,
        dtype=wide(values.dtype),
    )
    return spread(
        norm,
        offsets,
        lengths,
        dim,
        "log_softmax" if log else "softmax",
        values.shape[dim],
        max_seqlen=max_seqlen,
        x=values,
        dtype=values.dtype,
    )


def softmax_backward(
    grad: Tensor,
    output: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    dim: int,
    max_seqlen: int | None,
    log: bool,
) -> Tensor | None:
    if not _knows(grad, output):
        return None
    inner = fold(
        grad,
        offsets,
        lengths,
        dim,
        "sum" if log else "dot",
        max_seqlen=max_seqlen,
        y=output,
        dtype=wide(grad.dtype),
    )
    return spread(
        inner,
        offsets,
        lengths,
        dim,
        "log_softmax_backward" if log else "softmax_backward",
        output.shape[dim],
        max_seqlen=max_seqlen,
        x=grad,
        y=output,
        dtype=output.dtype,
    )


def scan(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    dim: int,
    max_seqlen: int | None,
    name: str,
    reverse: bool,
    decay: Tensor | None = None,
) -> Tensor | None:
    if segments_triton_scan is None or values.dtype not in segments_triton_scan.DTYPES:
        return None
    T = values.shape[dim]
    longest = T if max_seqlen is None else max_seqlen
    # a program walks through its segment: few long ones leave most of the device idle
    if longest > 4096 and values.numel() < longest * 4096:
        return None
    return segments_triton_scan.scan(values, offsets, lengths, dim, name, reverse, decay=decay)
