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
from njt.registry import declare_function, declare_named
from njt.rules.reduction import one_node
from njt.rules.restructured import inner_dim, packed, seen
from njt.structure import Structure
from njt.tensor import NestedTensor

_ALL = slice(None)


def component(x: NestedTensor, i: int) -> Tensor:
    """The component `i` as a view.

    Raises:
        IndexError: `i` is out of range.
    """
    structure = x._structure
    batch = structure.batch_size
    if not structure.is_traced:
        if not -batch <= i < batch:
            raise IndexError(f"index {i} is out of bounds for dimension 0 with size {batch}")
        i %= batch
        start, length = structure.host_offsets()[i], structure.host_lengths()[i]
        return packed(x).narrow(x._ragged_dim - 1, start, length)
    values, d = packed(x), x._ragged_dim - 1
    start, length = structure.offsets[:-1][i].item(), structure.seqlens[i].item()  # type: ignore[assignment]
    torch._check(start >= 0)
    torch._check(length >= 0)
    torch._check(start + length <= values.shape[d])
    return values.narrow(d, start, length)


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


# ---- components -----------------------------------------------------------------------------------------------------
def components_between(x: NestedTensor, cut: slice) -> NestedTensor:
    """The components `cut` as a view; with a step the others become gaps."""
    structure, d = x._structure, x._ragged_dim - 1
    values = packed(x)
    if cut == _ALL:
        return seen(values, x)
    if cut.step not in (None, 1) and cut.step <= 0:
        raise errors.bad_value("slice", f"step {cut.step}", "a positive step", "Use x.flip.")
    if not structure.is_traced:
        start, stop, step = cut.indices(structure.batch_size)
        stop = max(stop, start)
        if step == 1 and not structure.has_gaps:
            starts, host = structure.host_offsets(), structure.host_lengths()[start:stop]
            cut_structure = structure.derived(
                f"components {start}:{stop}",
                lambda: Structure.find(
                    structure.offsets[start : stop + 1] - structure.offsets[start],
                    host_lengths=host,
                ),
            )
            values = values.narrow(d, starts[start], sum(host))
            return seen(values, x, structure=cut_structure)
    begins, counts = structure.offsets[:-1][cut], structure.seqlens[cut]
    ends = torch.cat([begins, structure.offsets[-1:]])
    found = Structure.find(ends, counts.contiguous())
    if not structure.is_traced and structure._host is not None:
        found._take_host(structure.host_lengths()[cut])
    return seen(values, x, structure=found)


def components_at(x: NestedTensor, which: Tensor) -> NestedTensor:
    """The components that a list of numbers or a mask names, copied in that order."""
    structure, d = x._structure, x._ragged_dim - 1
    which = which.to(structure.offsets.device)
    batch = structure.batch_size
    if which.dtype is torch.bool:
        if which.shape[0] != batch:
            raise IndexError(
                f"The shape of the mask [{which.shape[0]}] at index 0 does not match the shape of the "
                f"indexed tensor [{batch}, ...] at index 0"
            )
        which = which.nonzero().squeeze(1)
    which = counted_from_front(which, batch, structure)
    index, found = rows_of_components(structure, which)
    return bridge.wrap(packed(x).index_select(d, index), found, x._ragged_dim, x)


def counted_from_front(which: Tensor, size: Any, structure: Structure) -> Tensor:
    which = which.long()
    on_host = not structure.is_traced and which.device.type == "cpu"
    if on_host and which.numel() and (int(which.min()) < -size or int(which.max()) >= size):
        bad = next(int(i) for i in which.flatten() if not -size <= int(i) < size)
        raise IndexError(f"index {bad} is out of bounds for dimension 0 with size {size}")
    return torch.where(which < 0, which + size, which)


def rows_of_components(structure: Structure, which: Tensor) -> tuple[Tensor, Structure]:
    """The rows of the components `which`, and the structure that they have one after the other."""
    if structure.is_traced or structure._host is None or which.device.type != "cpu":
        counts = structure.seqlens[which]
        found = Structure.find(
            torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(structure.offsets.dtype)
        )
        total = None
    else:
        host = structure.host_lengths()
        chosen = [host[i] for i in which.tolist()]
        found = Structure.from_lengths(chosen, structure.offsets.device, structure.offsets.dtype)
        counts, total = found.seqlens, sum(chosen)
    ids = torch.repeat_interleave(counts, output_size=total)
    shift = structure.offsets[:-1].long()[which] - found.offsets[:-1].long()
    return torch.arange(ids.shape[0], device=ids.device) + shift[ids], found


# ---- rows -----------------------------------------------------------------------------------------------------------
def _clamped(bound: int | None, default: Tensor, counts: Tensor) -> Tensor:
    if bound is None:
        return default
    if bound < 0:
        return (counts + bound).clamp(min=0)
    return counts.clamp(max=bound)


def rows_between(x: NestedTensor, cut: slice) -> NestedTensor:
    """Rows `cut` of every component: a view whose other rows are gaps; with a step a copy."""
    if cut == _ALL:
        return x
    structure = x._structure
    step = 1 if cut.step is None else cut.step
    if step <= 0:
        raise errors.bad_value("slice", f"step {step}", "a positive step", "Use x.flip.")

    def make() -> Structure:
        counts = structure.seqlens
        first = _clamped(cut.start, torch.zeros_like(counts), counts)
        last = torch.maximum(_clamped(cut.stop, counts, counts), first)
        offsets = structure.offsets + torch.nn.functional.pad(first, (0, 1))
        found = Structure.find(offsets, last - first)
        if not structure.is_traced and structure._host is not None:
            host = [len(range(*slice(cut.start, cut.stop).indices(n))) for n in structure._host]
            found._take_host(tuple(host))
        return found

    key = f"rows {cut.start}:{cut.stop}"
    y = seen(packed(x), x, structure=structure.derived(key, make))
    if step == 1:
        return y
    index, found = every(y._structure, step)
    return bridge.wrap(packed(x).index_select(x._ragged_dim - 1, index), found, x._ragged_dim, x)


def every(structure: Structure, step: int) -> tuple[Tensor, Structure]:
    """Every `step`-th row of each component, and the structure of those rows."""
    counts = (structure.seqlens + step - 1) // step
    found = Structure.find(
        torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(structure.offsets.dtype)
    )
    ids = torch.repeat_interleave(counts)
    place = torch.arange(ids.shape[0], device=ids.device) - found.offsets[:-1].long()[ids]
    return structure.offsets[:-1].long()[ids] + place * step, found


def row_of_each(x: NestedTensor, i: Any) -> Tensor:
    """The row of the values that is row `i` of each component; `i`: a number or a tensor (B, *) or (n,).

    Raises:
        IndexError: a component is too short; on CPU, or if the shortest length is known.
    """
    structure = x._structure
    counts, begins = structure.seqlens.long(), structure.offsets[:-1].long()
    if isinstance(i, int):
        if not structure.is_traced and structure.batch_size:
            shortest = structure.min_seqlen
            if not -shortest <= i < shortest:
                raise IndexError(
                    f"index {i} is out of bounds for dimension {x._ragged_dim} with size {shortest}"
                )
        return begins + (counts + i if i < 0 else i)
    index = torch.where(i < 0, i + counts.unsqueeze(-1), i)
    if not structure.is_traced and index.device.type == "cpu":
        wrong = (index < 0) | (index >= counts.unsqueeze(-1))
        if bool(wrong.any()):
            raise IndexError(
                f"index {int(i.expand_as(wrong)[wrong][0])} is out of bounds for dimension "
                f"{x._ragged_dim} with size {structure.min_seqlen}"
            )
    return begins.unsqueeze(-1) + index


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
    used = sum(a is not None and a is not Ellipsis for a in items)
    if used > x.dim():
        raise IndexError(f"too many indices for tensor of dimension {x.dim()}")
    missing = [_ALL] * (x.dim() - used)
    if not any(a is Ellipsis for a in items):
        return [*items, *missing]
    at = next(i for i, a in enumerate(items) if a is Ellipsis)
    return [*items[:at], *missing, *items[at + 1 :]]


def _number(item: Any) -> Any:
    if (
        isinstance(item, Tensor)
        and item.dim() == 0
        and not item.is_nested
        and item.dtype is not torch.bool
    ):
        return int(item)
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
        return _where_true(x, index)
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
        rows = row_of_each(x, ragged.to(x.device).expand(x._structure.batch_size, -1))
        return _by_rows(x, rows, rest, at, at_front=False)
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
    moved = picked.movedim(1, d + 1)
    return moved[(_ALL, *rest[:at], _ALL, *rest[at + 1 :])]


def pairs(x: NestedTensor, first: Tensor, second: Tensor) -> Tensor:
    """The rows of x[first, second], component by component."""
    structure = x._structure
    which = counted_from_front(as_numbers(first, structure), structure.batch_size, structure)
    i = as_numbers(second, structure)
    counts = structure.seqlens.long()[which]
    index = torch.where(i < 0, i + counts, i)
    if (
        not structure.is_traced
        and index.device.type == "cpu"
        and bool(((index < 0) | (index >= counts)).any())
    ):
        raise IndexError(f"an index is out of bounds for dimension {x._ragged_dim}")
    return structure.offsets[:-1].long()[which] + index


def as_numbers(item: Tensor, structure: Structure) -> Tensor:
    item = item.to(structure.offsets.device)
    return item.nonzero().squeeze(1) if item.dtype is torch.bool else item.long()


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


def _where_true(x: NestedTensor, mask: Tensor, op: str = "getitem") -> NestedTensor:
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


def _masked_select(x: Any, mask: Tensor) -> Tensor:
    """The elements of each component where the mask is True: (B, j), another structure."""
    if not isinstance(x, NestedTensor):
        x = x.expand_as(mask)
    if not mask.is_nested or mask.dim() < x.dim() or mask._values.shape != x._values.shape:  # type: ignore[attr-defined]
        mask = torch.logical_and(torch.ones_like(x, dtype=torch.bool), mask)
    return _where_true(x, mask, "masked_select")


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "select": _select,
    "slice": _slice,
    "narrow": _narrow,
    "index_select": _index_select,
    "masked_select": _masked_select,
}
for _name, _rule in _FUNCTIONS.items():
    declare_named(_name, one_node(_name, _rule))
