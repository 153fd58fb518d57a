"""Multi-head attention modules of torch on nested tensors: nn.MultiheadAttention and all that is built of it.

query (B, j1, E), key (B, j2, Ek), value (B, j2, Ev) -> (B, j1, E), each sequence attending to its own keys.
May import bridge, tensor, errors, kernels, rules and the rest of attention.

`nn.MultiheadAttention.forward` of torch refuses nested tensors before it calls any function that a tensor could
answer, so importing this file puts a door in front of it (`_compat.door_in_forward`): calls with a nested argument come
here, all others go on as before. The encoder and decoder layers of torch.nn need nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from njt import _compat, bridge, errors
from njt.attention.sdpa import scaled_dot_product_attention
from njt.kernels import padding
from njt.registry import declare_function
from njt.rules.per_token import zeroed
from njt.structure import Structure
from njt.tensor import NestedTensor

_OP = "multi_head_attention_forward"


@torch.compiler.allow_in_graph
def multi_head_attention_forward(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Tensor | None]:
    """Multi-head attention of each sequence to its own keys, with the arguments of torch's function.

    Args:
        query: nested (B, j1, E), batch first whatever a module's `batch_first` says.
        key, value: nested (B, j2, *), or dense (B, S, *): sequences of equal lengths.
        key_padding_mask: (B, S), True (or -inf) where a key is ignored; lengths need none.
        attn_mask: (max_q, max_k) or (B * num_heads, max_q, max_k), True (or -inf) where attention is not allowed; each
            sequence sees its corner.
        is_causal: query i sees keys 0..i of its sequence; `attn_mask` need not be given and is not looked at then,
            unless the weights are wanted.
    Returns:
        nested (B, j1, E), and, if `need_weights`, the weights padded with zeros, (B, max_q, max_k) or
        (B, num_heads, max_q, max_k).
    Raises:
        TypeError: the query is dense.
        RuntimeError: shapes that don't fit.
    """
    if not isinstance(query, NestedTensor):
        came = ", ".join(errors.describe(t) for t in (query, key, value))
        raise errors.bad_type(
            _OP, came, "a nested query", "Make it nested: njt.as_nested_tensor(query)."
        )
    _check(query, key, value, embed_dim_to_check, num_heads)
    if static_k is not None or static_v is not None:
        raise errors.unsupported(
            _OP, "static keys or values", "none", "Pass them as key and value."
        )
    weights: Any
    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    else:
        assert in_proj_weight is not None
        weights = in_proj_weight.chunk(3)
    biases: Any = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    if not use_separate_proj_weight and query is key and key is value:
        # one product for all three
        assert in_proj_weight is not None
        packed = F.linear(zeroed(query), in_proj_weight, in_proj_bias)
        projected = [_heads(p, query, num_heads) for p in packed.chunk(3, -1)]
    else:
        projected = [
            _heads(F.linear(_tokens(x), w, b), x, num_heads)
            for x, w, b in zip((query, key, value), weights, biases)
        ]
    q: Any
    q, k, v = projected
    if bias_k is not None or add_zero_attn:
        k, v = _with_more_keys(k, bias_k, add_zero_attn), _with_more_keys(v, bias_v, add_zero_attn)
        if is_causal or attn_mask is not None or key_padding_mask is not None:
            raise errors.unsupported(
                _OP,
                "a mask with bias_k or add_zero_attn",
                "one of them",
                "Their keys follow each sequence's own ones: loop over x.unbind().",
            )
    dropout_p = dropout_p if training else 0.0
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal else _mask(q, k, attn_mask, key_padding_mask, num_heads, is_causal)
    shares: Tensor | None = None
    if need_weights:
        out, shares = _with_weights(q, k, v, mask, dropout_p)
        shares = shares.mean(1) if average_attn_weights else shares
    else:
        if mask is not None:
            mask = mask if mask.dtype is not torch.bool else ~mask
        out = scaled_dot_product_attention(q, k, v, mask, dropout_p, causal)
    rows = bridge.values(out).transpose(0, 1).flatten(-2)
    rows = F.linear(rows, out_proj_weight, out_proj_bias)
    return bridge.wrap(rows, query._structure, 1, query), shares


def _check(query: NestedTensor, key: Any, value: Any, embed_dim: int, num_heads: int) -> None:
    for x in (query, key, value):
        if x.dim() != 3 or (isinstance(x, NestedTensor) and x._ragged_dim != 1):
            raise errors.bad_shape(
                _OP, errors.describe(x), "(B, j1, E), ragged in dim 1", "Transpose or unsqueeze it."
            )
    size = query._values.shape[-1]
    if size != embed_dim or size % num_heads:
        raise errors.bad_shape(
            _OP,
            f"{errors.describe(query)} for embed_dim {embed_dim} and {num_heads} heads",
            "features of size embed_dim that divide by the heads",
            "Check the module's sizes.",
        )


def _tokens(x: Tensor) -> Tensor:
    return zeroed(x) if isinstance(x, NestedTensor) else x


def _heads(projected: Tensor, x: Tensor, count: int) -> Tensor:
    """(T, H * D) of a nested tensor to nested (B, H, j, D); (B, S, H * D) to (B, H, S, D)."""
    split = projected.unflatten(-1, (count, -1)).transpose(-3, -2)
    return bridge.wrap(split, x._structure, 2, x) if isinstance(x, NestedTensor) else split


def _with_more_keys(x: Any, bias: Tensor | None, zero: bool) -> Any:
    """Keys (B, H, j, D) with a learned row, (1, 1, H * D), a row of zeros, or both behind each sequence."""
    dense = not isinstance(x, NestedTensor)
    if not dense and bridge.is_traced(x):
        raise errors.unsupported(
            _OP, "bias_k or add_zero_attn in a compiled graph", "neither", "Run it in eager mode."
        )
    parts = list(x.unbind())
    heads, size = x.shape[1], x.shape[-1]
    more = []
    if bias is not None:
        more.append(bias.reshape(1, heads, size).transpose(0, 1))
    if zero:
        more.append(torch.zeros(heads, 1, size, dtype=x.dtype, device=x.device))
    grown = [torch.cat([p, *more], 1) for p in parts]
    if dense:
        return torch.stack(grown)
    structure = Structure.from_lengths([p.shape[1] for p in grown], x.device)
    return bridge.wrap(torch.cat(grown, 1), structure, 2, x)


def _mask(
    q: NestedTensor,
    k: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    heads: int,
    is_causal: bool,
) -> Tensor | None:
    """Both masks in one that broadcasts to (B, H, max_q, max_k): True where not allowed, or added."""
    if is_causal and attn_mask is None:
        wide = max(q._structure.max_seqlen, _longest(k))
        attn_mask = torch.ones(wide, wide, dtype=torch.bool, device=q.device).triu(1)
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.unflatten(0, (-1, heads))
    if key_padding_mask is None:
        return attn_mask
    padded = key_padding_mask[:, None, None, :]
    if attn_mask is None:
        return padded
    wide = padded.shape[-1]
    attn_mask = attn_mask[..., :wide]
    if attn_mask.dtype is torch.bool and padded.dtype is torch.bool:
        return attn_mask | padded
    return _added(attn_mask, q.dtype) + _added(padded, q.dtype)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)


def _longest(x: Tensor) -> Any:
    return x._structure.max_seqlen if isinstance(x, NestedTensor) else x.shape[-2]


def _with_weights(
    q: NestedTensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float
) -> tuple[NestedTensor, Tensor]:
    """Attention by its definition on padded tensors, with the weights (B, H, max_q, max_k)."""
    structure = q._structure
    queries, keys, values = (_padded(x) for x in (q, k, v))
    scores = (queries * queries.shape[-1] ** -0.5) @ keys.mT
    if mask is not None:
        corner = mask[..., : scores.shape[-2], : scores.shape[-1]]
        scores = scores + _added(corner, scores.dtype)
    idle = None
    if isinstance(k, NestedTensor):
        place = torch.arange(keys.shape[-2], device=keys.device)
        is_key = (place < k._structure.seqlens[:, None])[:, None, None, :]
        idle = (k._structure.seqlens == 0)[:, None, None, None]
        scores = scores.masked_fill(~(is_key | idle), -torch.inf)
    weights = scores.softmax(-1)
    place = torch.arange(queries.shape[-2], device=queries.device)
    nobody = ~(place < structure.seqlens[:, None])[:, None, :, None]
    weights = weights.masked_fill(nobody if idle is None else nobody | idle, 0.0)
    weights = F.dropout(weights, dropout_p)
    out = padding.padded_to_packed(
        weights @ values,
        structure.offsets,
        q._values.shape[1],
        lengths=structure.lengths,
        values_dim=1,
    )
    return bridge.wrap(out, structure, 2, q), weights


def _padded(x: Tensor) -> Tensor:
    if not isinstance(x, NestedTensor):
        return x
    structure = x._structure
    return padding.packed_to_padded(
        bridge.values(x),
        structure.offsets,
        structure.max_seqlen,
        0.0,
        lengths=structure.lengths,
        values_dim=1,
    )


declare_function(multi_head_attention_forward, F.multi_head_attention_forward)


def _module_forward(
    self: torch.nn.MultiheadAttention,
    query: Any,
    key: Any,
    value: Any,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Tensor | None]:
    """`nn.MultiheadAttention.forward` for nested arguments."""
    separate = self.in_proj_weight is None
    return multi_head_attention_forward(
        query,
        key,
        value,
        self.embed_dim,
        self.num_heads,
        self.in_proj_weight,
        self.in_proj_bias,
        self.bias_k,
        self.bias_v,
        self.add_zero_attn,
        self.dropout,
        self.out_proj.weight,
        self.out_proj.bias,
        training=self.training,
        key_padding_mask=key_padding_mask,
        need_weights=need_weights,
        attn_mask=attn_mask,
        use_separate_proj_weight=separate,
        q_proj_weight=self.q_proj_weight if separate else None,
        k_proj_weight=self.k_proj_weight if separate else None,
        v_proj_weight=self.v_proj_weight if separate else None,
        average_attn_weights=average_attn_weights,
        is_causal=is_causal,
    )


_compat.door_in_forward(torch.nn.MultiheadAttention, NestedTensor, _module_forward)
