"""Joining nested tensors, and repeating them: along features, rows of every component, or components."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from njt import bridge, dims, errors
from njt.ops.pieces import components_at
from njt.registry import declare_named
from njt.rules.reduction import one_node
from njt.structure import Structure
from njt.tensor import NestedTensor


def _leading(op: str, tensors: Sequence[Any]) -> NestedTensor:
    """The first nested tensor; all must have its rank and ragged dim."""
    x = next(t for t in tensors if isinstance(t, NestedTensor))
    for t in tensors:
        if isinstance(t, NestedTensor) and t._ragged_dim != x._ragged_dim:
            raise errors.different_ragged_dims(op, x, t)
        if t.dim() != x.dim():
            raise errors.bad_shape(
                op,
                f"{errors.describe(x)} and {errors.describe(t)}",
                "tensors of one rank",
                "Insert dims: t.unsqueeze(dim).",
            )
    return x


def _equal_rows(t: Tensor, x: NestedTensor, op: str) -> NestedTensor:
    """A dense (B, *pre, S, *post) as a nested tensor of B components of length S, compact."""
    r = x._ragged_dim
    structure = Structure.from_lengths(
        [t.shape[r]] * t.shape[0], t.device, x._structure.offsets.dtype
    )
    rows = t.movedim(r, 1).flatten(0, 1).movedim(0, r - 1)
    return bridge.wrap(rows, structure, r, x)


def _host_lengths(parts: Sequence[NestedTensor]) -> list[tuple[int, ...]] | None:
    """The lengths of all parts, if they are known without a look at a device."""
    hosts = [p._structure._host for p in parts]
    if any(h is None for h in hosts) or any(p._structure.is_traced for p in parts):
        return None
    return hosts  # type: ignore[return-value]


def _structure_of(lengths: Tensor, dtype: torch.dtype) -> Structure:
    return Structure.find(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(dtype))


def cat(tensors: Sequence[Any], dim: int = 0) -> NestedTensor:
    """Joins along one dim; dense operands have equal rows in every component.

    Args:
        tensors: nested (B, j1, *) of one rank and ragged dim, and dense (B, S, *).
        dim: 0: more components. The ragged dim: longer components. Others: wider rows, of equal lengths.
    Returns:
        nested, new memory. Gaps are closed except along features.
    """
    tensors = list(tensors)
    x = _leading("cat", tensors)
    dim = dims.canonical(dim, x.dim())
    if dim not in (0, x._ragged_dim):
        return _wider(x, tensors, dim)
    parts = [
        bridge.compact(t) if isinstance(t, NestedTensor) else _equal_rows(t, x, "cat")
        for t in tensors
    ]
    if dim == 0:
        return _more_components(x, parts)
    return _longer(x, parts)


def _wider(x: NestedTensor, tensors: list[Any], dim: int) -> NestedTensor:
    rows = []
    for t in tensors:
        if not isinstance(t, NestedTensor):
            t = _equal_rows(t, x, "cat")
        if t is not x and t._structure is not x._structure:
            aligned = bridge.align(t, x, "cat")
            if not isinstance(aligned, NestedTensor):
                raise errors.different_structures("cat", x, t)
            t = aligned
        rows.append(bridge.values(t))
    return bridge.wrap(torch.cat(rows, dim - 1), x._structure, x._ragged_dim, x)


def _more_components(x: NestedTensor, parts: list[NestedTensor]) -> NestedTensor:
    packed = torch.cat([bridge.values(p) for p in parts], x._ragged_dim - 1)
    hosts, offsets = _host_lengths(parts), x._structure.offsets
    if hosts is not None:
        structure = Structure.from_lengths(
            [n for h in hosts for n in h], packed.device, offsets.dtype
        )
    else:
        structure = _structure_of(torch.cat([p._structure.seqlens for p in parts]), offsets.dtype)
    return bridge.wrap(packed, structure, x._ragged_dim, x)


def _longer(x: NestedTensor, parts: list[NestedTensor]) -> NestedTensor:
    d, offsets = x._ragged_dim - 1, x._structure.offsets
    batch = x._structure.batch_size
    for p in parts:
        if p._structure.is_traced:
            torch._check(p._structure.batch_size == batch)
        elif p._structure.batch_size != batch:
            raise errors.bad_shape(
                "cat",
                f"{batch} and {p._structure.batch_size} components along the ragged dim {d + 1}",
                "as many components in each",
                "Use dim=0 for more components.",
            )
    hosts = _host_lengths(parts)
    if hosts is not None:
        sums = [sum(ns) for ns in zip(*hosts)]
        structure = Structure.from_lengths(sums, x.device, offsets.dtype)
    else:
        total = sum(p._structure.seqlens for p in parts)
        assert isinstance(total, Tensor)
        structure = _structure_of(total, offsets.dtype)
    begins, places = structure.offsets[:-1].long(), []
    for p in parts:
        rows = p._values.shape[d]
        counts = p._structure.seqlens.long()
        shift = begins - p._structure.offsets[:-1].long()
        places.append(
            torch.arange(rows, device=counts.device)
            + torch.repeat_interleave(shift, counts, output_size=rows)
        )
        begins = begins + counts
    packed = torch.cat([bridge.values(p) for p in parts], d)
    packed = torch.empty_like(packed).index_copy(d, torch.cat(places), packed)
    return bridge.wrap(packed, structure, x._ragged_dim, x)


def stack(tensors: Sequence[Any], dim: int = 0) -> NestedTensor:
    """Joins along a new feature dim."""
    x = _leading("stack", tensors)
    dim = dims.canonical(dim, x.dim() + 1)
    if dim == 0:
        raise errors.no_batch_dim("stack", x, 0)
    return cat([t.unsqueeze(dim) for t in tensors], dim)


def _along(dim: int) -> Callable[..., Any]:
    return lambda tensors: cat(tensors, dim)


def _repeat(x: Any, *given: Any, **named: Any) -> NestedTensor:
    sizes = named.get("repeats", given[0] if given and not isinstance(given[0], int) else given)
    sizes = list(sizes)
    if len(sizes) != x.dim():
        raise errors.bad_shape(
            "repeat",
            f"repeats {tuple(sizes)} for {errors.describe(x)}",
            f"{x.dim()} numbers, since new dims come before the batch dim",
            "Insert the dims first: x.unsqueeze(dim).",
        )
    r = x._ragged_dim
    inner = [*sizes[1:r], 1, *sizes[r + 1 :]]
    if any(n != 1 for n in inner):
        x = bridge.wrap(bridge.values(x).repeat(inner), x._structure, r, x)
    if sizes[r] != 1:
        x = cat([x] * sizes[r], r) if sizes[r] else x[(*[slice(None)] * r, slice(0, 0))]
    if sizes[0] != 1:
        x = cat([x] * sizes[0], 0) if sizes[0] else x[:0]
    return x if any(n != 1 for n in sizes) else x.clone()


def _tile(x: Any, *given: Any, **named: Any) -> NestedTensor:
    sizes = named.get("dims", given[0] if given and not isinstance(given[0], int) else given)
    return _repeat(x, *[1] * (x.dim() - len(sizes)), *sizes)


def _repeat_interleave(
    x: Any, repeats: Any, dim: int | None = None, *, output_size: Any = None
) -> Tensor:
    if dim is None:
        flat = x.flatten()
        return torch.repeat_interleave(flat, repeats, output_size=output_size)
    dim, d = dims.canonical(dim, x.dim()), x._ragged_dim - 1
    structure = x._structure
    if dim == 0:
        numbers = torch.arange(structure.batch_size, device=x.device)
        return components_at(x, torch.repeat_interleave(numbers, repeats, output_size=output_size))
    if dim != x._ragged_dim:
        rows = torch.repeat_interleave(bridge.values(x), repeats, dim - 1, output_size=output_size)
        return bridge.wrap(rows, structure, x._ragged_dim, x)
    x = bridge.compact(x)
    structure = x._structure
    if isinstance(repeats, NestedTensor):
        each = bridge.compact_values(bridge.align(repeats, x, "repeat_interleave"))
        ends = torch.nn.functional.pad(each.cumsum(0), (1, 0))
        found = Structure.find(ends[structure.offsets.long()].to(structure.offsets.dtype))
        return bridge.wrap(torch.repeat_interleave(bridge.values(x), each, d), found, d + 1, x)
    if isinstance(repeats, Tensor):
        if repeats.numel() != 1:
            raise errors.bad_shape(
                "repeat_interleave",
                f"{repeats.numel()} repeats for the ragged dim {dim} of {errors.describe(x)}",
                "a number, or a nested (B, j1) of numbers",
                "Make them nested with the offsets of x.",
            )
        repeats = int(repeats)
    rows = torch.repeat_interleave(bridge.values(x), repeats, d)
    host = None if structure.is_traced else structure._host
    if host is not None:
        found = Structure.from_lengths(
            [n * repeats for n in host], x.device, structure.offsets.dtype
        )
    else:
        found = Structure.find(structure.offsets * repeats)
    return bridge.wrap(rows, found, d + 1, x)


def _broadcast_tensors(*tensors: Any) -> list[Tensor]:
    given = (
        list(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
    )
    total: Any = sum(torch.zeros_like(t, dtype=torch.float32) for t in given)
    return [t.expand_as(total) for t in given]


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "cat": cat,
    "concat": cat,
    "concatenate": cat,
    "stack": stack,
    "hstack": _along(1),
    "column_stack": _along(1),
    "vstack": _along(0),
    "row_stack": _along(0),
    "dstack": _along(2),
    "repeat": _repeat,
    "tile": _tile,
    "repeat_interleave": _repeat_interleave,
    "broadcast_tensors": _broadcast_tensors,
}
for _name, _rule in _FUNCTIONS.items():
    declare_named(_name, one_node(_name, _rule))
