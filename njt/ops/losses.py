"""Losses: elementwise ones on the rows of both operands, classified ones with the class dim of each token.

`reduction="none"` keeps the structure; "mean" and "sum" are over the real elements of the whole batch, in one dense
number. Gap rows count in none of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from njt import bridge, dims, errors
from njt.kernels import segments
from njt.registry import declare_named
from njt.rules.per_token import Tokens
from njt.tensor import NestedTensor


def _rows(op: str, x: NestedTensor, a: Any, compact: bool) -> Any:
    """The operand as packed rows that line up with those of `x`."""
    if isinstance(a, NestedTensor):
        aligned = a if a._structure is x._structure else bridge.align(a, x, op)
        if not isinstance(aligned, NestedTensor) or aligned._ragged_dim != x._ragged_dim:
            raise errors.different_ragged_dims(op, x, a)
        return bridge.compact_values(aligned) if compact else bridge.values(aligned)
    if isinstance(a, Tensor) and a.dim() > 0:
        return _dense_rows(op, x, a, compact)
    return a


def _dense_rows(op: str, x: NestedTensor, a: Tensor, compact: bool) -> Tensor:
    """A dense operand: the same for all rows, or one entry a component (size 1 in the ragged dim)."""
    r, missing = x._ragged_dim, x.dim() - a.dim()
    if missing > r:
        return a
    if missing < 0 or a.shape[r - missing] != 1:
        raise errors.not_broadcastable(op, x, a, "its size in the ragged dim is not 1")
    if missing > 0 or a.shape[0] == 1:
        return a.squeeze(0) if missing == 0 else a
    if x._structure.is_traced:
        torch._check(a.shape[0] == x._structure.batch_size)
    elif a.shape[0] != x._structure.batch_size:
        raise errors.not_broadcastable(op, x, a, "the batch sizes differ")
    structure = x._structure.compact() if compact else x._structure
    rows = (bridge.compact_values(x) if compact else x._values).shape[r - 1]
    return segments.broadcast(
        a.squeeze(r), structure.offsets, rows, lengths=structure.lengths, dim=r - 1
    )


class ElementLoss:
    """A loss whose elements stand alone: `dense(input, target, ..., reduction)` on the rows.

    Batch and ragged dim: elements like others. Gaps: left out of reductions. Ragged dim: any, the same for all.
    """

    def __init__(self, dense: Callable[..., Any]) -> None:
        self.dense = dense  # the function of torch.nn.functional
        self.names = tuple(inspect.signature(dense).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        op = self.dense.__name__
        given = dict(zip(self.names, args)) | kwargs
        reduction = _reduction(given)
        nested = [a for a in given.values() if isinstance(a, NestedTensor)]
        x = max(nested, key=lambda a: a.dim())
        lower = next((a for a in nested if a.dim() != x.dim()), None)
        if lower is not None:
            raise errors.bad_shape(
                op,
                f"{errors.describe(x)} and {errors.describe(lower)}",
                "operands of one rank",
                "Insert dims: x.unsqueeze(dim).",
            )
        compact = x._structure.has_gaps
        given.update({k: _rows(op, x, a, compact) for k, a in given.items()})
        out = self.dense(**{**given, "reduction": reduction})
        if reduction != "none":
            return out
        return _spread(out, x)


def _reduction(given: dict[str, Any]) -> str:
    """The reduction, old arguments included: `size_average` and `reduce` say it in torch's first way."""
    average, reduce = given.pop("size_average", None), given.pop("reduce", None)
    if average is not None or reduce is not None:
        if reduce is False:
            return "none"
        return "sum" if average is False else "mean"
    found = given.get("reduction", "mean")
    if isinstance(found, int):  # as the C++ functions count them
        found = ("none", "mean", "sum")[found]
    return str(found)


def _check_tokens(op: str, x: NestedTensor) -> None:
    if x._ragged_dim == x.dim() - 1:
        raise errors.no_ragged_dim(op, x, x._ragged_dim)


def _spread(rows: Tensor, x: NestedTensor, ragged_dim: int | None = None) -> NestedTensor:
    r = x._ragged_dim if ragged_dim is None else ragged_dim
    total = x._values.shape[x._ragged_dim - 1]
    return bridge.wrap(bridge.spread(rows, x._structure, total, r - 1), x._structure, r, x)


ELEMENTWISE = [
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "soft_margin_loss",
    "poisson_nll_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "margin_ranking_loss",
]
for _name in ELEMENTWISE:
    declare_named(_name, ElementLoss(getattr(F, _name)), aten=())


def kl_div(
    input: Any,
    target: Any,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    """`F.kl_div` on tokens; `reduction="batchmean"` divides the sum by the number of components."""
    if reduction == "batchmean" and size_average is None and reduce is None:
        x = input if isinstance(input, NestedTensor) else target
        return _KL(input, target, reduction="sum", log_target=log_target) / x._structure.batch_size
    return _KL(input, target, size_average, reduce, reduction, log_target)


_KL = ElementLoss(F.kl_div)
declare_named("kl_div", kl_div, aten=())


def nll_loss(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """`F.nll_loss` per token; the class dim is as in `cross_entropy`."""
    where = {"weight": weight, "ignore_index": ignore_index}
    return _classified(F.nll_loss, input, target, where, size_average, reduce, reduction)


def cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`F.cross_entropy` per token: what dense torch gives for each component.

    Args:
        input: nested logits. The class dim is the first dim that is neither the batch dim nor a ragged dim 1:
            the last one of (B, j1, V), as language models have it, and dim 1 of (B, V, j1) or (B, V, j1, *), as dense
            torch has it.
        target: nested class indices of the logits' shape without the class dim, (B, j1), or nested class
            probabilities of the logits' shape.
        weight, ignore_index, label_smoothing: as in dense torch.
        reduction: "mean" is over all real tokens of the batch that count, not per component.
    Returns:
        a dense number, or nested (B, j1, *) for `reduction="none"`.
    Raises:
        RuntimeError: classes in the ragged dim, or another structure of the target.
    """
    where = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return _classified(F.cross_entropy, input, target, where, size_average, reduce, reduction)


def _classified(
    dense: Callable[..., Any],
    x: Any,
    target: Any,
    where: dict[str, Any],
    size_average: bool | None,
    reduce: bool | None,
    reduction: str,
) -> Any:
    op = dense.__name__
    given = {"size_average": size_average, "reduce": reduce, "reduction": reduction}
    reduction = _reduction(given)
    if not (isinstance(x, NestedTensor) and isinstance(target, NestedTensor)):
        raise errors.bad_type(
            op,
            f"{errors.describe(x)} and {errors.describe(target)}",
            "nested logits and a nested target",
            "Make the target nested: njt.nested_tensor_from_jagged(target, x.offsets()).",
        )
    r = x._ragged_dim
    if x.dim() < 3:
        raise errors.bad_shape(op, errors.describe(x), "(B, j1, classes)", "Add a class dim.")
    # one long sequence: tokens as the batch (T, V, *), or (1, V, .., T, ..) where classes come first
    probabilities = target.dim() == x.dim()
    goal_r = r if probabilities or r == 1 else r - 1
    if target.dim() < x.dim() - 1 or target._ragged_dim != goal_r:
        raise errors.bad_shape(
            op,
            f"{errors.describe(x)} and target {errors.describe(target)}",
            "a target of the logits' shape without their class dim",
            "The class dim is dim 2 of (B, j1, V) and dim 1 of (B, V, j1).",
        )
    aligned = target if target._structure is x._structure else bridge.align(target, x, op)
    logits, goal = bridge.compact_values(x), bridge.compact_values(aligned)
    if r > 1:
        # contiguous: the backward of torch's nll_loss2d takes no other strides
        logits, goal = logits.contiguous().unsqueeze(0), goal.unsqueeze(0)
    out = dense(logits, goal, reduction=reduction, **where)
    if reduction != "none":
        return out
    return _spread(out if r == 1 else out.squeeze(0), x, r if r == 1 else r - 1)


declare_named("nll_loss", nll_loss, aten=())
declare_named("cross_entropy", cross_entropy, aten=())


class VectorLoss:
    """A loss that compares the feature vectors of tokens: dense (T, D) operands, a loss a token.

    Batch and ragged dim: tokens. Gaps: left out. Ragged dim: 1, features last.
    """

    def __init__(self, dense: Callable[..., Any]) -> None:
        self.dense = dense
        self.names = tuple(inspect.signature(dense).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        op = self.dense.__name__
        given = dict(zip(self.names, args)) | kwargs
        reduction = _reduction(given)
        x = max((a for a in given.values() if isinstance(a, NestedTensor)), key=lambda a: a.dim())
        if x._ragged_dim != 1 or x.dim() != 3:
            raise errors.bad_shape(op, errors.describe(x), "(B, j1, D)", "Flatten or transpose it.")
        compact = x._structure.has_gaps
        given.update({k: _rows(op, x, a, compact) for k, a in given.items()})
        out = self.dense(**{**given, "reduction": reduction})
        return out if reduction != "none" else _spread(out, x)


for _name in [
    "cosine_embedding_loss",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
]:
    declare_named(_name, VectorLoss(getattr(F, _name)), aten=())


def _similar(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Cosine similarity over a feature dim of two nested tensors, or over the ragged dim."""
    x = x1 if isinstance(x1, NestedTensor) else x2
    dim = dims.canonical(dim, x.dim())
    if dim == 0:
        raise errors.no_batch_dim("cosine_similarity", x, 0)
    if dim == x._ragged_dim:
        norms = [torch.linalg.vector_norm(t, 2, dim, keepdim=True).clamp_min(eps) for t in (x1, x2)]
        return (x1 / norms[0] * (x2 / norms[1])).sum(dim)
    # the gradient of a dense operand sums over rows
    both = isinstance(x1, NestedTensor) and isinstance(x2, NestedTensor)
    tokens = Tokens("cosine_similarity", x, keep_gaps=both)
    out = torch.cosine_similarity(tokens.rows(x1), tokens.rows(x2), dim - 1, eps)
    return tokens.nested(out, dims.drop(x._ragged_dim, (dim,)))


declare_named("cosine_similarity", lambda x1, x2, dim=1, eps=1e-8: _similar(x1, x2, dim, eps))


def pairwise_distance(
    x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    """Distance of the feature vectors of two nested tensors, token by token."""
    x = x1 if isinstance(x1, NestedTensor) else x2
    _check_tokens("pairwise_distance", x)
    tokens = Tokens("pairwise_distance", x, keep_gaps=True)
    return tokens.nested(F.pairwise_distance(tokens.rows(x1), tokens.rows(x2), p, eps, keepdim))


declare_named("pairwise_distance", pairwise_distance)
