"""Joining and repeating: features, rows of every component, components."""

from __future__ import annotations

import pytest
import torch

import njt
from tests.reference import Case, PerComponent, grid, run_case
from tests.samples import BY_NAME, STRUCTURES, components, sample

NEW = {"new_structure": True}
CASES = [
    Case("cat features", lambda x, y: torch.cat([x, y, x], -1), lambda x: (x * 2,)),
    Case("stack last", lambda x, y: torch.stack([x, y], -1), lambda x: (x * 2,)),
    Case("repeat features", lambda x: x.repeat(*[1] * (x.dim() - 1), 2)),
    Case("tile", lambda x: torch.tile(x, (2,))),
    Case("repeat_interleave features", lambda x: x.repeat_interleave(2, -1)),
]
ROWS = [
    Case("cat rows", lambda x, y: torch.cat([x, y, x], 1), lambda x: (x * 2,), options=NEW),
    Case("hstack", lambda x, y: torch.hstack([x, y]), lambda x: (x * 2,), options=NEW),
    Case("repeat rows", lambda x: x.repeat(1, 2, 1), options=NEW),
    Case("repeat_interleave rows", lambda x: x.repeat_interleave(2, 1), options=NEW),
    Case("cat a dense row", lambda x, t: torch.cat([t, x], 1),
         lambda x: (PerComponent(torch.rand(len(x), 1, 4)),), options=NEW, without=["no component"]),
]  # fmt: skip
DIM_1 = [s for s in STRUCTURES if s.ragged_dim == 1]


@grid(CASES, [s for s in STRUCTURES if not s.gaps])
def test_features(case: Case, layout: object) -> None:
    run_case(case, layout)


@grid(ROWS, DIM_1)
def test_rows(case: Case, layout: object) -> None:
    """b017"""
    run_case(case, layout)


@pytest.mark.parametrize("case", CASES + ROWS[:2], ids=str)
def test_compiled(case: Case) -> None:
    run_case(case, compiled=True)


@pytest.mark.parametrize("name", ["usual", "gaps", "ragged dim 2", "no component"])
def test_components(name: str) -> None:
    x = sample(BY_NAME[name])
    y = sample(BY_NAME["ragged dim 2" if name == "ragged dim 2" else "one component"])
    got = torch.cat([x, y, x])
    wanted = [*components(x), *components(y), *components(x)]
    assert len(got) == len(wanted)
    for a, b in zip(components(got), wanted):
        torch.testing.assert_close(a, b)
    twice = torch.repeat_interleave(x, 2, 0)
    assert [c.shape for c in twice] == [c.shape for c in components(x) for _ in range(2)]


def test_messages() -> None:
    x = njt.nested_tensor([torch.zeros(2, 4), torch.zeros(1, 4)])
    for call in (
        lambda: torch.stack([x, x]),
        lambda: torch.cat([x, x.transpose(1, 2)], 1),
        lambda: torch.cat([x, x[:1]], 1),
        lambda: x.repeat(2, 1, 1, 1),
    ):
        with pytest.raises(RuntimeError, match=r"\(\): got .* Expected "):
            call()
