"""Views: transposing, viewing, slicing features; storage shared, structure passed on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from njt import _compat, dims, errors
from njt.registry import declare, implements
from njt.rules.restructured import Restructured, dropped, permuted, stays
from njt.tensor import NestedTensor

aten = torch.ops.aten

declare(aten.transpose.int, Restructured(dims.swap, ("dim0", "dim1"), keeps_ragged=True))
declare(aten.permute.default, Restructured(permuted, ("dims",)))
declare(aten.unsqueeze.default, Restructured(dims.insert, grows=True, keeps_ragged=True))
declare(aten.select.int, Restructured(dropped))
declare(aten.slice.Tensor, Restructured(stays))


@implements(aten.view.default, aten._unsafe_view.default)
def _view(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NestedTensor:
    x, size = args
    size = list(size)
    d = _ragged_position(x, size)
    r, shape = x._ragged_dim, x._values.shape
    pre, post = shape[: r - 1], shape[r:]
    inner = [*_filled(size[1:d], pre), shape[r - 1], *_filled(size[d + 1 :], post)]
    return NestedTensor(func(x._values, inner), x._structure, d)


def _ragged_position(x: NestedTensor, size: list[Any]) -> int:
    """Which entry of the new size stands for the ragged dim."""
    ragged = x._structure.ragged_size
    for d, n in enumerate(size):
        if _compat.is_ragged_size(n):
            if d == 0 or not _compat.same_ragged_size(n, ragged):
                break
            return d
    else:
        open_dims = [d for d, n in enumerate(size) if d > 0 and isinstance(n, int) and n == -1]
        if len(open_dims) == 1:
            return open_dims[0]
        structure = x._structure
        if not structure.is_traced and structure.max_seqlen == structure.min_seqlen:
            before = math.prod(x._values.shape[: x._ragged_dim - 1])
            for d in range(1, len(size)):
                if size[d] == structure.max_seqlen and math.prod(size[1:d]) == before:
                    return d
    raise errors.bad_shape(
        "view",
        f"size {tuple(size)} for {errors.describe(x)}",
        "the batch size first and the ragged size, or -1, where the ragged dim goes",
        "Use x.shape[i] of the ragged dim in the size, or flatten x.values() instead.",
    )


def _filled(size: list[Any], shape: Sequence[Any]) -> list[Any]:
    """`size` with a -1 replaced, so that the ragged dim alone may be open."""
    known = [n for n in size if not (isinstance(n, int) and n == -1)]
    if len(known) == len(size):
        return size
    missing = math.prod(shape) // max(math.prod(known), 1)
    return [missing if isinstance(n, int) and n == -1 else n for n in size]
