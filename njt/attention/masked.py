"""Attention with a dense mask: each sequence sees its own corner of the mask.

As one padded call of the dense function, or as a loop of calls where padding would waste more than it saves.
May import bridge, tensor, errors, structure and kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from njt import bridge, errors
from njt.kernels import padding
from njt.structure import Structure
from njt.tensor import NestedTensor

_OP = "scaled_dot_product_attention"
WASTE = 4  # padded scores over real ones, from which on a loop over sequences is taken


def masked_attention(
    query: NestedTensor, key: NestedTensor, value: NestedTensor, mask: Tensor, **options: Any
) -> NestedTensor:
    """`F.scaled_dot_product_attention` with the mask cut to each sequence.

    Args:
        query, key, value: nested, ragged in the second last dim; key and value of one structure.
        mask: dense, bool (True: look) or floating (added), (max_q, max_k) with leading dims that broadcast to those of
            the nested operands. Sizes of 1 broadcast; sizes beyond the longest sequence are cut.
        options: dropout_p, is_causal, scale and enable_gqa, handed on.
    Returns:
        nested, of the structure of `query`; 0 for sequences without keys.
    Raises:
        RuntimeError: the mask is smaller than a sequence, or has other leading sizes.
    """
    a, b = query._structure, key._structure
    if not a.is_traced:
        _check(query, key, mask)
    if a.is_traced or not _wasteful(a, b):
        out = _padded(query, key, value, mask, options)
    else:
        out = _looped(query, key, value, mask, options)
    return bridge.wrap(out, a, query._ragged_dim, query)


def _check(query: NestedTensor, key: NestedTensor, mask: Tensor) -> None:
    full = (query._structure.max_seqlen, key._structure.max_seqlen)
    lead = (*query._size[:1], *query._values.shape[: query._ragged_dim - 1])
    fits = 2 <= mask.dim() <= query.dim() and all(
        n == 1 or n >= wanted for n, wanted in zip(mask.shape[-2:], full)
    )
    fits = fits and all(n in (1, wanted) for n, wanted in zip(mask.shape[-3::-1], lead[::-1]))
    if not fits:
        raise errors.bad_shape(
            _OP,
            f"attn_mask {tuple(mask.shape)} for {errors.describe(query)} and {errors.describe(key)}",
            f"a mask that broadcasts to {(*lead, *full)}",
            "Build it for the longest sequences: x.max_seqlen.",
        )


def _wasteful(a: Structure, b: Structure) -> bool:
    real = sum(n * m for n, m in zip(a.host_lengths(), b.host_lengths()))
    return a.batch_size * a.max_seqlen * b.max_seqlen > WASTE * real > 0


def _padded(
    query: NestedTensor,
    key: NestedTensor,
    value: NestedTensor,
    mask: Tensor,
    options: dict[str, Any],
) -> Tensor:
    a, b, d = query._structure, key._structure, query._ragged_dim - 1
    width_q, width_k = a.max_seqlen, b.max_seqlen
    if not a.is_traced and width_q == 0:  # nothing to attend, yet a result that autograd knows
        packed = bridge.values(query)
        shape = (*packed.shape[:-1], value._values.shape[-1])
        return packed.narrow(-1, 0, 0).sum(-1, keepdim=True).expand(shape).contiguous()
    q = _pad(query, width_q)
    k, v = _pad(key, width_k), _pad(value, width_k)
    place_q = torch.arange(width_q, device=q.device) < a.seqlens[:, None]
    place_k = torch.arange(width_k, device=q.device) < b.seqlens[:, None]
    # (B, 1.., S, 1) and (B, 1.., 1, S)
    ones = [1] * d
    count = a.batch_size
    is_query = place_q.view(count, *ones, width_q, 1)
    is_key = place_k.view(count, *ones, 1, width_k)
    # what belongs to nobody, or sees no key at all, sees everything: else it is 0 / 0, in gradients too
    idle = ~(is_query & (b.seqlens > 0).view(count, *ones, 1, 1))
    cut = _cut(mask, width_q, width_k)
    if mask.dtype is torch.bool:
        seen = (cut & is_key) | idle
    else:
        zero = torch.zeros((), dtype=mask.dtype, device=mask.device)
        seen = torch.where(idle, zero, cut.masked_fill(~is_key, -torch.inf))
        seen = seen.to(q.dtype)
    out = F.scaled_dot_product_attention(q, k, v, seen, **options)
    out = out.masked_fill(idle, 0.0)
    rows = query._values.shape[d]
    return padding.padded_to_packed(out, a.offsets, rows, lengths=a.lengths, values_dim=d)


def _cut(mask: Tensor, width_q: Any, width_k: Any) -> Tensor:
    """The corner of the mask that the longest sequences need; sizes of 1 broadcast."""
    if mask.shape[-2] != 1:
        mask = mask.narrow(-2, 0, width_q)
    return mask if mask.shape[-1] == 1 else mask.narrow(-1, 0, width_k)


def _pad(x: NestedTensor, width: Any) -> Tensor:
    structure = x._structure
    return padding.packed_to_padded(
        bridge.values(x),
        structure.offsets,
        width,
        0.0,
        lengths=structure.lengths,
        values_dim=x._ragged_dim - 1,
    )


def _looped(
    query: NestedTensor,
    key: NestedTensor,
    value: NestedTensor,
    mask: Tensor,
    options: dict[str, Any],
) -> Tensor:
    full = mask.dim() == query.dim() and mask.shape[0] > 1
    outs = []
    for i, (q, k, v) in enumerate(zip(query.unbind(), key.unbind(), value.unbind())):
        cut = _cut(mask[i] if full else mask, q.shape[-2], k.shape[-2])
        if k.shape[-2] == 0:
            outs.append(q.new_zeros((*q.shape[:-1], v.shape[-1])))
            continue
        if cut.dim() > q.dim():
            cut = cut[0]
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], cut[None], **options)
        outs.append(out[0])
    d = query._ragged_dim - 1
    return bridge.spread(torch.cat(outs, dim=d), query._structure, query._values.shape[d], d)
