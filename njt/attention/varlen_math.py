"""Attention over packed rows by plain composition: any device, any dtype, any order of derivative.

The reference of the other backends, their second derivative, and the way for what they lack. It
pads to (B, H, max_q, D), so memory grows with B * max_q * max_k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from njt.attention.varlen_call import Call

_HALF = (torch.float16, torch.bfloat16)


def attention(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
    """(total_q, H, D), (total_k, Hk, D), (total_k, Hk, Dv) -> (total_q, H, Dv)."""
    q_rows, _ = _padded_rows(call.q_offsets, call.q_lengths, call.max_q, query.shape[0])
    k_rows, is_key = _padded_rows(call.k_offsets, call.k_lengths, call.max_k, key.shape[0])
    q, k, v = _pad(query, q_rows), _pad(key, k_rows), _pad(value, k_rows)
    repeats = query.shape[1] // key.shape[1]
    if repeats != 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    seen = is_key[:, None, None, :]
    if call.is_causal:
        place = torch.arange(max(call.max_q, call.max_k), device=query.device)
        seen = seen & (place[: call.max_k] <= place[: call.max_q, None])
    # a query that sees nothing would be 0 / 0: it sees all here, and its weights are cleared below
    blind = ~seen.any(-1, keepdim=True)
    scores = torch.matmul(q, k.transpose(-2, -1)) * call.scale
    weights = torch.softmax(scores.masked_fill(~(seen | blind), -torch.inf), -1)
    weights = F.dropout(weights.masked_fill(blind, 0.0), call.dropout_p)
    out = torch.matmul(weights, v).transpose(1, 2).to(query.dtype)
    # one row more than there are takes what belongs to no sequence
    packed = out.new_zeros(query.shape[0] + 1, *out.shape[2:])
    return packed.index_put((q_rows,), out)[:-1]


def _padded_rows(
    offsets: Tensor, lengths: Tensor | None, longest: int, total: int
) -> tuple[Tensor, Tensor]:
    """Row of each place (B, longest), `total` where there is none, and whether there is one."""
    place = torch.arange(longest, device=offsets.device)
    used = offsets.diff() if lengths is None else lengths
    there = place < used[:, None]
    return torch.where(there, offsets[:-1, None] + place, total), there


def _pad(packed: Tensor, rows: Tensor) -> Tensor:
    """(total, H, D) -> (B, H, longest, D), zero where there is no row; half types as float32."""
    wide = packed.float() if packed.dtype in _HALF else packed
    return F.pad(wide, (0, 0, 0, 0, 0, 1))[rows].transpose(1, 2)
