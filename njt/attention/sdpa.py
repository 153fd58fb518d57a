"""F.scaled_dot_product_attention on nested query, key, value: shapes and arguments mapped to packed rows.

query (B, H, j1, D), key (B, Hk, j2, D), value (B, Hk, j2, Dv), ragged in dim -2 -> (B, H, j1, Dv); heads may be
missing. May import bridge, tensor, errors and the rest of attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from njt import _compat, bridge, errors
from njt.attention import varlen_backends
from njt.attention.masked import masked_attention
from njt.attention.varlen import Sequences, differentiable_gradients, eager_call, varlen_attention
from njt.registry import FromHandler, declare, declare_function
from njt.structure import Structure
from njt.tensor import NestedTensor

_OP = "scaled_dot_product_attention"


@torch.compiler.allow_in_graph
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention of each sequence to its own keys.

    Args:
        query: nested (B, H, j1, D) or (B, j1, D), ragged in the second last dim.
        key, value: nested, alike; may have other lengths than the query (cross attention). Dense ones,
            (B, Hk, S, D), are sequences of equal lengths.
        attn_mask: dense bool or floating mask that broadcasts to (B, H, max_seqlen, max_seqlen), cut to each sequence.
        is_causal: query i sees keys 0..i of its sequence.
    Returns:
        nested (B, H, j1, Dv) with the structure of the query.
    Raises:
        TypeError: the query is dense and others are nested.
        RuntimeError: ragged dims, batch sizes or lengths of key and value that don't fit.
    """
    if isinstance(query, NestedTensor):
        key, value = _as_nested(key, query), _as_nested(value, query)
    if not all(isinstance(t, NestedTensor) for t in (query, key, value)):
        came = ", ".join(errors.describe(t) for t in (query, key, value))
        raise errors.bad_type(
            _OP, came, "a nested query", "Make it nested: njt.as_nested_tensor(query)."
        )
    _check(query, key, value)
    if (
        query._ragged_dim == 1 and query._values.dim() > 2
    ):  # heads are the sequence, tokens the batch
        out = F.scaled_dot_product_attention(
            bridge.values(query),
            bridge.values(_following(key, query)),
            bridge.values(_following(value, query)),
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return bridge.wrap(out, query._structure, 1, query)
    value = _following(value, key)
    same = query._structure is key._structure or bool(query._structure.same_layout(key._structure))
    if same and key._structure is not query._structure:
        key, value = _following(key, query), _following(value, query)
    if attn_mask is not None:
        query, key, value = _autocast(query, key, value)
        return masked_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    fast = _eager(query, key, value, is_causal, scale, dropout_p, enable_gqa)
    if fast is not None:
        return fast
    a, b = query._structure, key._structure
    out = varlen_attention(
        _rows(query),
        _rows(key),
        _rows(value),
        a.offsets,
        b.offsets,
        q_lengths=a.lengths,
        k_lengths=b.lengths,
        max_q=a.longest_bound,
        max_k=b.longest_bound,
        host_q=_host(query),
        host_k=_host(key),
        is_causal=is_causal,
        scale=scale,
        dropout_p=dropout_p,
        enable_gqa=enable_gqa,
    )
    packed = out.transpose(0, 1) if query.dim() == 4 else out.squeeze(1)
    return bridge.wrap(packed, a, query._ragged_dim, query)


def _eager(
    query: NestedTensor,
    key: NestedTensor,
    value: NestedTensor,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    enable_gqa: bool,
) -> NestedTensor | None:
    """The whole of it as one autograd node, where nothing traces; None where something stands against it."""
    a, b = query._structure, key._structure
    rows = [t._values for t in (query, key, value)]
    if a.is_traced or rows[0].dim() != 3 or torch.is_autocast_enabled(rows[0].device.type):
        return None
    at = Sequences(
        a.offsets,
        b.offsets,
        a.lengths,
        b.lengths,
        a.max_seqlen,
        b.max_seqlen,
        _host(query),
        _host(key),
    )
    q, k, v = (packed.transpose(0, 1) for packed in rows)
    call = eager_call(q, k, v, at, is_causal, scale, dropout_p, enable_gqa)
    if call is None:
        return None
    with _compat.no_torch_function():
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if wanted:
        return _Attention.apply(query, key, value, call)
    out = varlen_backends.forward(q, k, v, call, keep=False)[0]
    return NestedTensor(out.transpose(0, 1), a, 2)


class _Attention(torch.autograd.Function):
    """Nested in, nested out: no view nodes between the tensors and the kernel, forward or backward."""

    @staticmethod
    def forward(
        ctx: Any, query: NestedTensor, key: NestedTensor, value: NestedTensor, call: Any
    ) -> NestedTensor:
        q, k, v = (t._values.transpose(0, 1) for t in (query, key, value))
        out, *state = varlen_backends.forward(q, k, v, call)
        ctx.save_for_backward(query, key, value, out, *state)
        ctx.call = call
        return NestedTensor(out.transpose(0, 1), query._structure, 2)

    @staticmethod
    def backward(ctx: Any, grad: NestedTensor) -> tuple[Any, ...]:
        query, key, value, out, *state = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted
            rows = [_rows(t) for t in (_following(grad, query), query, key, value)]
            found = differentiable_gradients(
                rows[0], rows[1], rows[2], rows[3], ctx.call, ctx.needs_input_grad[:3]
            )
        else:
            rows = [t._values.transpose(0, 1) for t in (_following(grad, query), query, key, value)]
            found = varlen_backends.backward(
                rows[0], rows[1], rows[2], rows[3], out, *state, ctx.call
            )
        return *(
            None if g is None else bridge.wrap(g.transpose(0, 1), t._structure, 2, t)
            for g, t in zip(found, (query, key, value))
        ), None


def _as_nested(t: Tensor, query: NestedTensor) -> Tensor:
    """A dense (B, *, S, D) as a batch of equal lengths."""
    if isinstance(t, NestedTensor) or t.dim() != query.dim() or bridge.is_traced(query):
        return t
    batch, length = t.shape[0], t.shape[-2]
    structure = Structure.from_lengths((length,) * batch, t.device)
    return bridge.wrap(t.movedim(0, -3).flatten(-3, -2), structure, t.dim() - 2, query)


def _check(query: NestedTensor, key: NestedTensor, value: NestedTensor) -> None:
    # counted on values: asking a wrapper costs a trip through `__torch_function__`
    rank = query._values.dim() + 1
    if any(t._values.dim() + 1 != rank for t in (key, value)) or rank not in (3, 4):
        came = ", ".join(errors.describe(t) for t in (query, key, value))
        raise errors.bad_shape(
            _OP, came, "(B, H, j1, D) or (B, j1, D) alike for all three", "Split the heads first."
        )
    for t in (query, key, value):
        if t._ragged_dim not in (1, rank - 2) or t._ragged_dim != query._ragged_dim:
            raise errors.bad_shape(
                _OP,
                f"{errors.describe(t)}, ragged in dim {t._ragged_dim}",
                "the ragged dim second last, as (B, H, j1, D)",
                "Transpose heads and sequence: x.transpose(1, 2).",
            )
    if not query._structure.batch_size == key._structure.batch_size:
        raise errors.bad_shape(
            _OP,
            f"{errors.describe(query)} and {errors.describe(key)}",
            "one batch size",
            "Check the batches.",
        )


def _following(t: NestedTensor, leader: NestedTensor) -> NestedTensor:
    if t._structure is leader._structure:
        return t
    aligned = bridge.align(t, leader, _OP)
    if not isinstance(aligned, NestedTensor):
        raise errors.different_structures(_OP, leader, t)
    return aligned


def _rows(t: NestedTensor) -> Tensor:
    """(total_length, H, D), a view."""
    packed = bridge.values(t)
    return packed.transpose(0, 1) if packed.dim() == 3 else packed.unsqueeze(1)


def _autocast(*tensors: NestedTensor) -> tuple[NestedTensor, ...]:
    """The operands in the dtype that autocast wants, as the dense function would have them."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t.dtype is torch.float64 else t.to(dtype) for t in tensors)


def _host(t: NestedTensor) -> tuple[int, ...] | None:
    structure = t._structure
    if structure.is_traced:
        return None
    if structure.offsets.device.type != "cpu":
        return structure.known_host_lengths  # never a wait for the device
    return structure.host_lengths()


declare_function(scaled_dot_product_attention, F.scaled_dot_product_attention)
declare(
    torch.ops.aten.scaled_dot_product_attention.default,
    FromHandler(scaled_dot_product_attention),
)
