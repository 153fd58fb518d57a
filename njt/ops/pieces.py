"""Components and rows of a nested tensor by number, slice or list: what indexing and assignment are made of.

Views wherever dense torch gives views: components, runs of components, rows a:b of every component (the rest
becomes gaps). What is chosen by a list or mask is a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from njt import _compat, bridge, errors
from njt.rules.restructured import packed, seen
from njt.structure import Structure
from njt.tensor import NestedTensor

_ALL = slice(None)


# ---- components -----------------------------------------------------------------------------------------------------
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
    which = as_numbers(which, structure)
    which = counted_from_front(which, batch, structure)
    index, found = rows_of_components(structure, which)
    return bridge.wrap(packed(x).index_select(d, index), found, x._ragged_dim, x)


def structure_of(counts: Tensor, like: Structure) -> Structure:
    """Components of `counts` rows, one after the other, with offsets of the dtype of those of `like`."""
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return Structure.find(ends.to(like.offsets.dtype))


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
        found = structure_of(counts, structure)
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
    found = structure_of(counts, structure)
    ids = torch.repeat_interleave(counts)
    place = torch.arange(ids.shape[0], device=ids.device) - found.offsets[:-1].long()[ids]
    return structure.offsets[:-1].long()[ids] + place * step, found


def row_of_each(x: NestedTensor, i: Any) -> Tensor:
    """The row of the values that is row `i` of each component, (B, *i.shape); `i`: a number or a tensor of them.

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
    column = (-1, *[1] * i.dim())
    counts, begins = counts.view(column), begins.view(column)
    index = torch.where(i < 0, i + counts, i)
    if not structure.is_traced and index.device.type == "cpu":
        wrong = (index < 0) | (index >= counts)
        if bool(wrong.any()):
            raise IndexError(
                f"index {int(i.expand_as(wrong)[wrong][0])} is out of bounds for dimension "
                f"{x._ragged_dim} with size {structure.min_seqlen}"
            )
    return begins + index


def row_numbers(x: NestedTensor, item: Tensor) -> Tensor:
    """A list for the ragged dim as numbers; a mask must be as long as every component.

    Raises:
        IndexError: it is not; a list of floats.
    """
    structure = x._structure
    item = item.to(structure.offsets.device)
    if item.dtype not in (torch.bool, torch.uint8):
        return _indices(item)
    n, alike = item.shape[0], structure.seqlens == item.shape[0]
    if item.dim() > 1:
        raise errors.unsupported(
            "getitem", f"a dense mask {tuple(item.shape)} over the ragged dim", "a mask of one dim",
            "Pass a nested mask: x[mask].",
        )  # fmt: skip
    if structure.is_traced:
        _compat.check_later(alike.all(), f"a mask of {n} entries over rows of other numbers")
    elif not all(length == n for length in structure.host_lengths()):
        raise IndexError(
            f"The shape of the mask [{n}] at index {x._ragged_dim} does not match the lengths "
            f"{errors._lengths_text(structure.host_lengths())} of {errors.describe(x)}"
        )
    return item.nonzero().squeeze(1)


def _indices(item: Tensor) -> Tensor:
    if item.is_floating_point() or item.is_complex():
        raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
    return item.long()


def pairs(x: NestedTensor, first: Tensor, second: Tensor) -> Tensor:
    """The rows of x[first, second], component by component."""
    structure = x._structure
    which = counted_from_front(as_numbers(first, structure), structure.batch_size, structure)
    i = row_numbers(x, second)
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
    """A list or mask of components as numbers.

    Raises:
        IndexError: a mask of another length; a list of floats.
    """
    item, batch = item.to(structure.offsets.device), structure.batch_size
    if item.dtype not in (torch.bool, torch.uint8):
        return _indices(item)
    if item.dim() != 1 or item.shape[0] != batch:
        raise IndexError(
            f"The shape of the mask {list(item.shape)} at index 0 does not match the shape of the "
            f"indexed tensor [{batch}, ...] at index 0"
        )
    return item.nonzero().squeeze(1)
