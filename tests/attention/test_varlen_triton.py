"""The Triton kernels of attention over packed rows against the loop; interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from njt.attention import varlen_backends, varlen_triton
from njt.attention.varlen import varlen_attention
from njt.attention.varlen_triton import Tiling
from tests.attention.test_varlen import BATCHES, Batch, check, inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ["usual", "empty ones", "no sequence", "gaps", "cross with gaps", "queries without keys"]
NAMES += ["keys without queries", "int32", "all empty"]


def run(batch: Batch, causal: bool, gqa: bool = False, **sizes: int) -> None:
    x = inputs(batch, dtype=torch.float32, **sizes)
    x = [t.detach().to(DEVICE).requires_grad_() for t in x]
    with varlen_backends.force("triton"):
        check(varlen_attention, batch, x, gqa=gqa, is_causal=causal)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", NAMES)
def test_equals_loop(name: str, causal: bool) -> None:
    run(BATCHES[name], causal, heads=2, heads_k=2)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("blocks", [(16, 16), (16, 32), (32, 16)])
def test_several_tiles_a_sequence(
    monkeypatch: pytest.MonkeyPatch, blocks: tuple[int, int], causal: bool
) -> None:
    """Lengths at, below and above the edge of a tile, queries and keys of other lengths, shared keys."""
    for kernel in varlen_triton.TILINGS:
        monkeypatch.setitem(varlen_triton.TILINGS, kernel, Tiling(*blocks, 4, 1))
    batch = Batch((32, 1, 0, 45, 16), (17, 33, 5, 16, 40))
    run(batch, causal, gqa=True, heads=2, heads_k=1, width=20, width_v=20)


def test_tiles_name_every_row_once() -> None:
    offsets = torch.tensor([0, 5, 5, 40, 41])
    side = varlen_triton._make_side(offsets, None, 41, 16)
    named = [
        (b, row)
        for b, first in side.tiles.tolist()
        if b >= 0
        for row in range(first, min(first + 16, int(side.lengths[b])))
    ]
    assert sorted(named) == [(b, i) for b in range(4) for i in range(int(side.lengths[b]))]


def test_operator_is_well_formed() -> None:
    offsets, more = BATCHES["usual"].arguments(DEVICE)
    x = [t.detach().to(DEVICE) for t in inputs(BATCHES["usual"], dtype=torch.float32)]
    torch.library.opcheck(
        torch.ops.njt.varlen_attention,
        (*x, *offsets, *more.values(), False, 0.3, 0.0, "triton"),
        test_utils=("test_schema", "test_faketensor"),
    )
