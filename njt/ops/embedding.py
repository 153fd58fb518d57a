"""Embedding look-ups by nested indices, and one-hot encoding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from njt import bridge, errors
from njt.kernels import segments
from njt.registry import FromHandler, declare, declare_function, declare_named, overloads
from njt.rules.per_token import Tokens
from njt.tensor import NestedTensor


def _indices(x: NestedTensor) -> Tensor:
    """The packed indices; those of gap rows, which may be anything, are 0."""
    packed, structure, d = x._values, x._structure, x._ragged_dim - 1
    if not structure.has_gaps:
        return packed
    rows = packed.shape[d]
    mask = segments.segment_ids(structure.offsets, structure.lengths, rows) < structure.batch_size
    shape = [1] * packed.dim()
    shape[d] = rows
    return torch.where(mask.view(shape), packed, torch.zeros_like(packed))


def embedding(
    input: Any,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """A row of `weight` for each index.

    Args:
        input: nested integers (B, j1, *), any ragged dim.
        weight: dense (V, D); other arguments as in `F.embedding`.
    Returns:
        nested (B, j1, *, D).
    """
    if not isinstance(input, NestedTensor):
        raise errors.bad_type(
            "embedding",
            f"dense indices for {errors.describe(weight)}",
            "a dense table",
            "Swap the arguments.",
        )
    out = F.embedding(
        _indices(input), weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
    )
    return bridge.wrap(out, input._structure, input._ragged_dim, input)


def _table_first(
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """`torch.embedding`, which takes the table first and -1 for no padding index."""
    known = None if padding_idx < 0 else padding_idx
    return embedding(indices, weight, known, None, 2.0, scale_grad_by_freq, sparse)


def embedding_bag(
    input: Any,
    weight: Any,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Sum, mean or maximum of the rows of `weight` that the indices of each component name.

    Args:
        input: nested integers (B, j1): every component is a bag.
        weight: dense (V, D).
        per_sample_weights: nested (B, j1), for mode "sum".
        others: as in `F.embedding_bag`; `offsets` may not be given.
    Returns:
        dense (B, D), 0 for an empty component.
    Raises:
        RuntimeError: nested indices of more dims.
        ValueError: offsets are given.
    """
    x = input
    if not isinstance(x, NestedTensor):
        raise errors.bad_type(
            "embedding_bag",
            errors.describe(x),
            "nested indices",
            "Make them nested as the weights are.",
        )
    if x.dim() != 2:
        raise errors.bad_shape(
            "embedding_bag", errors.describe(x), "(B, j1)", "Flatten each component."
        )
    if offsets is not None:
        raise errors.bad_value(
            "embedding_bag",
            "offsets for nested indices",
            "none",
            "The components are the bags: leave them out.",
        )
    structure = x._structure
    shares = None
    if per_sample_weights is not None:
        tokens = Tokens("embedding_bag", x, keep_gaps=True)
        shares = tokens.rows(per_sample_weights)
        if structure.has_gaps:
            shares = shares.index_select(0, structure.row_index())
    starts = structure.compact().offsets
    packed = (
        x._values if not structure.has_gaps else x._values.index_select(0, structure.row_index())
    )
    return F.embedding_bag(
        packed,
        weight,
        starts.to(packed.dtype),
        max_norm,
        norm_type,
        scale_grad_by_freq,
        mode,
        sparse,
        shares,
        True,
        padding_idx,
    )


def one_hot(input: Any, num_classes: int = -1) -> Any:
    """1 where the class is the index, 0 elsewhere, in a new last dim.

    Args:
        input: nested integers (B, j1, *).
        num_classes: -1 takes one more than the largest index, which is read from the device.
    Returns:
        nested int64 (B, j1, *, num_classes).
    """
    x = input
    packed = _indices(x)
    return bridge.wrap(F.one_hot(packed, num_classes), x._structure, x._ragged_dim, x)


declare_function(embedding, F.embedding)
declare_function(_table_first, torch.embedding)
for _overload in overloads("embedding"):
    declare(_overload, FromHandler(_table_first))
declare_function(embedding_bag, F.embedding_bag)
declare_named("one_hot", lambda input=None, num_classes=-1, **named: one_hot(
    named.get("tensor", named.get("self", input)), num_classes
))  # fmt: skip
