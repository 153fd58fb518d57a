"""Elements of each component where a mask is True, or that are not zero: how many there are differs by component.

Batch dim: stays. Ragged dim: elements, or whole rows, of each component in the order of its own dims; the results have
a structure of their own. Gaps: never chosen. Ragged dim elsewhere than 1: any.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from njt import _compat, bridge, errors
from njt.ops.pieces import structure_of
from njt.registry import declare_function, declare_named
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
    if chosen.dim() > d:
        order, counts = _component_order(chosen, structure, d)
        taken = values[chosen] if order is None else values[chosen][order]
    else:
        counts = sums(chosen.long(), structure)
        taken = values[chosen]
    return bridge.wrap(taken, structure_of(counts, structure), 1, x)


def sums(counts: Tensor, structure: Structure) -> Tensor:
    """Sums of the counts of the rows of each component."""
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return ends[structure.offsets.long()].diff()


def _component_order(chosen: Tensor, structure: Structure, d: int) -> tuple[Tensor | None, Tensor]:
    """What is chosen, component by component in the order of its own dims, and how much of each.

    None: it is in that order already.
    """
    rows = chosen.movedim(d, 0)
    counts = sums(rows.flatten(1).sum(1) if rows.dim() > 1 else rows.long(), structure)
    if d == 0:
        return None, counts
    ids = torch.repeat_interleave(structure.seqlens, output_size=chosen.shape[d])
    shape = [1] * chosen.dim()
    shape[d] = -1
    owner = ids.view(shape).expand_as(chosen)[chosen]
    return torch.argsort(owner, stable=True), counts


def _masked_select(x: Any, mask: Tensor) -> Tensor:
    """The elements of each component where the mask is True: (B, j), another structure."""
    if not isinstance(x, NestedTensor):
        x = x.expand_as(mask)
    if not mask.is_nested or mask.dim() < x.dim() or mask._values.shape != x._values.shape:  # type: ignore[attr-defined]
        mask = torch.logical_and(torch.ones_like(x, dtype=torch.bool), mask)
    return where_true(x, mask, "masked_select")


def argwhere(x: Any) -> Tensor:
    """The positions inside its component of what is not zero: nested (B, j2, rank - 1), int64.

    Positions have no entry for the batch: component b of the result is about component b of `x`.
    """
    values, d = bridge.compact_values(x), x._ragged_dim - 1
    structure = x._structure.compact()
    chosen = values != 0
    order, counts = _component_order(chosen, structure, d)
    found = structure_of(counts, structure)
    places = chosen.nonzero()
    places = places if order is None else places[order]
    starts = torch.repeat_interleave(
        structure.offsets[:-1].long(), counts, output_size=places.shape[0]
    )
    inside = torch.cat(
        [places[:, :d], places[:, d : d + 1] - starts[:, None], places[:, d + 1 :]], 1
    )
    return bridge.wrap(inside, found, 1, x)


def _nonzero(x: Any, as_tuple: bool = False) -> Any:
    found = argwhere(x)
    return found.unbind(-1) if as_tuple else found


def _where(condition: Any, *choices: Any, **named: Any) -> Any:
    """torch.where: the positions where a condition holds; with two choices it is pointwise."""
    if not choices and not named:
        return _nonzero(condition, as_tuple=True)
    condition, *operands = bridge.unify(torch.where, (condition, *choices))
    return bridge.below(torch.where, condition, *operands, **named)


declare_named("masked_select", one_node("masked_select", _masked_select))
declare_named("argwhere", one_node("argwhere", argwhere))
declare_named("nonzero", one_node("nonzero", _nonzero))
declare_function(_compat.one_node(_where), torch.where)
