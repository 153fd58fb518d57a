"""What differs inside each component: torch.unique and torch.unique_consecutive.

Batch dim: stays, components are not compared with each other. Ragged dim: its rows, or all elements, of each component
in the order of its own dims; how many are left differs by component, so results have a structure of their own. Feature
dims: refused, since two dims of the result would be ragged. Gaps: left out. Ragged dim elsewhere than 1: any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from njt import bridge, dims, errors
from njt.ops.pieces import structure_of
from njt.registry import declare_named
from njt.rules.reduction import one_node
from njt.structure import Structure
from njt.tensor import NestedTensor


class _Items:
    """What is compared, (N, *) or (N,), component after component, and the component that owns each."""

    def __init__(self, op: str, x: NestedTensor, dim: int | None) -> None:
        self.x, self.dim = x, None if dim is None else dims.canonical(dim, x.dim())
        if self.dim == 0:
            raise errors.no_batch_dim(op, x, 0)
        if self.dim not in (None, x._ragged_dim):
            raise errors.unsupported(
                op,
                f"dim={dim} of {errors.describe(x)}",
                f"the ragged dim {x._ragged_dim}, or no dim",
                "Over a feature dim each component would keep another number of features: "
                "loop over x.unbind().",
            )
        values, d = bridge.compact_values(x).detach(), x._ragged_dim - 1
        self.structure = x._structure.compact()
        owner = torch.repeat_interleave(self.structure.seqlens, output_size=values.shape[d]).long()
        self.rows = values.movedim(d, 0)
        self.order: Tensor | None = None
        if self.dim is None:
            shape = [1] * values.dim()
            shape[d] = -1
            owner = owner.view(shape).expand(values.shape).flatten()
            self.rows = values.flatten()
            if d:
                self.order = torch.argsort(owner, stable=True)
                self.rows, owner = self.rows[self.order], owner[self.order]
        self.owner = owner

    def found(self, kept: Tensor, owner: Tensor) -> tuple[NestedTensor, Structure]:
        """What is kept, as a nested tensor, and its structure."""
        ones = torch.ones_like(owner)
        counts = torch.zeros_like(self.structure.seqlens, dtype=torch.int64)
        structure = structure_of(counts.index_add(0, owner, ones), self.structure)
        if self.dim is None:
            return bridge.wrap(kept, structure, 1, self.x), structure
        return bridge.wrap(kept.movedim(0, self.dim - 1), structure, self.dim, self.x), structure

    def inverse(self, which: Tensor, structure: Structure) -> Tensor:
        """Where each item went inside its component, from where it went among all."""
        inside = which - structure.offsets[:-1].long()[self.owner]
        if self.dim is not None:
            return bridge.wrap(inside, self.structure, 1, self.x)
        if self.order is not None:
            inside = torch.empty_like(inside).index_copy(0, self.order, inside)
        r = self.x._ragged_dim
        shape = list(self.x._values.shape)
        shape[r - 1] = -1
        if 0 in shape:
            shape[r - 1] = self.owner.shape[0]
        return bridge.wrap(inside.view(shape), self.structure, r, self.x)


def unique(
    x: Any,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """What is in each component, each value once, in rising order.

    Args:
        x: nested, any dtype that dense torch sorts.
        sorted: the result is sorted either way.
        dim: the ragged dim, to compare rows; None compares elements.
    Returns:
        nested (B, j2), or with `dim` of the rank of `x`; if asked for, where each element (or row) went inside its
        component, and how often each came, (B, j2). No gradient flows.
    Raises:
        NotImplementedError: `dim` is a feature dim. RuntimeError: it is the batch dim.
    """
    items = _Items("unique", x, dim)
    compared = items.rows
    if dim is not None:
        compared = torch.unique(items.rows, return_inverse=True, dim=0)[1]
    order = compared.argsort(stable=True)
    order = order[items.owner[order].argsort(stable=True)]
    return _first_of_each_run(items, compared[order], order, return_inverse, return_counts)


def unique_consecutive(
    x: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """What is in each component, without what equals its forerunner; arguments and results as for `unique`."""
    items = _Items("unique_consecutive", x, dim)
    return _first_of_each_run(items, items.rows, None, return_inverse, return_counts)


def _first_of_each_run(
    items: _Items, compared: Tensor, order: Tensor | None, return_inverse: bool, return_counts: bool
) -> Any:
    """Results from what is compared, component after component; `order`: which item each entry is about."""
    rows, owner = items.rows, items.owner  # sorting inside components leaves owners as they are
    rows = rows if order is None else rows[order]
    differs = compared[1:] != compared[:-1]
    new = torch.ones_like(owner, dtype=torch.bool)
    new[1:] = (differs.flatten(1).any(1) if differs.dim() > 1 else differs) | (
        owner[1:] != owner[:-1]
    )
    run = new.long().cumsum(0) - 1
    kept, structure = items.found(rows[new], owner[new])
    found: list[Tensor] = [kept]
    if return_inverse:
        which = run if order is None else torch.empty_like(run).index_copy(0, order, run)
        found.append(items.inverse(which, structure))
    if return_counts:
        counts = torch.zeros_like(owner[new]).index_add(0, run, torch.ones_like(run))
        found.append(bridge.wrap(counts, structure, 1, items.x))
    return found[0] if len(found) == 1 else tuple(found)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "unique": unique,
    "unique_consecutive": unique_consecutive,
}
for _name, _function in _FUNCTIONS.items():
    declare_named(_name, one_node(_name, _function))
