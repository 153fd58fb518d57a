"""Assignment by index, `x[index] = value` and index_put: the index is read as in `indexing`.

Batch, ragged and feature dims: all may be named. Gaps: never written. Ragged dim elsewhere than 1: any.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from njt import bridge, errors
from njt.ops.by_mask import mask_values
from njt.ops.indexing import by_features, is_list, items_of, place_of_ragged
from njt.ops.pieces import (
    as_numbers,
    component,
    components_between,
    counted_from_front,
    every,
    pairs,
    row_numbers,
    row_of_each,
    rows_between,
    rows_of_components,
)
from njt.registry import declare_function, declare_named
from njt.rules.reduction import one_node
from njt.rules.restructured import packed
from njt.tensor import NestedTensor

_ALL = slice(None)


def setitem(x: Any, index: Any, value: Any) -> None:
    """`x[index] = value`; gap rows are left as they are."""
    if not isinstance(x, NestedTensor):
        raise errors.bad_type(
            "setitem", "a nested value or index for a dense tensor", "a nested tensor",
            "Assign to a nested tensor, or pad the value.",
        )  # fmt: skip
    if isinstance(index, Tensor) and index.is_nested:
        _assign_where(x, index, value)
        return
    items = items_of(x, index)
    first, rest = items[0], items[1:]
    if isinstance(first, int):
        component(x, first)[tuple(rest)] = value
        return
    at = place_of_ragged(x, rest)
    ragged = rest[at]
    # whatever can be had as a view first
    y = by_features(x, [_ALL if is_list(a) or k == at else a for k, a in enumerate(rest)], at)
    lists = [
        a if is_list(a) or k == at else _ALL
        for k, a in enumerate(rest)
        if k == at or not isinstance(a, int)
    ]
    at = y._ragged_dim - 1
    if not is_list(first):
        y, first = components_between(y, first), _ALL
    if isinstance(ragged, slice) and ragged.step in (None, 1):
        y, ragged = rows_between(y, ragged), _ALL
        lists[at] = _ALL
    if first == _ALL and all(isinstance(a, slice) and a == _ALL for a in lists):
        _fill(y, value)
        return
    _put(y, packed(y).movedim(at, 0), first, ragged, lists, value)


def _fill(y: NestedTensor, value: Any) -> None:
    if isinstance(value, Tensor):
        y.copy_(value)
    else:
        y.fill_(value)


def _put(
    y: NestedTensor, rows_first: Tensor, first: Any, ragged: Any, lists: list[Any], value: Any,
    accumulate: bool = False, in_place: bool = True,
) -> Tensor:  # fmt: skip
    """Writes `value` into (rows, *features) values, at the rows and features that the lists name."""
    structure, at = y._structure, y._ragged_dim - 1
    others = [a if is_list(a) else None for k, a in enumerate(lists) if k != at]
    ids = None
    if is_list(first) and is_list(ragged):
        rows = pairs(y, first, ragged)
    elif is_list(first) and isinstance(ragged, slice):
        which = counted_from_front(as_numbers(first, structure), structure.batch_size, structure)
        rows, ids = _rows_of(y, ragged, which)
    elif isinstance(ragged, slice):
        rows, ids = _rows_of(y, ragged, None)
        # a list of features then meets every row
        rows = rows.view(-1, *[1] * max((o.dim() for o in others if o is not None), default=0))
    elif isinstance(ragged, int):
        rows = row_of_each(y, ragged)
        if isinstance(first, Tensor):
            rows = rows[as_numbers(first, structure)]
        # a list of features then meets this row of every component
        rows = rows.view(-1, *[1] * max((o.dim() for o in others if o is not None), default=0))
    else:
        rows, others = _read_together(y, ragged, others)
        value = _rows_in_front(y, value, rows, others, rows_first)
    if ids is not None and is_list(first):
        others = [o if o is None or o.numel() == 1 else o[ids] for o in others]
    packed_value = _in_line(y, value, rows, ids, rows_first)
    spot = [rows, *others]
    while spot[-1] is None:
        spot.pop()
    write = torch.ops.aten.index_put_ if in_place else torch.ops.aten.index_put
    return write(rows_first, spot, packed_value, accumulate)


def _read_together(y: NestedTensor, ragged: Tensor, others: list[Any]) -> tuple[Tensor, list[Any]]:
    """Rows and features by lists that are read together, as dense torch reads them."""
    lists = [k for k, o in enumerate(others) if o is not None]
    if not lists:
        return row_of_each(y, row_numbers(y, ragged)), others
    if y._ragged_dim > 1 or lists != [*range(len(lists))]:
        raise errors.unsupported(
            "setitem", "lists in dims apart from each other", "lists in neighbouring dims",
            "Assign one after the other.",
        )  # fmt: skip
    numbers = [o.nonzero().squeeze(1) if o.dtype is torch.bool else o for o in others[: len(lists)]]
    first, *others = torch.broadcast_tensors(row_numbers(y, ragged), *numbers)
    return row_of_each(y, first), others


def _rows_in_front(
    y: NestedTensor, value: Any, rows: Tensor, others: list[Any], rows_first: Tensor
) -> Any:
    """A dense value for a list of rows, which stands where the ragged dim was, with that list in front."""
    at, count = y._ragged_dim - 1, rows.dim() - 1
    if not isinstance(value, Tensor) or value.is_nested or at == 0 or value.dim() == 0:
        return value
    sizes = rows_first.shape[1:]
    full = value.expand(rows.shape[0], *sizes[:at], *rows.shape[1:], *sizes[at:])
    return full.movedim([*range(1 + at, 1 + at + count)], [*range(1, 1 + count)])


def _rows_of(y: NestedTensor, cut: slice, which: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows `cut` of the components `which` (all), and which of them each row belongs to."""
    structure = rows_between(y, slice(cut.start, cut.stop))._structure
    if which is None and cut.step not in (None, 1):
        rows, found = every(structure, cut.step)
    else:
        if which is None:
            which = torch.arange(structure.batch_size, device=structure.offsets.device)
        rows, found = rows_of_components(structure, which)
        if cut.step not in (None, 1):
            index, found = every(found, cut.step)
            rows = rows[index]
    return rows, torch.repeat_interleave(found.seqlens, output_size=rows.shape[0])


def _in_line(
    y: NestedTensor, value: Any, rows: Tensor, ids: Tensor | None, rows_first: Tensor
) -> Tensor:
    """A value as the rows that it is written to."""
    if not isinstance(value, Tensor):
        return torch.as_tensor(value, dtype=rows_first.dtype, device=rows_first.device)
    value = value.to(rows_first.dtype) if value.dtype is not rows_first.dtype else value
    d = y._ragged_dim - 1
    if isinstance(value, NestedTensor):
        if value._ragged_dim != y._ragged_dim:
            raise errors.different_ragged_dims("setitem", y, value)
        packed_value = bridge.compact_values(value)
        if ids is not None and packed_value.shape[d] != rows.shape[0]:
            raise errors.bad_shape(
                "setitem",
                f"{packed_value.shape[d]} rows for {rows.shape[0]}",
                "components as long as those they replace",
                "Build a new tensor of the components: njt.as_nested_tensor.",
            )
        return packed_value.movedim(d, 0)
    if ids is None or value.dim() < y.dim() - d:
        return value
    if value.dim() < y.dim():
        value = value[(None,) * (y.dim() - value.dim())]
    if value.shape[d + 1] != 1:
        host = y._structure
        if (
            host.is_traced
            or host.min_seqlen != host.max_seqlen
            or host.max_seqlen != value.shape[d + 1]
        ):
            raise errors.not_broadcastable("setitem", y, value, "its rows don't match")
        if value.shape[d + 1] == 0:
            return value.new_zeros(())  # no row to write to
        count = int(rows.shape[0]) // value.shape[d + 1]
        return value.movedim(d + 1, 1).expand(count, *[-1] * (y.dim() - 1)).flatten(0, 1)
    value = value.squeeze(d + 1)
    return value if value.shape[0] == 1 else value[ids]


def _assign_where(x: NestedTensor, mask: Tensor, value: Any) -> None:
    if not isinstance(value, Tensor) or value.dim() == 0:
        while mask.dim() < x.dim():
            mask = mask.unsqueeze(-1)
        x.masked_fill_(mask, value)
        return
    _, chosen = mask_values(x, mask, "setitem")
    values = packed(x)
    if x._structure.has_gaps:
        full = torch.zeros(values.shape[: chosen.dim()], dtype=torch.bool, device=values.device)
        chosen = full.index_copy(x._ragged_dim - 1, x._structure.row_index(), chosen)
    values[chosen] = bridge.compact_values(value) if isinstance(value, NestedTensor) else value


declare_function(one_node("setitem", setitem), torch.Tensor.__setitem__)


def _index_put(in_place: bool) -> Any:
    def index_put(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Tensor:
        if not isinstance(x, NestedTensor) or any(i is not None and i.is_nested for i in indices):
            raise errors.bad_type(
                "index_put", f"{errors.describe(x)} with nested indices", "dense indices",
                "Use x[mask] = value, or x.scatter.",
            )  # fmt: skip
        items = items_of(x, tuple(_ALL if i is None else i for i in indices))
        first, rest = items[0], items[1:]
        at = x._ragged_dim - 1
        rows_first = packed(x).movedim(at, 0)
        if isinstance(first, int):
            first = torch.tensor([first], device=x.device)
        out = _put(x, rows_first, first, rest[at], rest, values, accumulate, in_place)
        if in_place:
            return x
        return bridge.wrap(out.movedim(0, at), x._structure, x._ragged_dim, x)

    return one_node("index_put", index_put)


declare_named("index_put", _index_put(in_place=False))
declare_named("index_put_", _index_put(in_place=True))
