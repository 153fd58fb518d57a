"""Matrix products: weights shared by all tokens, a matrix for each component, and sums over each component's rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from njt import bridge, errors
from njt._compat import OpOverload
from njt.kernels import grouped, segments
from njt.registry import declare, declare_function, declare_named, implements
from njt.rules.per_token import OverFeatures, PerToken, zeroed
from njt.tensor import NestedTensor

aten = torch.ops.aten

declare(aten.linear.default, PerToken(features=1))


@implements(aten.linear_backward.default)
def _linear_backward(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # gap rows must not reach the sums over tokens; zeroed, not left out, they ask for no size in a graph
    x, grad, weight, wanted = args
    grad_packed = bridge.without_gaps(_like(grad, x)._values, x)
    rows = bridge.without_gaps(x._values, x).flatten(0, -2)
    grads = grad_packed.flatten(0, -2)
    grad_input = x.with_values(grad_packed @ weight) if wanted[0] else None
    grad_weight = grads.t() @ rows if wanted[1] else None
    return grad_input, grad_weight, grads.sum(0) if wanted[2] else None


def _like(grad: Any, x: NestedTensor) -> Any:
    if isinstance(grad, NestedTensor) and grad._structure is not x._structure:
        return bridge.align(grad, x, "linear_backward")
    return grad


declare_named("bilinear", OverFeatures(F.bilinear))


def matmul(a: Any, b: Any) -> Any:
    """`a @ b` where at least one is nested: what `torch.matmul` gives for each component with a batch dim of 1.

    Args:
        a, b: nested (B, *, n, k) and nested or dense (B or 1, *, k, m), (k, m) or (k,), in either order. Where the
            summed dim is the ragged dim of both, as in `k.mT @ v`, the result is dense (B, *, n, m), 0 for an
            empty component. Where a leading dim is ragged, it must be so in both or 1 in the dense one.
    Returns:
        nested with the structure of its operand, or dense if the ragged dim is summed over.
    Raises:
        RuntimeError: shapes that don't fit, or a result that would be ragged in two dims (`q @ k.mT`).
    """
    a, b = _autocast(a, b)
    if isinstance(a, NestedTensor):
        return _both(a, b) if isinstance(b, NestedTensor) else _by_dense(a, b)
    if not isinstance(b, NestedTensor):
        return torch.matmul(a, b)
    _check_rank(a, b)
    if a.dim() == 1:
        return _by_dense(b.transpose(-1, -2), a)
    return _by_dense(b.transpose(-1, -2), a.mT).transpose(-1, -2)


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """The operands in the dtype that autocast wants; the kernels below are unknown to it."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t.to(dtype) if t.is_floating_point() and t.dtype is not torch.float64 else t
        for t in tensors
    )


def _misfit(a: Tensor, b: Tensor, expected: str, advice: str) -> RuntimeError:
    return errors.bad_shape(
        "matmul", f"{errors.describe(a)} @ {errors.describe(b)}", expected, advice
    )


def _check_rank(*operands: Tensor) -> None:
    a, b = operands
    for t in operands:
        if isinstance(t, NestedTensor) and t.dim() < 3:
            raise _misfit(
                a, b, "nested tensors of three or more dims", "Add a dim: x.unsqueeze(-1)."
            )
        if t.dim() == 0:
            raise _misfit(a, b, "operands of one or more dims", "Multiply by a number with `*`.")


def _by_dense(x: NestedTensor, w: Tensor) -> NestedTensor:
    """nested (B, *, n, k) @ dense."""
    _check_rank(x, w)
    r, rank = x._ragged_dim, x.dim()
    if r == rank - 1:
        raise _misfit(
            x, w, "a summed dim that is not ragged, or is so in both",
            "Make the dense operand nested too: njt.nested_tensor_from_jagged(values, x.offsets()).",
        )  # fmt: skip
    packed = bridge.values(x)
    if w.dim() == 1:
        return bridge.wrap(zeroed(x) @ w, x._structure, r, x)
    if w.dim() > rank:
        raise _misfit(x, w, "a dense operand of no more dims", "Squeeze its leading dims.")
    if w.shape[-2] != packed.shape[-1]:
        raise _misfit(x, w, f"{packed.shape[-1]} rows in the dense operand", "Transpose it.")
    if w.dim() == 2:
        return bridge.wrap(zeroed(x) @ w, x._structure, r, x)
    full = w[(None,) * (rank - w.dim())]
    if r < rank - 2 and full.shape[r] != 1:
        raise _misfit(x, w, f"size 1 in dim {r}, where the other is ragged", "Make it nested too.")
    if full.shape[0] == 1:  # the same matrices for all components
        return bridge.wrap(zeroed(x) @ full[0], x._structure, r, x)
    if full.shape[0] != x._structure.batch_size:
        raise _misfit(x, w, f"batch size {x._structure.batch_size}", "Check the batches.")
    if r == rank - 2:
        return bridge.wrap(_grouped(packed, full, x), x._structure, r, x)
    return _per_token(x, packed, full)


def _grouped(packed: Tensor, matrices: Tensor, x: NestedTensor, fold: int = 1) -> Tensor:
    """packed (*lead, T, k), matrices (B, *lead, k, m); each row of `x` is `fold` rows of `packed`."""
    lead = torch.broadcast_shapes(packed.shape[:-2], matrices.shape[1:-2])
    structure = x._structure
    offsets, lengths, width = structure.offsets, structure.lengths, structure.known_max_seqlen
    if fold != 1:
        offsets = offsets * fold
        lengths = None if lengths is None else lengths * fold
        width = None if width is None else width * fold
    return grouped.multiply(
        packed.expand(*lead, *packed.shape[-2:]),
        matrices.expand(-1, *lead, *matrices.shape[-2:]),
        offsets,
        lengths=lengths,
        width=width,
    )


def _per_token(x: NestedTensor, packed: Tensor, full: Tensor) -> NestedTensor:
    """Matrices per token, (B, *, j1, *, n, k), times matrices per component (B, *, 1, *, k, m)."""
    r, rank = x._ragged_dim, x.dim()
    structure = x._structure
    if r == rank - 3:  # rows of a component's tokens are just more rows
        n = packed.shape[-2]
        out = _grouped(packed.flatten(-3, -2), full.squeeze(r), x, n)
        return bridge.wrap(out.unflatten(-2, (packed.shape[-3], n)), structure, r, x)
    each = segments.broadcast(
        full.squeeze(r),
        structure.offsets,
        packed.shape[r - 1],
        lengths=structure.lengths,
        dim=r - 1,
    )
    return bridge.wrap(packed @ each, structure, r, x)


def _both(a: NestedTensor, b: NestedTensor) -> Any:
    _check_rank(a, b)
    rank = a.dim()
    ra, rb = a._ragged_dim, b._ragged_dim
    if (ra, rb) == (rank - 2, rank - 1) and b.dim() == rank:
        raise _misfit(
            a, b, "a result that is ragged in one dim at most",
            "Use F.scaled_dot_product_attention, or pad: njt.to_padded_tensor(x, 0.0).",
        )  # fmt: skip
    if b.dim() != rank or not (ra == rb < rank - 2 or (ra, rb) == (rank - 1, rank - 2)):
        raise _misfit(
            a,
            b,
            "ragged dims that meet: both summed, or the same leading dim",
            "Transpose one of them.",
        )
    aligned = bridge.align(b, a, "matmul")
    if not isinstance(aligned, NestedTensor):
        raise errors.different_structures("matmul", a, b)
    left, right = bridge.values(a), bridge.values(aligned)
    if ra == rb:
        return bridge.wrap(left @ right, a._structure, ra, a)
    structure = a._structure
    lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    return grouped.contract(
        left.mT.expand(*lead, left.shape[-1], left.shape[-2]),
        right.expand(*lead, *right.shape[-2:]),
        structure.offsets,
        lengths=structure.lengths,
        width=structure.known_max_seqlen,
    )


def bmm(a: Any, b: Any) -> Any:
    """`matmul` of three-dimensional operands of one batch size.

    Raises:
        RuntimeError: another number of dims.
    """
    if a.dim() != 3 or b.dim() != 3:
        raise errors.bad_shape(
            "bmm",
            f"{errors.describe(a)} and {errors.describe(b)}",
            "three dims each",
            "Use matmul.",
        )
    return matmul(a, b)


def baddbmm(start: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """`beta * start + alpha * (a @ b)`; with `beta=0`, `start` is ignored, as in dense torch."""
    product = bmm(a, b)
    if alpha != 1:
        product = product * alpha
    if beta == 0:
        return product
    return product + (start if beta == 1 else start * beta)


def _rmatmul(b: Any, a: Any) -> Any:
    return matmul(a, b)


def _named_matmul(input: Any, other: Any = None, **named: Any) -> Any:
    return matmul(input, named.pop("tensor2", named.pop("mat2", other)))


declare_named("matmul", _named_matmul)
declare_function(_named_matmul, torch.Tensor.__matmul__)
declare_function(_rmatmul, torch.Tensor.__rmatmul__)
declare_named("bmm", lambda input, mat2: bmm(input, mat2))
declare_named(
    "baddbmm",
    lambda input, batch1, batch2, *, beta=1, alpha=1: baddbmm(
        input, batch1, batch2, beta=beta, alpha=alpha
    ),
)
