"""Taking components, rows and features by index, and the same reading order for assignment.

Views wherever dense torch gives views: components, runs of components, rows a:b of every component (the rest
becomes gaps), features. Everything chosen by a list or mask is a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from njt import bridge, dims, errors
from njt.ops.by_mask import where_true
from njt.ops.pieces import (
    component,
    components_at,
    components_between,
    pairs,
    row_numbers,
    row_of_each,
    rows_between,
)
from njt.registry import declare_function, declare_named
from njt.rules.reduction import one_node
from njt.rules.restructured import inner_dim, packed, seen
from njt.tensor import NestedTensor

_ALL = slice(None)


def unbind(x: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """The components as views of the values, differentiable; the lengths are read from the device once."""
    dim = dims.canonical(dim, x.dim())
    if dim != 0:
        d = inner_dim("unbind", x, dim)
        r = dims.drop(x._ragged_dim, (dim,))
        return tuple(seen(v, x, r) for v in packed(x).unbind(d))
    structure, d = x._structure, x._ragged_dim - 1
    if structure.is_traced:
        return tuple(component(x, i) for i in range(int(structure.batch_size)))
    values = packed(x)
    if not structure.has_gaps:
        return torch.split(values, list(structure.host_lengths()), d)
    ends = zip(structure.host_offsets(), structure.host_lengths())
    return tuple(values.narrow(d, start, length) for start, length in ends)


declare_function(one_node("unbind", unbind), torch.unbind, torch.Tensor.unbind)


# ---- x[...] ---------------------------------------------------------------------------------------------------------
def is_list(item: Any) -> bool:
    return isinstance(item, (list, Tensor)) and not (isinstance(item, Tensor) and item.dim() == 0)


def items_of(x: NestedTensor, index: Any) -> list[Any]:
    """One entry per dim of `x`, and None where a dim comes in."""
    items = list(index) if isinstance(index, tuple) else [index]
    items = [torch.as_tensor(a) if isinstance(a, (list, range)) else _number(a) for a in items]
    # a list of nothing is a list of numbers
    items = [
        a.long() if isinstance(a, Tensor) and a.numel() == 0 and a.is_floating_point() else a
        for a in items
    ]
    if any(isinstance(a, bool) or (isinstance(a, Tensor) and a.dim() == 0) for a in items):
        raise errors.unsupported(
            "getitem", "a single truth value in an index", "numbers, slices, lists and masks",
            "Add the dim by None: x[:, None].",
        )  # fmt: skip
    used = sum(a is not None and a is not Ellipsis for a in items)
    if used > x.dim():
        raise IndexError(f"too many indices for tensor of dimension {x.dim()}")
    missing = [_ALL] * (x.dim() - used)
    if not any(a is Ellipsis for a in items):
        return [*items, *missing]
    at = next(i for i, a in enumerate(items) if a is Ellipsis)
    return [*items[:at], *missing, *items[at + 1 :]]


def _number(item: Any) -> Any:
    if isinstance(item, Tensor) and item.dim() == 0 and not item.is_nested:
        if item.is_floating_point() or item.is_complex():
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        return item if item.dtype is torch.bool else int(item)
    return item


def getitem(x: Any, index: Any) -> Tensor:
    """`x[index]`; see the module."""
    if type(index) is int:
        return component(x, index)
    if not isinstance(x, NestedTensor):
        raise errors.bad_type(
            "getitem",
            f"{errors.describe(x)} with a nested index",
            "a nested tensor",
            "Index x.values().",
        )
    if isinstance(index, Tensor) and index.is_nested:
        return where_true(x, index)
    items = items_of(x, index)
    first, rest = items[0], items[1:]
    if first is None:
        raise errors.unsupported(
            "getitem", f"None first for {errors.describe(x)}", "the batch dim to stay first",
            "Insert the dim later: x.unsqueeze(1).",
        )  # fmt: skip
    if isinstance(first, int):
        one = component(x, first)
        return one[tuple(rest)]
    at, whole = place_of_ragged(x, rest), x
    if is_list(first):
        if is_list(rest[at]):
            rows = pairs(x, first, rest[at])
            return _by_rows(x, rows, rest, at, at_front=True)
        x = components_at(x, first)
    elif first != _ALL:
        x = components_between(x, first)
    ragged = rest[at]
    if isinstance(ragged, int):
        return _by_rows(x, row_of_each(x, ragged), rest, at, at_front=True)
    if is_list(ragged):
        if any(is_list(a) for k, a in enumerate(rest) if k != at):
            return _by_lists(x, rest, at)
        return _by_rows(x, row_of_each(x, row_numbers(x, ragged)), rest, at, at_front=False)
    y = rows_between(x, ragged)
    if any(isinstance(a, Tensor) or a != _ALL for a in rest[:at] + rest[at + 1 :]):
        return by_features(y, rest, at)
    return seen(packed(y), y) if y is whole else y


def place_of_ragged(x: NestedTensor, rest: list[Any]) -> int:
    """Which entry of `rest` is for the ragged dim."""
    dim = 0
    for k, item in enumerate(rest):
        if item is None:
            continue
        dim += 1
        if dim == x._ragged_dim:
            return k
    raise AssertionError(rest)


def by_features(x: NestedTensor, rest: list[Any], at: int) -> NestedTensor:
    lists = [k for k, a in enumerate(rest) if is_list(a)]
    if len(lists) > 1 and (lists[-1] - lists[0] >= len(lists) or lists[0] < at < lists[-1]):
        raise errors.unsupported(
            "getitem", "lists in dims apart from each other", "lists in neighbouring dims",
            "Index one dim after the other.",
        )  # fmt: skip
    r = 1
    for item in rest[:at]:
        r += not isinstance(item, int) and (not is_list(item) or item is rest[lists[0]])
    extra = sum(rest[k].dim() - 1 for k in lists[:1]) if lists and lists[0] < at else 0
    values = packed(x)[(*rest[:at], _ALL, *rest[at + 1 :])]
    return (
        seen(values, x, r + extra) if not lists else bridge.wrap(values, x._structure, r + extra, x)
    )


def _by_rows(x: NestedTensor, rows: Tensor, rest: list[Any], at: int, at_front: bool) -> Tensor:
    """Dense (*rows.shape, *) of single rows, features indexed by `rest`."""
    d = x._ragged_dim - 1
    picked = packed(x).movedim(d, 0)[rows]
    others = [*rest[:at], *rest[at + 1 :]]
    if at_front or rows.dim() == 1:
        return picked[(*[_ALL] * rows.dim(), *others)]
    # (B, n, *) : n stands where the ragged dim was
    count = rows.dim() - 1
    moved = picked.movedim([*range(1, count + 1)], [*range(d + 1, d + 1 + count)])
    return moved[(_ALL, *rest[:at], *[_ALL] * count, *rest[at + 1 :])]


def _by_lists(x: NestedTensor, rest: list[Any], at: int) -> Tensor:
    """Rows and features by lists that are read together, as dense torch reads them."""
    lists = [k for k, a in enumerate(rest) if is_list(a)]
    if at or lists != [*range(len(lists))]:
        raise errors.unsupported(
            "getitem", "lists in dims apart from each other", "lists in neighbouring dims",
            "Index one dim after the other.",
        )  # fmt: skip
    others = [a.nonzero().squeeze(1) if a.dtype is torch.bool else a for a in rest[1 : len(lists)]]
    rows, *others = torch.broadcast_tensors(row_numbers(x, rest[0]), *others)
    return packed(x)[(row_of_each(x, rows), *others, *rest[len(lists) :])]


_handler = one_node("getitem", getitem)


def _getitem(x: Any, index: Any) -> Any:
    if type(index) is int and type(x) is NestedTensor and not torch.compiler.is_compiling():
        return component(x, index)
    return _handler(x, index)


declare_function(_getitem, torch.Tensor.__getitem__)


# ---- by name --------------------------------------------------------------------------------------------------------
def _select(x: Any, dim: int, index: int) -> Tensor:
    dim = dims.canonical(dim, x.dim())
    index = _number(index)
    if dim == 0:
        return component(x, index)
    if dim == x._ragged_dim:
        picked = packed(x).movedim(dim - 1, 0)[row_of_each(x, index)]
        return picked
    return seen(packed(x).select(dim - 1, index), x, dims.drop(x._ragged_dim, (dim,)))


def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tensor:
    dim = dims.canonical(dim, x.dim())
    cut = slice(start, end, step)
    if dim == 0:
        return components_between(x, cut)
    if dim == x._ragged_dim:
        return rows_between(x, cut)
    return seen(packed(x)[(*[_ALL] * (dim - 1), cut)], x)


def _narrow(x: Any, dim: int, start: Any, length: int) -> Tensor:
    """Over the ragged dim `start` is from the front of each component, all of which must be long enough."""
    dim, start = dims.canonical(dim, x.dim()), _number(start)
    structure = x._structure
    if dim == 0 or dim == x._ragged_dim:
        size = structure.batch_size if dim == 0 else None
        if dim and not structure.is_traced:
            size = structure.min_seqlen
        if size is not None:
            if start < 0:
                start += size if dim == 0 else 0
            if start < 0 or length < 0 or start + length > size:
                raise errors.bad_shape(
                    "narrow",
                    f"start {start} and length {length} for a size of {size} in dim {dim} of {errors.describe(x)}",
                    "a piece inside the dim",
                    "Cut the length.",
                )
        return _slice(x, dim, start, start + length)
    return seen(packed(x).narrow(dim - 1, start, length), x)


def _index_select(x: Any, dim: int, index: Tensor) -> Tensor:
    dim = dims.canonical(dim, x.dim())
    if dim == 0:
        return components_at(x, index)
    if dim == x._ragged_dim:
        return getitem(x, (*[_ALL] * dim, index))
    return bridge.wrap(packed(x).index_select(dim - 1, index), x._structure, x._ragged_dim, x)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "select": _select,
    "slice": _slice,
    "narrow": _narrow,
    "index_select": _index_select,
}
for _name, _rule in _FUNCTIONS.items():
    declare_named(_name, one_node(_name, _rule))
