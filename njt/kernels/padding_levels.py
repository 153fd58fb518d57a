"""Two and more ragged dims at once, through a list of offsets: the copies of `padding`, level by level."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from njt.kernels.padding import packed_to_padded, padded_to_packed


def nested_to_padded(
    values: Tensor,
    offsets: Sequence[Tensor],
    widths: Sequence[int],
    padding: float = 0.0,
    *,
    left: bool = False,
) -> Tensor:
    """The innermost offsets cut rows, the outer ones cut segments.

    Args:
        values: (total_length, *post).
        offsets: outermost first; a level has one segment for each row of the level above.
        widths: size of the rectangle at each level; what is longer is cut.
        padding: filler.
        left: whether segments stand at the right end, at every level.
    Returns:
        (B, *widths, *post).
    Raises:
        RuntimeError: another number of widths than of offsets; what `packed_to_padded` refuses, at any level.

    >>> two = [torch.tensor([0, 1, 2]), torch.tensor([0, 2, 3])]
    >>> nested_to_padded(torch.tensor([1, 2, 3]), two, [1, 2]).tolist()
    [[[1, 2]], [[3, 0]]]
    """
    _check_levels("nested_to_padded", offsets, widths)
    for level, width in zip(reversed(offsets), reversed(widths)):
        values = packed_to_padded(values, level, width, padding, left=left)
    return values


def padded_to_nested(
    padded: Tensor,
    offsets: Sequence[Tensor],
    total_length: int | None = None,
    *,
    left: bool = False,
) -> Tensor:
    """The reverse of `nested_to_padded`.

    Args:
        padded: (B, *widths, *post), one width per level.
        offsets: outermost first. The totals of all levels but the last are known from the number of offsets.
        total_length: rows of the result. Default: the last offset of the innermost level, read from the device.
        left: whether segments stand at the right end, at every level.
    Returns:
        (total_length, *post).
    Raises:
        RuntimeError: no offsets, or more of them than dims; a level that doesn't fit the one above.

    >>> two = [torch.tensor([0, 1, 2]), torch.tensor([0, 2, 3])]
    >>> padded_to_nested(torch.tensor([[[1, 2]], [[3, 0]]]), two)
    tensor([1, 2, 3])
    """
    _check_levels("padded_to_nested", offsets, padded.shape[1 : len(offsets) + 1])
    totals = [level.shape[0] - 1 for level in offsets[1:]]
    for level, total in zip(offsets, [*totals, total_length]):
        padded = padded_to_packed(padded, level, total, left=left)
    return padded


def _check_levels(op: str, offsets: Sequence[Tensor], widths: Sequence[Any]) -> None:
    if not offsets or len(offsets) != len(widths):
        raise RuntimeError(
            f"{op}(): got {len(offsets)} offsets tensors and {len(widths)} widths. Expected one width "
            f"per offsets tensor, outermost first. Check the lists."
        )
    for outer, inner in itertools.pairwise(offsets):
        # on a GPU this would wait for the device
        if type(outer) is Tensor and outer.is_cpu and not torch.compiler.is_compiling():
            last, count = int(outer[-1]), inner.shape[0] - 1
            if last != count:
                raise RuntimeError(
                    f"{op}(): got a level of {last} rows over one of {count} segments. Expected as many. "
                    f"Offsets go outermost first; each segment of a level is a row of the level above."
                )
