"""Elements of each component where a mask is True, or that are not zero: how many there are differs by component.

Batch dim: stays. Ragged dim: elements, or whole rows, of each component in the order of its own dims; the results have
a structure of their own. Gaps: never chosen. Ragged dim elsewhere than 1: any.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from njt import bridge, errors
from njt.registry import declare_named
from njt.rules.reduction import one_node
from njt.structure import Structure
from njt.tensor import NestedTensor


def mask_values(x: NestedTensor, mask: Tensor, op: str) -> tuple[Tensor, Tensor]:
    """Values of `x` without gaps, and the mask in line with them; fewer dims of the mask: whole rows."""
    if mask.dtype is not torch.bool:
        raise errors.bad_type(
            op,
            f"a nested index of {mask.dtype}",
            "a nested mask of bool",
            "Use x.gather for numbers.",
        )
    if isinstance(mask, NestedTensor) and mask._structure is not x._structure:
        mask = bridge.align(mask, x, op)
    if not isinstance(mask, NestedTensor) or mask._ragged_dim != x._ragged_dim:
        raise errors.different_ragged_dims(op, x, mask)
    return bridge.compact_values(x), bridge.compact_values(mask)


def where_true(x: NestedTensor, mask: Tensor, op: str = "getitem") -> NestedTensor:
    """The elements (or rows) of each component where the mask is True: nested, one feature dim for all."""
    values, chosen = mask_values(x, mask, op)
    d, structure = x._ragged_dim - 1, x._structure.compact()
    # rows first, so that what is chosen of a component stays together
    if d and chosen.dim() > d:
        values, chosen = _component_order(values, chosen, structure, d)
        counts = chosen
        taken = values
    else:
        counts = chosen.flatten(1).sum(1) if chosen.dim() > 1 else chosen.long()
        counts = _sums(counts, structure)
        taken = values[chosen]
    found = Structure.find(
        torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(structure.offsets.dtype)
    )
    return bridge.wrap(taken, found, 1, x)


def _sums(counts: Tensor, structure: Structure) -> Tensor:
    """Sums of the counts of the rows of each component."""
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return ends[structure.offsets.long()].diff()


def _component_order(
    values: Tensor, chosen: Tensor, structure: Structure, d: int
) -> tuple[Tensor, Tensor]:
    """What is chosen, component by component in the order of its own dims, and how much of each."""
    counts = _sums(chosen.movedim(d, 0).flatten(1).sum(1), structure)
    taken = values[chosen]
    ids = torch.repeat_interleave(structure.seqlens, output_size=values.shape[d])
    shape = [1] * chosen.dim()
    shape[d] = -1
    owner = ids.view(shape).expand_as(chosen)[chosen]
    return taken[torch.argsort(owner, stable=True)], counts


def _masked_select(x: Any, mask: Tensor) -> Tensor:
    """The elements of each component where the mask is True: (B, j), another structure."""
    if not isinstance(x, NestedTensor):
        x = x.expand_as(mask)
    if not mask.is_nested or mask.dim() < x.dim() or mask._values.shape != x._values.shape:  # type: ignore[attr-defined]
        mask = torch.logical_and(torch.ones_like(x, dtype=torch.bool), mask)
    return where_true(x, mask, "masked_select")


declare_named("masked_select", one_node("masked_select", _masked_select))
