"""Norms of vectors and matrices, and what is scaled by them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from njt import dims, errors
from njt.kernels import segments
from njt.ops.reductions import reduction
from njt.registry import declare_function, declare_named
from njt.rules.reduction import Reduction, in_place, one_node

VECTOR_NORM = Reduction(torch.linalg.vector_norm, segments.vector_norm, lead=("ord",))


def _vector_norm(
    x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, **options: Any
) -> Any:
    return VECTOR_NORM(x, 2 if ord is None else ord, dim, keepdim, **options)


def _norm(x: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    """torch.norm: a vector norm unless two dims and "nuc" are named."""
    if p == "nuc":
        return _matrix_norm(x, p, (-2, -1) if dim is None else dim, keepdim, **options)
    return _vector_norm(x, 2 if p in ("fro", None) else p, dim, keepdim, **options)


def _linalg_norm(
    x: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, **options: Any
) -> Any:
    """torch.linalg.norm: of a matrix if an order and two dims are given, else of a vector."""
    if ord is not None and isinstance(dim, (tuple, list)) and len(dim) == 2:
        return _matrix_norm(x, ord, dim, keepdim, **options)
    return _vector_norm(x, 2 if ord in ("fro", None) else ord, dim, keepdim, **options)


def _matrix_norm(
    x: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, **options: Any
) -> Any:
    """Norms of matrices that need no decomposition run over ragged dims too."""
    if ord == "fro":
        return _vector_norm(x, 2, tuple(dim), keepdim, **options)
    sums, extremes = (d % x.dim() for d in dim)
    if ord in (float("inf"), -float("inf")):
        sums, extremes = extremes, sums
    elif ord not in (1, -1):
        rule = Reduction(torch.linalg.matrix_norm, _no_decomposition, lead=("ord",))
        return rule(x, ord, dim, keepdim, **options)
    total = _vector_norm(x, 1, sums, True, **options)
    out = total.amax(extremes, True) if ord > 0 else total.amin(extremes, True)
    if keepdim:
        return out
    for d in sorted((sums, extremes), reverse=True):
        out = out.squeeze(d)
    return out


def _no_decomposition(values: Tensor, offsets: Tensor, **options: Any) -> Any:
    raise errors.unsupported(
        "matrix_norm",
        f"ord={options.get('ord')!r} over the ragged dim",
        "'fro', 1, -1, inf or -inf there",
        "Loop over x.unbind().",
    )


declare_function(one_node("norm", _linalg_norm), torch.linalg.norm)
reduction("norm", _norm, but=(torch.linalg.norm,))
reduction("vector_norm", _vector_norm, aten=("linalg_vector_norm",))
reduction("matrix_norm", _matrix_norm, aten=())


def _dist(x: Any, other: Any, p: float = 2) -> Any:
    """The norm of the difference, over all entries."""
    return _vector_norm(x - other, p)


reduction("dist", _dist)


# ---- scaled by a norm -----------------------------------------------------------------------------------------------
def _renorm(x: Any, p: float, dim: int, maxnorm: float) -> Any:
    """Slices along `dim` scaled down to norm `maxnorm`; over any dim but the batch a slice is inside one component."""
    dim = dims.canonical(dim, x.dim())
    others = tuple(d for d in range(1, x.dim()) if d != dim)
    norm = _vector_norm(x, p, others, True) if others else x.abs()
    return x * torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1.0)


renorm = reduction("renorm", _renorm)
declare_named("renorm_", in_place("renorm_", renorm))
