"""Attention inside each sequence of a packed batch: one function, one operator, many backends.

query (total_q, H, D), key (total_k, Hk, D), value (total_k, Hk, Dv), offsets (B + 1,), lengths (B,)
or None -> (total_q, H, Dv). Plain tensors only: nested arguments are mapped by `sdpa`. Eager calls
go straight to the backend; traced calls go through `torch.ops.njt.varlen_attention`, which a tracer
does not look into.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from njt import _compat, errors
from njt.attention import varlen_backends, varlen_cuda, varlen_flops
from njt.attention.varlen_call import Call
from njt.attention.varlen_math import attention as math_attention
from njt.kernels import derivatives

_OP = "scaled_dot_product_attention"
# rows of queries from which the Triton kernels' launches are hidden behind their work
_MANY_ROWS = 16_384
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    q_lengths: Tensor | None = None,
    k_lengths: Tensor | None = None,
    max_q: int,
    max_k: int,
    host_q: tuple[int, ...] | None = None,
    host_k: tuple[int, ...] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot product attention where query i of sequence b sees the keys of sequence b only.

    Args:
        query: (total_q, H, D), any strides; rows that belong to no sequence are not read.
        key: (total_k, Hk, D); value: (total_k, Hk, Dv).
        q_offsets: (B + 1,) int32 or int64, start of each sequence; k_offsets alike. The very same
            tensor for both says that the lengths agree.
        q_lengths: (B,) rows in use, where there are gaps between sequences; k_lengths alike.
            Without them the sequences must cover all rows.
        max_q: at least the longest query sequence; max_k alike.
        host_q: the query lengths as Python ints, if known; host_k alike.
        is_causal: query i sees keys 0..i of its sequence, also where the lengths differ.
        scale: factor of the scores. Default: 1 / sqrt(D).
        dropout_p: probability to drop a weight.
        enable_gqa: Hk may divide H.
    Returns:
        (total_q, H, Dv), new memory; 0 in rows of no sequence and where a sequence has no keys.
    Raises:
        RuntimeError: ranks, heads, head sizes, dtypes or devices that don't fit.
    """
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (_autocast(x) for x in (query, key, value))
    _check(query, key, value, enable_gqa)
    width, width_v = query.shape[-1], value.shape[-1]
    call = _call(
        query,
        key,
        value,
        Sequences(q_offsets, k_offsets, q_lengths, k_lengths, max_q, max_k, host_q, host_k),
        is_causal,
        scale,
        dropout_p,
    )
    backend = call.backend
    if backend == "math":
        return math_attention(query, key, value, call)
    full = varlen_backends.padded_width(backend, max(width, width_v))
    if width != full:
        query, key = F.pad(query, (0, full - width)), F.pad(key, (0, full - width))
    if width_v != full:
        value = F.pad(value, (0, full - width_v))
    if _direct(query, key, value):
        if torch.is_grad_enabled() and (
            query.requires_grad or key.requires_grad or value.requires_grad
        ):
            out = _Varlen.apply(query, key, value, call)
        else:
            out = varlen_backends.forward(query, key, value, call, keep=False)[0]
    else:
        out = torch.ops.njt.varlen_attention(query, key, value, *call)[0]
    return out if width_v == full else out[..., :width_v]


class Sequences(NamedTuple):
    """Where the sequences of queries and keys lie; the arguments of `varlen_attention` by these names."""

    q_offsets: Tensor
    k_offsets: Tensor
    q_lengths: Tensor | None
    k_lengths: Tensor | None
    max_q: int
    max_k: int
    host_q: tuple[int, ...] | None
    host_k: tuple[int, ...] | None


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    at: Sequences,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
) -> Call:
    """The call as backends take it, with the backend chosen."""
    width = max(query.shape[-1], value.shape[-1])
    same = (at.q_offsets is at.k_offsets and at.q_lengths is at.k_lengths) or (
        at.host_q is not None and at.host_q == at.host_k
    )
    # a branch makes a plain bool of a traced comparison, which the choice can take as a constant
    fits_flash = True if width <= 256 else False  # noqa: SIM210
    dropout = True if dropout_p > 0.0 else False  # noqa: SIM210
    # a bound that is a symbol is not looked at: it would compile once more for long sequences
    short = (
        not torch.compiler.is_compiling()
        and type(at.max_q) is int
        and type(at.max_k) is int
        and type(width) is int
        and max(at.max_q, at.max_k) <= 256
        and width <= 64
        and query.shape[0] >= _MANY_ROWS
    )
    backend = varlen_backends.choose(
        query.device, query.dtype, fits_flash, is_causal and not same, dropout, short
    )
    if _compat.transforming():
        backend = "math"  # made of operators that all transforms know
    q_lengths, k_lengths = at.q_lengths, at.k_lengths
    if query.device.type == "cuda":
        if q_lengths is None and at.host_q is not None and sum(at.host_q) != query.shape[0]:
            q_lengths = at.q_offsets.diff()
        if k_lengths is None and at.host_k is not None and sum(at.host_k) != key.shape[0]:
            k_lengths = at.k_offsets.diff()
    return Call(
        at.q_offsets,
        at.k_offsets,
        q_lengths,
        k_lengths,
        at.max_q,
        at.max_k,
        is_causal,
        float(query.shape[-1]) ** -0.5 if scale is None else scale,
        dropout_p,
        backend,
    )


def eager_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    at: Sequences,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    enable_gqa: bool,
) -> Call | None:
    """The call if a backend can take these very tensors at once, for callers with a backward of their own."""
    _check(query, key, value, enable_gqa)
    call = _call(query, key, value, at, is_causal, scale, dropout_p)
    width, width_v = query.shape[-1], value.shape[-1]
    if call.backend == "math" or not _direct(query, key, value):
        return None
    full = varlen_backends.padded_width(call.backend, max(width, width_v))
    return call if width == width_v == full else None


def _autocast(x: Tensor) -> Tensor:
    # as autocast does it for the dense function: float64 stays
    kind = x.device.type
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(kind))


def _check(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    shapes = query.shape, key.shape, value.shape
    if not (query.dtype == key.dtype == value.dtype and query.device == key.device == value.device):
        came = ", ".join(f"{x.dtype} on {x.device}" for x in (query, key, value))
        raise errors.bad_shape(
            _OP, came, "one dtype and one device", "Convert them: key.to(query)."
        )
    if not len(shapes[0]) == len(shapes[1]) == len(shapes[2]) == 3:
        problem = "three packed tensors of shape (rows, heads, head size)"
    elif shapes[0][2] != shapes[1][2]:
        problem = "query and key of one head size"
    elif shapes[1][:2] != shapes[2][:2]:
        problem = "key and value of the same rows and heads"
    elif shapes[0][1] != shapes[1][1] and not enable_gqa:
        problem = "as many heads of key and value as of query, or enable_gqa=True"
    elif shapes[1][1] == 0 or shapes[0][1] % shapes[1][1]:
        problem = "heads of query that are a multiple of the heads of key and value"
    else:
        return
    came = ", ".join(str(tuple(s)) for s in shapes)
    raise errors.bad_shape(
        _OP,
        f"packed query, key and value {came}",
        problem,
        "Reshape them to (rows, heads, head size) that agree.",
    )


def _direct(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the operator can be skipped: nobody watches, nobody traces."""
    return (
        not torch.compiler.is_compiling()
        and type(query) in _PLAIN
        and type(key) in _PLAIN
        and type(value) in _PLAIN
        and not _compat.in_dispatch_mode()
    )


def differentiable_gradients(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, call: Call, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The `wanted` ones of the three gradients, which can be differentiated again: by the math backend."""
    if call.dropout_p:
        raise errors.unsupported(
            _OP,
            "a tangent or a second derivative with dropout_p > 0",
            "dropout_p=0.0",
            "Leave out create_graph=True, or the dropout.",
        )
    inputs = (query, key, value)

    def of_wanted(*some: Tensor) -> Tensor:
        given = iter(some)
        q, k, v = (next(given) if w else x for w, x in zip(wanted, inputs))
        return math_attention(q, k, v, call)

    found = iter(torch.func.vjp(of_wanted, *(x for w, x in zip(wanted, inputs) if w))[1](grad_out))
    return tuple(next(found) if w else None for w in wanted)


class _Varlen(torch.autograd.Function):
    """The eager path: the backend's forward and backward, without the operator between."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        out, *rest = varlen_backends.forward(query, key, value, call)
        ctx.save_for_backward(query, key, value, out, *rest)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *rest = ctx.saved_tensors
        if torch.is_grad_enabled():
            wanted = ctx.needs_input_grad[:3]
            return *differentiable_gradients(grad_out, query, key, value, ctx.call, wanted), None
        return *varlen_backends.backward(grad_out, query, key, value, *rest, ctx.call), None


_ARGS = (
    "Tensor query, Tensor key, Tensor value, {0}Tensor q_offsets, Tensor k_offsets, "
    "Tensor? q_lengths, Tensor? k_lengths, SymInt max_q, SymInt max_k, bool is_causal, "
    "float scale, float dropout_p, str backend"
)
_STATE = "Tensor out, Tensor logsumexp, Tensor seed, Tensor seed_offset"

_library = torch.library.Library("njt", "FRAGMENT")
_library.define(
    f"varlen_attention({_ARGS.format('')}) -> ({_STATE})",
    # dropout draws: not to be run again, nor merged with a call that looks the same
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded),
)
_library.define(
    f"varlen_attention_backward(Tensor grad_out, {_ARGS.format(_STATE + ', ')})"
    " -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _forward_kernel(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    call = Call(*rest)
    out, logsumexp, *seeds = varlen_backends.forward(query, key, value, call)
    # an operator always returns as many tensors, with the strides that its fake promised
    out = out.contiguous()
    if not seeds:
        return out, logsumexp, *varlen_backends.no_seeds(query)
    return out, logsumexp, *varlen_cuda.seeds_to_keep(query, call, seeds)


def _backward_kernel(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    seed: Tensor,
    seed_offset: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    call = Call(*rest)
    seeds = varlen_cuda.seeds_to_use(call, [seed, seed_offset])
    grads = varlen_backends.backward(grad_out, query, key, value, out, logsumexp, *seeds, call)
    return tuple(g.contiguous() for g in grads)


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return varlen_backends.fake_forward(query, key, value, Call(*rest))


def _backward_fake(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, q_offsets, k_offsets, q_lengths, k_lengths, *plain = inputs
    ctx.save_for_backward(query, key, value, q_offsets, k_offsets, q_lengths, k_lengths, *output)
    ctx.plain = plain
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward_formula(
    ctx: Any, grad_out: Tensor | None, *unused: Tensor | None
) -> tuple[Tensor | None, ...]:
    query, key, value, q_offsets, k_offsets, q_lengths, k_lengths, *state = ctx.saved_tensors
    nothing = (None,) * (4 + len(ctx.plain))
    if grad_out is None:
        return (None, None, None, *nothing)
    call = Call(q_offsets, k_offsets, q_lengths, k_lengths, *ctx.plain)
    if torch.is_grad_enabled():
        wanted = ctx.needs_input_grad[:3]
        return (*differentiable_gradients(grad_out, query, key, value, call, wanted), *nothing)
    grads = torch.ops.njt.varlen_attention_backward(grad_out, query, key, value, *state, *call)
    return (*grads, *nothing)


def _jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
    return derivatives.pushed(_backward_formula)(ctx, *tangents), None, None, None


for _key in ("CPU", "CUDA"):
    _library.impl("varlen_attention", _forward_kernel, _key)
    _library.impl("varlen_attention_backward", _backward_kernel, _key)
torch.library.register_fake("njt::varlen_attention", _forward_fake, lib=_library)
torch.library.register_fake("njt::varlen_attention_backward", _backward_fake, lib=_library)
derivatives.register(_library, "varlen_attention", _backward_formula, _setup_context, jvp=_jvp)
varlen_flops.register()
