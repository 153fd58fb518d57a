"""The ways in and out: nested tensors from lists, packed values or padded rectangles, and back.

torch's names and defaults where torch has the function. May import everything but drop_in and testing.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from njt import _compat, bridge, errors
from njt.kernels import padding as padding_kernels
from njt.ops.padding import to_padded_tensor
from njt.structure import Structure, validation
from njt.structure.integers import DTYPES, integer, integers
from njt.tensor import NestedTensor

__all__ = [
    "as_nested_tensor",
    "check_structure",
    "from_padded",
    "masked_select",
    "narrow",
    "nested_tensor",
    "nested_tensor_from_jagged",
    "to_padded_tensor",
]


@_compat.one_node
def nested_tensor(
    tensor_list: Sequence[Any],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
) -> NestedTensor:
    """Makes a leaf from a list of tensors (or nested lists of numbers) that differ in at most one dim.

    Args:
        tensor_list: B tensors (n_i, *) of one dtype and device, or anything torch.tensor takes. Lists get one
            dtype together; an empty one has the features of the first that is not.
        dtype, device: of the result; default those of the first tensor.
        layout: torch.jagged or None; another is refused.
        requires_grad: whether the new leaf records gradients.
        pin_memory: whether the values lie in pinned host memory.
    Returns:
        (B, j1, *), new memory, detached from the inputs (`as_nested_tensor` keeps the graph).
    Raises:
        RuntimeError: the list is empty, or the tensors differ in rank, dtype, device or in several dims.
        TypeError: components that are neither dense tensors nor lists of numbers.
        ValueError: another layout; a list that is no rectangle.

    >>> njt.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)])
    NestedTensor(size=(2, j1, 3), lengths=[2, 1])
    """
    _check_layout("nested_tensor", layout)
    components = _as_tensors("nested_tensor", tensor_list, dtype, device)
    if torch.is_grad_enabled() and any(t.requires_grad for t in components):
        warnings.warn(
            "nested_tensor() detaches its inputs, of which some carry a graph. Use "
            "njt.as_nested_tensor(tensors) to keep it.",
            stacklevel=2,
        )
    with torch.no_grad():
        x = _from_components("nested_tensor", components, dtype, device)
        if pin_memory:
            x = NestedTensor(x._values.pin_memory(), x._structure, x._ragged_dim)
    return x.requires_grad_() if requires_grad else x


@_compat.one_node
def as_nested_tensor(
    ts: Sequence[Tensor] | Tensor,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    layout: torch.layout | None = None,
) -> NestedTensor:
    """Makes a nested tensor that keeps the graph of its inputs.

    Args:
        ts: B tensors (n_i, *); or a dense (B, S, *), whose components are all S long; or a nested tensor.
        dtype, device: of the result; default those of the input.
        layout: torch.jagged or None; another is refused.
    Returns:
        (B, j1, *); shares memory with a dense or nested `ts` that needs no conversion.
    Raises:
        RuntimeError: as `nested_tensor`.
        ValueError: another layout.

    >>> njt.as_nested_tensor(torch.zeros(2, 3, 4)).values().shape
    torch.Size([6, 4])
    """
    _check_layout("as_nested_tensor", layout)
    if isinstance(ts, NestedTensor):
        return ts.to(device=device or ts.device, dtype=dtype or ts.dtype)
    if isinstance(ts, Tensor):
        _check_dense(
            "as_nested_tensor",
            "ts",
            ts,
            "Of its parts: njt.nested_tensor_from_jagged(x.values(), x.offsets()).",
        )
        if ts.dim() < 2:
            raise errors.bad_shape(
                "as_nested_tensor",
                errors.describe(ts),
                "a dense (B, S, *)",
                "Add a dim: x.unsqueeze(0).",
            )
        dense = ts.to(device=device or ts.device, dtype=dtype or ts.dtype)
        structure = _uniform(dense.shape[0], dense.shape[1], dense.device)
        return bridge.nested_view(dense.flatten(0, 1), structure)
    return _from_components("as_nested_tensor", _listed("as_nested_tensor", ts), dtype, device)


def _as_tensors(
    op: str, listed: Any, dtype: torch.dtype | None, device: torch.device | str | None
) -> list[Tensor]:
    """Tensors as they are, and lists of numbers as tensors of one dtype: what torch.tensor finds for them all."""
    if isinstance(listed, Tensor) and listed.dim() == 0:
        raise errors.bad_shape(
            op, errors.describe(listed), "a list, or at least one dim", "Add dims: x.view(1, 1)."
        )
    items = _listed(op, listed)
    made = [
        t if isinstance(t, Tensor) else _tensor_of(op, i, t, dtype, device)
        for i, t in enumerate(items)
    ]
    lists = [i for i, t in enumerate(items) if isinstance(t, (list, tuple))]
    solid = [t for t, item in zip(made, items) if not isinstance(item, (list, tuple)) or item]
    if not lists or not solid:
        return made
    if dtype is None:
        dtypes = [made[i].dtype for i in lists if items[i]]
        dtype = reduce(torch.promote_types, dtypes) if dtypes else solid[0].dtype
    for i in lists:
        # an empty list has neither dtype nor features of its own
        empty = solid[0].new_empty((0, *solid[0].shape[1:]), dtype=dtype)
        made[i] = made[i].to(dtype) if items[i] else empty
    return made


def _listed(op: str, tensors: Any) -> list[Any]:
    try:
        return list(tensors)
    except TypeError:
        raise errors.bad_type(
            op, errors.describe(tensors), "a list of tensors", "Put it in a list: [x]."
        ) from None


def _tensor_of(
    op: str, i: int, item: Any, dtype: torch.dtype | None, device: torch.device | str | None
) -> Tensor:
    try:
        return torch.tensor(item, dtype=dtype, device=device)
    except (TypeError, ValueError, RuntimeError) as fault:
        bad = errors.bad_value if isinstance(fault, ValueError) else errors.bad_type
        raise bad(
            op,
            f"{errors.describe(item)} at position {i}",
            "tensors, or lists that torch.tensor takes",
            "Give each row of a list the same length, and numbers only.",
        ) from fault


def _uniform(batch: Any, length: Any, device: torch.device) -> Structure:
    if isinstance(batch, int) and isinstance(length, int):
        return Structure.from_lengths([length] * batch, device)
    offsets = torch.arange(batch + 1, device=device) * length
    return Structure.find(offsets, min_seqlen=length, max_seqlen=length)


def _check_layout(op: str, layout: torch.layout | None) -> None:
    if layout not in (None, torch.jagged):
        raise errors.bad_value(
            op, f"layout={layout}", "layout=torch.jagged", "Leave it out: njt makes no other."
        )


def _from_components(
    op: str,
    components: list[Tensor],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> NestedTensor:
    if not components:
        raise errors.bad_shape(
            op,
            "an empty list",
            "at least one tensor",
            "Make an empty batch with njt.nested_tensor_from_jagged(values, torch.tensor([0])).",
        )
    usual = _packed_usual(components) if dtype is None and device is None else None
    if usual is not None:
        lengths = [t.shape[0] for t in components]
        return bridge.wrap(usual, Structure.from_lengths(lengths, usual.device), 1)
    d = _differing_dim(op, components, dtype, device)
    if dtype is not None or device is not None:
        components = [t.to(device=device, dtype=dtype) for t in components]
    packed = torch.cat(components, dim=d)
    structure = Structure.from_lengths([t.shape[d] for t in components], packed.device)
    return bridge.wrap(packed, structure, d + 1)


def _packed_usual(components: list[Tensor]) -> Tensor | None:
    """The packed rows of components that differ in their first size only; None to look closer.

    `cat` itself checks feature sizes and devices; it would mix dtypes and drop empty vectors.
    """
    try:
        if len({(t.dtype, t.dim()) for t in components}) != 1:
            return None
        packed = torch.cat(components)
        return None if packed.is_nested or packed.layout is not torch.strided else packed
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError):
        return None


def _differing_dim(
    op: str,
    components: list[Tensor],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> int:
    """The only dim in which the components differ.

    Raises:
        RuntimeError: there are several, or ranks, dtypes or devices differ.
    """
    first = components[0]
    for i, t in enumerate(components):
        if not isinstance(t, Tensor):
            raise errors.bad_type(
                op,
                f"{errors.describe(t)} at position {i}",
                "tensors",
                "Use nested_tensor for data.",
            )
        if t.is_nested or t.layout is not torch.strided:
            what = errors.describe(t) if t.is_nested else f"a tensor of layout {t.layout}"
            advice = "Take its components: x.unbind()." if t.is_nested else "Use x.to_dense()."
            raise errors.bad_type(op, f"{what} at position {i}", "dense tensors", advice)
        if t.dim() == 0:
            raise errors.bad_shape(
                op,
                f"a single number at position {i}",
                "tensors of at least one dim",
                "Put numbers into lists or vectors: [[1, 2], [3]].",
            )
        for what in ("dtype", "device") if dtype is None or device is None else ():
            given = {"dtype": dtype, "device": device}[what]
            if given is None and getattr(t, what) != getattr(first, what):
                raise errors.bad_shape(
                    op,
                    f"{what} {getattr(first, what)} at position 0 and {getattr(t, what)} at position {i}",
                    f"one {what}",
                    f"Pass {what}= to convert them.",
                )
        if t.dim() != first.dim():
            raise errors.bad_shape(
                op,
                f"shapes {tuple(first.shape)} at position 0 and {tuple(t.shape)} at position {i}",
                "tensors of one rank",
                "Reshape them to (length, *features).",
            )
    differing = [
        d for d in range(first.dim()) if any(t.shape[d] != first.shape[d] for t in components)
    ]
    if len(differing) > 1:
        i = next(
            i
            for i, t in enumerate(components)
            if t.shape[differing[1]] != first.shape[differing[1]]
        )
        raise errors.bad_shape(
            op,
            f"shapes {tuple(first.shape)} at position 0 and {tuple(components[i].shape)} at position {i}",
            "tensors that differ in one dim only",
            "Pad or cut the other dims to one size.",
        )
    return differing[0] if differing else 0


@_compat.one_node
def nested_tensor_from_jagged(
    values: Tensor,
    offsets: Tensor | None = None,
    lengths: Tensor | None = None,
    jagged_dim: int | None = None,
    min_seqlen: int | None = None,
    max_seqlen: int | None = None,
) -> NestedTensor:
    """Makes a nested tensor that is a view of packed values.

    Args:
        values: (total_length, *), or with the packed dim at `jagged_dim` - 1.
        offsets: (B + 1,) int32 or int64, start of each component; default from `lengths`, without gaps.
        lengths: (B,) integer. With offsets: rows in use of each component, the rest being gaps.
        jagged_dim: the ragged dim of the result, default 1.
        min_seqlen, max_seqlen: bounds, if known; saves a look at the device.
    Returns:
        (B, j1, *), sharing memory with `values` and structure with every tensor over the same offsets.
    Raises:
        RuntimeError: neither offsets nor lengths; wrong rank, dtype or device of either; on CPU, offsets
            that don't start at 0, fall or don't end at the rows of `values`, or components that overlap
            (`njt.check_structure` looks at a GPU).
        ValueError: a bound that is wrong.
        TypeError: `values` are not dense; a bound that is no integer.

    >>> v = torch.arange(5.0)
    >>> njt.nested_tensor_from_jagged(v, torch.tensor([0, 2, 5])).unbind()
    (tensor([0., 1.]), tensor([2., 3., 4.]))
    """
    op = "nested_tensor_from_jagged"
    _check_dense(op, "values", values, "Pass x.values().")
    ragged_dim = 1 if jagged_dim is None else integer(op, "jagged_dim", jagged_dim)
    if not 1 <= ragged_dim <= values.dim():
        raise errors.bad_value(
            op,
            f"jagged_dim={ragged_dim} for values {tuple(values.shape)}",
            f"a dim in 1..{max(values.dim(), 1)}",
            "Count the batch dim as 0.",
        )
    _check_vector(op, "offsets", offsets, values)
    _check_vector(op, "lengths", lengths, values)
    if offsets is None:
        if lengths is None:
            raise errors.bad_shape(
                op, "neither offsets nor lengths", "one of them", "Pass offsets=."
            )
        offsets, lengths = _offsets_from(lengths), None
    elif offsets.shape[0] == 0:
        raise errors.bad_shape(
            op, "empty offsets", "(B + 1,) offsets", "Pass torch.tensor([0]) for an empty batch."
        )
    if lengths is not None and lengths.shape[0] != offsets.shape[0] - 1:
        raise errors.bad_shape(
            op,
            f"{lengths.shape[0]} lengths and {offsets.shape[0]} offsets",
            "one offset more than lengths",
            "Offsets hold the start of each component and one end.",
        )
    structure = Structure.find(offsets, lengths)
    _check_structure(op, structure, values.shape[ragged_dim - 1], min_seqlen, max_seqlen)
    return bridge.nested_view(values, structure, ragged_dim)


def _check_dense(op: str, name: str, x: Any, advice: str) -> None:
    if not isinstance(x, Tensor):
        raise errors.bad_type(
            op, f"{name} of type {type(x).__name__}", "a dense tensor", "Make one: torch.tensor(x)."
        )
    if x.is_nested or x.layout is not torch.strided:
        came = errors.describe(x) if x.is_nested else f"{name} of layout {x.layout}"
        raise errors.bad_type(
            op, came, f"a dense tensor as {name}", advice if x.is_nested else "Use x.to_dense()."
        )


def _offsets_from(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _check_vector(op: str, name: str, vector: Tensor | None, values: Tensor) -> None:
    if vector is None:
        return
    if not isinstance(vector, Tensor):
        raise errors.bad_type(op, f"{name} of type {type(vector).__name__}", "a tensor", "Wrap it.")
    if vector.dim() != 1 or vector.dtype not in (torch.int64, torch.int32):
        raise errors.bad_shape(
            op,
            f"{name} {tuple(vector.shape)} of {vector.dtype}",
            f"{name} of one dim and dtype int32 or int64",
            f"Pass {name}.flatten().long().",
        )
    if vector.device != values.device:
        raise errors.bad_shape(
            op,
            f"values on {values.device} and {name} on {vector.device}",
            "one device",
            f"Move it: {name}.to(values.device).",
        )


def _check_structure(
    op: str, structure: Structure, rows: Any, min_seqlen: Any, max_seqlen: Any
) -> None:
    """On CPU, compares everything that was said with the data; elsewhere believes it."""
    if structure.is_traced or structure.offsets.device.type != "cpu":
        structure.set_bounds(min_seqlen, max_seqlen, op)
        return
    min_seqlen = None if min_seqlen is None else integer(op, "min_seqlen", min_seqlen)
    max_seqlen = None if max_seqlen is None else integer(op, "max_seqlen", max_seqlen)
    structure.validate(rows, op)
    validation.check_bounds(structure, min_seqlen, max_seqlen, op)


def check_structure(x: NestedTensor) -> None:
    """Reads offsets and lengths of `x`, wherever they are, and raises if they don't fit its values.

    Args:
        x: nested, any device; on a GPU this waits for the device.
    Raises:
        RuntimeError: as `nested_tensor_from_jagged` raises at once on CPU.
        TypeError: `x` is no nested tensor of njt.
    """
    if not isinstance(x, NestedTensor):
        raise errors.bad_type(
            "check_structure", errors.describe(x), "a nested tensor", "Make one with njt first."
        )
    x._structure._total = None
    x._structure.validate(x._values.shape[x._ragged_dim - 1], "check_structure")


@_compat.one_node
def from_padded(
    padded: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    offsets: Tensor | None = None,
    mask: Tensor | None = None,
    ragged_dim: int = 1,
    padding_side: str = "right",
    min_seqlen: int | None = None,
    max_seqlen: int | None = None,
    total_length: int | None = None,
    sum_S: int | None = None,
) -> NestedTensor:
    """Makes a nested tensor from a padded rectangle; exactly one of lengths, offsets and mask says how.

    Args:
        padded: (B, S, *), or with the padded dim at `ragged_dim`.
        lengths: (B,) integers, tensor or list.
        offsets: (B + 1,) of another nested tensor, whose structure the result then shares.
        mask: (B, S) bool, True at the elements that are taken; holes are closed up.
        padding_side: "right" if sequences stand at the left, "left" if at the right end.
        min_seqlen, max_seqlen: bounds, if known.
        total_length: sum of the lengths, if known; saves a look at the device. `sum_S` is torch's name.
    Returns:
        (B, j1, *), new memory; the gradient at padding is 0.
    Raises:
        ValueError: not exactly one of lengths, offsets, mask; another padding_side.
        RuntimeError: a length beyond the width or below 0, wrong batch size or total.
        TypeError: `padded` is not dense; a length, bound or total that is no integer.

    >>> x = njt.from_padded(torch.ones(2, 3), lengths=[2, 1])
    >>> x.values(), x.max_seqlen
    (tensor([1., 1., 1.]), 2)
    """
    op = "from_padded"
    if sum(a is not None for a in (lengths, offsets, mask)) != 1:
        raise errors.bad_value(
            op,
            f"{sum(a is not None for a in (lengths, offsets, mask))} of lengths, offsets and mask",
            "exactly one",
            "Pass lengths= of the sequences.",
        )
    if padding_side not in ("left", "right"):
        raise errors.bad_value(
            op,
            f"padding_side={padding_side!r}",
            '"left" or "right"',
            "Name the side that padding is on.",
        )
    _check_dense(op, "padded", padded, "It has no padding.")
    ragged_dim = integer(op, "ragged_dim", ragged_dim)
    if not 1 <= ragged_dim < padded.dim():
        raise errors.bad_value(
            op,
            f"{errors.describe(padded)} with ragged_dim={ragged_dim}",
            "a dense (B, S, *) and a ragged dim in it",
            "Count the batch dim as 0.",
        )
    total = _given_total(op, total_length, sum_S)
    if mask is not None:
        x = _from_mask(op, padded, mask, ragged_dim)
        _check_structure(op, x._structure, total, min_seqlen, max_seqlen)
        return x
    structure = _structure_of(op, padded, lengths, offsets)
    batch, width = padded.shape[0], padded.shape[ragged_dim]
    if structure.batch_size != batch and not structure.is_traced:
        raise errors.bad_shape(
            op,
            f"padded {tuple(padded.shape)} and {structure.batch_size} lengths",
            "one length per row of the batch",
            "Check the batch dims.",
        )
    _check_structure(op, structure, None, min_seqlen, max_seqlen)
    longest = structure.known_max_seqlen
    if isinstance(longest, int) and isinstance(width, int) and longest > width:
        raise errors.bad_shape(
            op,
            f"a length of {longest} in a padded dim of size {width}",
            "lengths within the padded dim",
            "Cut the lengths: lengths.clamp(max=width).",
        )
    if total is None:
        total = structure.total_length
    elif not structure.is_traced and structure.offsets.device.type == "cpu":
        structure.validate(total, op)
    packed = padding_kernels.padded_to_packed(
        padded,
        structure.offsets,
        total,
        values_dim=ragged_dim - 1,
        left=padding_side == "left",
    )
    return bridge.wrap(packed, structure, ragged_dim)


def _given_total(op: str, total_length: Any, sum_S: Any) -> Any:
    given = {"total_length": total_length, "sum_S": sum_S}
    totals = [integer(op, name, n) for name, n in given.items() if n is not None]
    if len(totals) == 2 and not totals[0] == totals[1]:
        raise errors.bad_value(
            op,
            f"total_length={totals[0]} and sum_S={totals[1]}",
            "one total",
            "Leave one out: they are two names of the same.",
        )
    return totals[0] if totals else None


def _structure_of(
    op: str, padded: Tensor, lengths: Tensor | Sequence[int] | None, offsets: Tensor | None
) -> Structure:
    if offsets is not None:
        _check_vector(op, "offsets", offsets, padded)
        if offsets.shape[0] == 0:
            raise errors.bad_shape(op, "empty offsets", "(B + 1,) offsets", "Pass x.offsets().")
        return Structure.find(offsets)
    if not isinstance(lengths, Tensor):
        return Structure.from_lengths(integers(op, "lengths", lengths), padded.device, op=op)
    if lengths.dim() == 1 and lengths.dtype in DTYPES:
        if not _compat.is_fake(lengths) and lengths.device.type == "cpu":
            # host lengths keep every later question away from the device
            return Structure.from_lengths(lengths.tolist(), padded.device, op=op)
        lengths = lengths.long()
    _check_vector(op, "lengths", lengths, padded)
    return Structure.find(_offsets_from(lengths))


def _from_mask(op: str, padded: Tensor, mask: Tensor, ragged_dim: int) -> NestedTensor:
    batch, width = padded.shape[0], padded.shape[ragged_dim]
    if not isinstance(mask, Tensor):
        raise errors.bad_type(
            op,
            f"mask of type {type(mask).__name__}",
            "a bool tensor",
            "Wrap it: torch.tensor(mask).",
        )
    if mask.dtype is not torch.bool or mask.shape != (batch, width):
        raise errors.bad_shape(
            op,
            f"mask {tuple(mask.shape)} of {mask.dtype} for padded {tuple(padded.shape)}",
            f"a bool mask ({batch}, {width})",
            "Compare lengths: torch.arange(S) < lengths[:, None].",
        )
    rows = padded.movedim(ragged_dim, 1)
    packed = rows[mask].movedim(0, ragged_dim - 1)
    structure = Structure.find(_offsets_from(mask.sum(1)))
    return bridge.wrap(packed, structure, ragged_dim)


@_compat.one_node
def narrow(
    tensor: Tensor,
    dim: int,
    start: int | Tensor,
    length: int | Tensor,
    layout: torch.layout | None = None,
) -> NestedTensor:
    """Makes a nested tensor that is a view of a piece of each row of a dense tensor.

    Args:
        tensor: dense (B, S, *).
        dim: 1.
        start, length: (B,) integers, tensor or list, or one number for all rows.
        layout: torch.jagged or None; another is refused.
    Returns:
        (B, j1, *), sharing memory with `tensor`; what is left out of each row becomes a gap.
    Raises:
        RuntimeError: a piece leaves its row; another dim; starts or lengths of another shape or dtype.
        TypeError: `tensor` is not dense; a start or length that is no integer.

    >>> x = njt.narrow(torch.arange(6).view(2, 3), 1, torch.tensor([0, 1]), torch.tensor([2, 2]))
    >>> x.unbind()
    (tensor([0, 1]), tensor([4, 5]))
    """
    _check_layout("narrow", layout)
    _check_dense("narrow", "tensor", tensor, "Use x.unbind().")
    dim = integer("narrow", "dim", dim)
    if tensor.dim() < 2 or dim not in (1, 1 - tensor.dim()):
        raise errors.bad_shape(
            "narrow",
            f"dim={dim} for {errors.describe(tensor)}",
            "dim=1 of a dense (B, S, *)",
            "Transpose the dim to narrow to position 1.",
        )
    batch, width = tensor.shape[:2]
    begins = _per_row("narrow", "start", start, batch, tensor.device)
    counts = _per_row("narrow", "length", length, batch, tensor.device)
    row_starts = torch.arange(batch + 1, device=tensor.device) * width
    offsets = row_starts + torch.nn.functional.pad(begins, (0, 1))
    structure = Structure.find(offsets, counts)
    readable = not structure.is_traced and tensor.device.type == "cpu"
    if readable and bool(((begins < 0) | (counts < 0) | (begins + counts > width)).any()):
        raise errors.bad_shape(
            "narrow",
            f"start {begins.tolist()} and length {counts.tolist()} in rows of {width}",
            "pieces inside their rows",
            "Cut the lengths: length.clamp(max=S - start).",
        )
    return bridge.nested_view(tensor.flatten(0, 1), structure)


def _per_row(op: str, name: str, value: Any, batch: Any, device: torch.device) -> Tensor:
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = torch.tensor(integers(op, name, value), dtype=torch.int64)
    if not isinstance(value, Tensor):
        return torch.full((batch,), integer(op, name, value), device=device, dtype=torch.int64)
    if value.dtype not in DTYPES or value.shape not in ((), (batch,)):
        raise errors.bad_shape(
            op,
            f"{name} {tuple(value.shape)} of {value.dtype}",
            f"integers ({batch},), one for each row",
            f"Pass {name}.long() of that shape, or one number for all rows.",
        )
    return value.to(device=device, dtype=torch.int64).expand(batch)


@_compat.one_node
def masked_select(tensor: Tensor, mask: Tensor) -> NestedTensor:
    """Makes a nested tensor of the elements of each row where the mask is True.

    Args:
        tensor: dense (B, S).
        mask: bool, broadcastable to (B, S).
    Returns:
        (B, j1), new memory.
    Raises:
        RuntimeError: wrong shape or dtype of the mask.
        TypeError: one of the two is not dense.

    >>> njt.masked_select(torch.arange(4).view(2, 2), torch.tensor([[True, True], [False, True]])).unbind()
    (tensor([0, 1]), tensor([3]))
    """
    op = "masked_select"
    _check_dense(op, "tensor", tensor, "Mask the components: [c[m] for c, m in zip(x, mask)].")
    _check_dense(op, "mask", mask, "Pad it first: njt.to_padded_tensor(mask, False).")
    if tensor.dim() < 2:
        raise errors.bad_shape(
            op, errors.describe(tensor), "a dense (B, S)", "Add a dim: x.unsqueeze(0)."
        )
    full = mask
    if mask.dim() <= 2 and all(
        n in (1, m) for n, m in zip(reversed(mask.shape), (tensor.shape[1], tensor.shape[0]))
    ):
        full = mask.expand(tensor.shape[:2])
    return _from_mask(op, tensor, full, 1)
