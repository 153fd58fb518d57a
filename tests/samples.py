"""The structures that every operator is tried on, and nested tensors made from them.

Rows in gaps hold NaN (integers: the largest), so that reading one shows in values or gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

import njt


@dataclass(frozen=True)
class Layout:
    """Component lengths, and how they lie in memory.

    Feature dims of a sample always trail the ragged dim; one of size `d + 1` is put before it for each
    dim `d` in 1..ragged_dim - 1. Its shape is (B, 2, .., j1, *features).
    """

    name: str
    lengths: tuple[int, ...]
    ragged_dim: int = 1
    gaps: bool = False  # rows before, between and after the components that belong to none
    transposed: bool = False  # ragged dim 2, got by transposing a tensor of ragged dim 1
    strided: bool = False  # values are every second element of a larger tensor
    offsets_dtype: torch.dtype = torch.int64
    bounds: bool = True  # min_seqlen and max_seqlen are given

    def __str__(self) -> str:
        return self.name

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each component begins, and where the last one ends (with gaps: one row later)."""
        gap = 1 if self.gaps else 0
        return tuple(accumulate((n + gap for n in self.lengths), initial=gap))

    @property
    def rows(self) -> int:
        """Rows of values along the ragged dim."""
        return self.starts[-1] + (1 if self.gaps else 0)


USUAL = Layout("usual", (3, 1, 4))
STRUCTURES = [
    USUAL,
    Layout("one component", (5,)),
    Layout("equal lengths", (3, 3)),
    Layout("empty components", (0, 3, 0, 2, 0)),
    Layout("all empty", (0, 0)),
    Layout("no component", ()),
    Layout("gaps", (2, 0, 3), gaps=True),
    Layout("ragged dim 2", (3, 1, 4), ragged_dim=2),
    Layout("ragged dim 3", (2, 3), ragged_dim=3),
    Layout("ragged dim 2 with gaps", (2, 3), ragged_dim=2, gaps=True),
    Layout("transposed", (3, 1, 4), ragged_dim=2, transposed=True),
    Layout("strided values", (3, 1, 4), strided=True),
    Layout("int32 offsets", (3, 1, 4), offsets_dtype=torch.int32),
    Layout("bounds unknown", (3, 1, 4), bounds=False),
]
BY_NAME = {layout.name: layout for layout in STRUCTURES}


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Distinct, moderate, no exact zero: ties and poles would make an operator's answer a matter of taste."""
    count = torch.Size(shape).numel()
    order = torch.randperm(count, device=device).reshape(shape)
    if dtype is torch.bool:
        return order % 2 == 0
    if not (dtype.is_floating_point or dtype.is_complex):
        return order.remainder(100).sub(50).to(dtype)
    real = (order + 0.5) / max(count, 1) * 4 - 2
    if dtype.is_complex:
        return torch.complex(real, real.flip(0) / 3).to(dtype)
    return real.to(dtype)


def filler(dtype: torch.dtype) -> float | int | bool:
    """What rows in gaps hold."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def sample(
    layout: Layout = USUAL,
    features: tuple[int, ...] = (4,),
    dtype: torch.dtype = torch.float32,
    *,
    device: str = "cpu",
    requires_grad: bool = False,
    positive: bool = False,
) -> njt.NestedTensor:
    """A nested tensor (B, [2, [3,]] j1, *features) of this layout.

    With `requires_grad` the result is no leaf: its values are, and collect the gradient.
    """
    before = tuple(range(2, layout.ragged_dim + 1))
    if layout.transposed:  # (B, j1, 2, *features), turned at the end
        shape, rows_dim = (layout.rows, *before, *features), 0
    else:
        shape, rows_dim = (*before, layout.rows, *features), len(before)
    values = _numbers((*shape, 2) if layout.strided else shape, dtype, device)
    if layout.strided:
        values = values[..., 0]
    if positive:
        values = values.abs()
    lengths = None
    if layout.gaps:
        used = [s + t for s, n in zip(layout.starts, layout.lengths) for t in range(n)]
        unused = [row for row in range(layout.rows) if row not in used]
        values.index_fill_(rows_dim, torch.tensor(unused, device=device), filler(dtype))
        lengths = torch.tensor(layout.lengths, dtype=layout.offsets_dtype, device=device)
    offsets = torch.tensor(layout.starts, dtype=layout.offsets_dtype, device=device)
    known = layout.bounds and layout.lengths
    x = njt.nested_tensor_from_jagged(
        values.requires_grad_(requires_grad),
        offsets,
        lengths,
        jagged_dim=rows_dim + 1,
        min_seqlen=min(layout.lengths) if known else None,
        max_seqlen=max(layout.lengths) if known else None,
    )
    return x.transpose(1, 2) if layout.transposed else x


def components(x: Tensor) -> list[Tensor]:
    """Copies of the components of a nested tensor, cut by hand: no operator of ours decides what is right."""
    starts = x.offsets().tolist()
    lengths = x.lengths()
    sizes = [b - a for a, b in pairwise(starts)] if lengths is None else lengths.tolist()
    values = x.values().detach()
    return [values.narrow(x.ragged_dim - 1, a, n).clone() for a, n in zip(starts, sizes)]


lengths_strategy = st.lists(st.integers(0, 6), min_size=0, max_size=5).map(tuple)
features_strategy = st.lists(st.integers(1, 4), min_size=0, max_size=2).map(tuple)


@st.composite
def layouts(draw: st.DrawFn, *, gaps: bool = True, max_ragged_dim: int = 3) -> Layout:
    """Any structure there is."""
    ragged_dim = draw(st.integers(1, max_ragged_dim))
    return Layout(
        name="drawn",
        lengths=draw(lengths_strategy),
        ragged_dim=ragged_dim,
        gaps=gaps and draw(st.booleans()),
        transposed=ragged_dim == 2 and draw(st.booleans()),
        strided=draw(st.booleans()),
        offsets_dtype=draw(st.sampled_from([torch.int64, torch.int32])),
        bounds=draw(st.booleans()),
    )
