"""The rectangle: `to_padded_tensor` in all its guises runs the package's own kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from njt import _compat, bridge, errors
from njt.kernels import padding as padding_kernels
from njt.kernels import padding_filler
from njt.registry import declare_function, declare_named
from njt.structure.integers import integers
from njt.tensor import NestedTensor


@_compat.one_node
def to_padded_tensor(
    x: NestedTensor,
    padding: float,
    output_size: Sequence[int] | None = None,
    padding_side: str = "right",
) -> Tensor:
    """Copies every component into a rectangle, filling what is left with `padding`.

    Args:
        x: nested, (B, j1, *), any dtype, any ragged dim; rows in gaps are not copied.
        padding: filler, a number that the dtype of `x` holds; floating dtypes round it once.
        output_size: full size of the result; -1 keeps the own size. Default: as wide as the longest component.
        padding_side: "right" or "left".
    Returns:
        (B, max_seqlen, *), new memory. Its gradient flows to the copied rows only; a smaller ragged
        entry of `output_size` cuts components, whose cut rows get gradient 0.
    Raises:
        RuntimeError: `output_size` has another rank, another batch or feature size, or a negative entry; an
            integer dtype does not hold `padding`.
        ValueError: another padding_side.

    >>> njt.to_padded_tensor(njt.nested_tensor([torch.ones(2), torch.ones(1)]), 0.0)
    tensor([[1., 1.],
            [1., 0.]])
    """
    op = "to_padded_tensor"
    if padding_side not in ("left", "right"):
        raise errors.bad_value(
            op,
            f"padding_side={padding_side!r}",
            '"left" or "right"',
            "Name the side that padding is on.",
        )
    if not isinstance(x, NestedTensor):
        raise errors.bad_type(
            op,
            errors.describe(x),
            "a nested tensor of njt",
            "A list becomes one with njt.nested_tensor(x).",
        )
    structure, d = x._structure, x._ragged_dim
    padding = padding_filler.checked(op, padding, x.dtype)
    width: Any = None
    if output_size is not None:
        width = _checked_width(op, x, output_size)
    left = padding_side == "left"
    if width is None and structure.is_traced:
        return _longest_in_graph(x, padding, left)
    return padding_kernels.packed_to_padded(
        bridge.values(x),
        structure.offsets,
        structure.max_seqlen if width is None else width,
        padding,
        lengths=structure.lengths,
        values_dim=d - 1,
        left=left,
    )


def _longest_in_graph(x: NestedTensor, padding: float, left: bool) -> Tensor:
    """As wide as the longest component, cut from the bound that came into the graph.

    That bound is a size of an input and the width is not: a backward graph must be given the bound, or
    inductor can't tell where the width in the shape of its gradient comes from.
    """
    structure, d = x._structure, x._ragged_dim
    width = structure.max_seqlen
    bound = width if structure.known_max_seqlen is None else structure.longest_bound
    padded = padding_kernels.packed_to_padded(
        bridge.values(x),
        structure.offsets,
        bound,
        padding,
        lengths=structure.lengths,
        values_dim=d - 1,
        left=left,
    )
    return padded if bound is width else padded.narrow(d, bound - width if left else 0, width)


def _checked_width(op: str, x: NestedTensor, output_size: Sequence[int]) -> Any:
    """The ragged entry of `output_size`, None for -1."""
    output_size = integers(op, "output_size", output_size)
    if len(output_size) != x.dim():
        raise errors.bad_shape(
            op,
            f"output_size {tuple(output_size)} for {errors.describe(x)}",
            f"{x.dim()} entries",
            "Use -1 to keep a size.",
        )
    for d, (wanted, own) in enumerate(zip(output_size, x._size)):
        if d == x._ragged_dim:
            if isinstance(wanted, int) and wanted < -1:
                raise errors.bad_shape(
                    op,
                    f"output_size {tuple(output_size)}",
                    "sizes of 0 or more",
                    "Use -1 to keep a size.",
                )
        elif wanted not in (-1, own):
            raise errors.bad_shape(
                op,
                f"output_size {tuple(output_size)} for {errors.describe(x)}",
                f"size {own} in dim {d}",
                "Only the ragged dim can be padded; use F.pad for others.",
            )
    width = output_size[x._ragged_dim]
    return None if isinstance(width, int) and width == -1 else width


declare_named("to_padded_tensor", to_padded_tensor)
declare_function(to_padded_tensor, torch.nested.to_padded_tensor)
