"""Pieces of features, of the batch, and of every component."""

from __future__ import annotations

import pytest
import torch

from tests.reference import Case, grid, run_case
from tests.samples import BY_NAME, STRUCTURES, components, sample

FEATURES = [
    Case("chunk", lambda x: x.chunk(3, -1)),
    Case("split", lambda x: x.split(3, -1)),
    Case("split by list", lambda x: torch.split(x, [1, 3], dim=-1)),
    Case("split_with_sizes", lambda x: x.split_with_sizes([2, 2], -1)),
    Case("tensor_split", lambda x: torch.tensor_split(x, 3, -1)),
    Case("tensor_split at", lambda x: torch.tensor_split(x, (1, 3), -1)),
    Case("unbind", lambda x: x.unbind(-1)),
]
ROWS = [
    Case("tensor_split rows", lambda x: torch.tensor_split(x, 2, 1), options={"new_structure": True}),
    Case("tensor_split rows at", lambda x: torch.tensor_split(x, (1, -1), 1), options={"new_structure": True}),
]  # fmt: skip


@grid(FEATURES)
def test_features(case: Case, layout: object) -> None:
    """A2, b033: pieces alias the storage of the whole."""
    run_case(case, layout, view=bool(layout.rows))  # type: ignore[attr-defined]


@grid(ROWS, [s for s in STRUCTURES if s.ragged_dim == 1])
def test_rows(case: Case, layout: object) -> None:
    run_case(case, layout)


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_compiled(case: Case) -> None:
    run_case(case, compiled=True)


@pytest.mark.parametrize("layout", [s for s in STRUCTURES if s.lengths], ids=str)
@pytest.mark.parametrize(
    "cut", [lambda x: x.chunk(2), lambda x: x.split(1), lambda x: torch.tensor_split(x, 3)]
)
def test_batch(cut: object, layout: object) -> None:
    x = sample(layout)  # type: ignore[arg-type]
    parts = components(x)
    numbers = cut(torch.arange(len(parts)))  # type: ignore[operator]
    pieces = cut(x)  # type: ignore[operator]
    assert len(pieces) == len(numbers)
    for piece, which in zip(pieces, numbers):
        assert len(piece) == len(which)
        assert piece.max_seqlen == max((layout.lengths[i] for i in which), default=0)  # type: ignore[attr-defined]
        for got, i in zip(components(piece), which):
            torch.testing.assert_close(got, parts[i])


def test_other_numbers_of_pieces() -> None:
    with pytest.raises(RuntimeError, match=r"split\(\): got 2 along the ragged dim"):
        sample(BY_NAME["usual"]).split(2, 1)


def test_batch_compiled() -> None:
    """Runs of components are cut in a graph without a look at the lengths."""
    x = sample()
    pieces = torch.compile(lambda x: x.chunk(2), backend="aot_eager", fullgraph=True)(x)
    for piece, wanted in zip(pieces, x.chunk(2), strict=True):
        for got, c in zip(components(piece), components(wanted), strict=True):
            torch.testing.assert_close(got, c)
