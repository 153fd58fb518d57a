"""Taking components and rows: unbind, select, slices, masks, assignment. Views wherever dense torch gives views."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from njt import bridge
from njt.registry import declare_function, implements_function
from njt.tensor import NestedTensor


def component(x: NestedTensor, i: int) -> Tensor:
    """The component `i` as a view.

    Raises:
        IndexError: `i` is out of range.
    """
    structure = x._structure
    batch = structure.batch_size
    if not -batch <= i < batch:
        raise IndexError(f"index {i} is out of bounds for dimension 0 with size {batch}")
    i %= batch
    start, length = structure.host_offsets()[i], structure.host_lengths()[i]
    return bridge.values(x).narrow(x._ragged_dim - 1, start, length)


def unbind(x: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """The components as views of the values, differentiable; the lengths are read from the device once."""
    if dim not in (0, -x.dim()):
        return _unbind_features(x, dim)
    structure, d = x._structure, x._ragged_dim - 1
    packed = bridge.values(x)
    if not structure.has_gaps:
        return torch.split(packed, list(structure.host_lengths()), d)
    ends = zip(structure.host_offsets(), structure.host_lengths())
    return tuple(packed.narrow(d, start, length) for start, length in ends)


def _unbind_features(x: NestedTensor, dim: int) -> tuple[Any, ...]:
    size: Any = x.shape[dim]
    return tuple(x.select(dim, i) for i in range(size))


declare_function(unbind, torch.unbind, torch.Tensor.unbind)


@implements_function(torch.Tensor.__getitem__)
def _getitem(x: Any, index: Any) -> Any:
    if type(index) is int and type(x) is NestedTensor:
        return component(x, index)
    raise NotImplementedError("indexing")
