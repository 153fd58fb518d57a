"""How a compiled function hands out a view of its input again: by size and strides, as `as_strided`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from njt import _compat, bridge, errors
from njt.registry import declare_named
from njt.tensor import NestedTensor


def as_strided(
    x: NestedTensor,
    size: Sequence[Any],
    stride: Sequence[Any],
    storage_offset: int | None = None,
) -> NestedTensor:
    """A view of the memory of `x`, with its structure.

    Batch dim: first, its stride not read, since components lie where the structure says. Ragged dim: the
    entry of `size` that is the ragged size. Gaps: stay. Ragged dim elsewhere than 1: any.

    Args:
        size: (B, *) with the ragged size in it.
        stride: as `x.stride()`: behind the batch dim, those of the values.
    Raises:
        RuntimeError: `size` has no ragged size behind the batch dim.
    """
    ragged_dim = next((d for d, n in enumerate(size) if d and _compat.is_ragged_size(n)), None)
    if ragged_dim is None:
        raise errors.bad_shape(
            "as_strided",
            f"size {tuple(size)} for {errors.describe(x)}",
            "the batch size first and the ragged size behind it",
            "Call it on x.values().",
        )
    rows = x._values.shape[x._ragged_dim - 1]
    inner = [*size[1:ragged_dim], rows, *size[ragged_dim + 1 :]]
    values = bridge.values(x).as_strided(inner, list(stride[1:]), storage_offset)
    return bridge.nested_view(values, x._structure, ragged_dim, x)


declare_named("as_strided", as_strided)
