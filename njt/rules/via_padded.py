"""Operators over a window of the ragged dim, as one dense call on the batch laid out with room between components.

`Spaced` puts the components one behind the other with rows of filler between them, so that no window reaches a
neighbour and memory grows with the rows, not with the longest component. Right only where filler is neutral:
each declaration says why. Batch dim: untouched. Gaps: not read. Ragged dim: any, moved by the caller.
May import bridge, tensor, structure, errors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from njt import bridge, errors
from njt.structure import Structure
from njt.tensor import NestedTensor


def out_length(
    length: Any, kernel: int, stride: int, padding: tuple[int, int], dilation: int
) -> Any:
    """Windows along a dim, as dense torch counts them without ceil_mode; also for a tensor of lengths."""
    reach = dilation * (kernel - 1) + 1
    spare = length + padding[0] + padding[1] - reach
    if isinstance(spare, Tensor):
        return torch.div(spare, stride, rounding_mode="floor") + 1
    return spare // stride + 1


class Spaced:
    """The rows of a nested tensor with room for one kernel's padding around each component.

    Attributes:
        structure: of the result, one row a window of each component.
    """

    def __init__(
        self,
        op: str,
        x: NestedTensor,
        kernel: int,
        stride: int,
        padding: tuple[int, int],
        dilation: int,
    ) -> None:
        self.x = x
        self.d = x._ragged_dim - 1
        structure = x._structure
        window = (kernel, stride, padding, dilation)
        same = stride == 1 and out_length(0, *window) == 0
        if not same and structure.is_traced:
            raise errors.unsupported(
                op,
                "windows that change the lengths, in a compiled graph",
                "stride=1 and padding that keeps them",
                'Use padding="same", or run this layer in eager mode.',
            )
        if not structure.is_traced:
            _check(op, x, window)
        self.stride = stride
        # room before and behind each component, so that starts are multiples of the stride
        self.before, self.behind = padding
        self.structure = structure.compact() if same else _windows(structure, window)
        self.same = same
        self.reach = dilation * (kernel - 1) + 1
        # a window of one row reaches no neighbour: rows stay as they are
        self.alone = same and self.reach == 1 and not any(padding)
        # behind the last row, for a dense call that wants one window at least
        self.spare = 1 if structure.is_traced or not x._values.shape[self.d] else 0

    def rows(self, filler: float = 0.0) -> Tensor:
        """The spaced rows, differentiable: the ragged dim of the values becomes longer."""
        packed, d = bridge.compact_values(self.x), self.d
        if self.alone:
            if not self.spare:
                return packed
            shape = [*packed.shape[:d], self.spare, *packed.shape[d + 1 :]]
            return torch.cat([packed, packed.new_full(shape, filler)], d)
        index, total = self._places(packed.shape[d])
        shape = [*packed.shape[:d], total, *packed.shape[d + 1 :]]
        return packed.new_full(shape, filler).index_copy(d, index, packed)

    def back(self, windows: Tensor, dim: int) -> NestedTensor:
        """The windows that belong to components, of all along `dim`, as a nested tensor like the input."""
        x = self.x
        if self.alone:
            out = windows.narrow(dim, 0, self._rows_of()) if self.spare else windows
        else:
            out = windows.index_select(dim, self._window_index())
        if self.same:
            out = bridge.spread(out, x._structure, x._values.shape[self.d], dim)
            return bridge.wrap(out, x._structure, dim + 1, x)
        return bridge.wrap(out, self.structure, dim + 1, x)

    def _ids(self, structure: Structure, total: Any) -> Tensor:
        """(total,) the component of each row of a structure without gaps."""
        rows = torch.arange(total, device=structure.offsets.device)
        return torch.bucketize(rows, structure.offsets[1:].long(), right=True)

    def _starts(self) -> tuple[Tensor, Any]:
        """(B,) the first spaced row of each component's windows, and how many spaced rows there are."""
        compact = self.x._structure.compact()
        if self.stride == 1:
            # what is behind one component is before the next
            room, count = max(self.before, self.behind), compact.batch_size
            places = torch.arange(count, device=compact.offsets.device)
            starts = compact.offsets[:-1].long() + places * room
            rows, least = self._rows_of() + count * room, min(self.before, self.behind)
            # room for one window, even in an empty batch
            if compact.is_traced:
                return starts, rows + max(least, self.reach)
            return starts, max(rows + least, self.reach)
        room = self.before + self.behind
        sizes = compact.seqlens.long() + room
        sizes = torch.div(sizes + self.stride - 1, self.stride, rounding_mode="floor") * self.stride
        ends = sizes.cumsum(0)
        return ends - sizes, (int(ends[-1]) if len(ends) else 0) + self.reach

    def _rows_of(self) -> Any:
        structure = self.x._structure
        return structure.total_length if structure.has_gaps else self.x._values.shape[self.d]

    def _places(self, rows: Any) -> tuple[Tensor, Any]:
        """Where each packed row goes."""
        compact = self.x._structure.compact()
        starts, total = self._starts()
        ids = self._ids(compact, rows)
        place = torch.arange(rows, device=ids.device) - compact.offsets[:-1].long()[ids]
        return starts[ids] + self.before + place, total

    def _window_index(self) -> Tensor:
        """The windows that belong to components."""
        structure = self.structure
        count = self._rows_of() if self.same else structure.total_length
        starts, _ = self._starts()
        ids = self._ids(structure, count)
        place = torch.arange(count, device=ids.device) - structure.offsets[:-1].long()[ids]
        return torch.div(starts, self.stride, rounding_mode="floor")[ids] + place


def _windows(structure: Structure, window: tuple[Any, ...]) -> Structure:
    """The structure of one row a window."""
    key = f"windows {window}"
    return structure.derived(
        key,
        lambda: Structure.from_lengths(
            [out_length(n, *window) for n in structure.host_lengths()], structure.offsets.device
        ),
    )


def _check(op: str, x: NestedTensor, window: tuple[Any, ...]) -> None:
    """As dense torch, a component too short for one window is an error; only an empty one may stay empty."""
    structure = x._structure
    if structure.batch_size and out_length(structure.min_seqlen, *window) < min(
        structure.min_seqlen, 1
    ):
        kernel, _, padding, dilation = window
        raise errors.bad_shape(
            op,
            f"{errors.describe(x)} with a component of length {structure.min_seqlen}",
            f"at least {dilation * (kernel - 1) + 1 - sum(padding)} rows for a window of {kernel}",
            "Leave short components out, or pad.",
        )
