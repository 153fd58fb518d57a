"""Running sums, products and extremes over features and over the ragged dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference import Case, grid, run_case
from tests.samples import BY_NAME, STRUCTURES, Layout, sample

# the loop's side sees dense components, which don't know their ragged dim
RAGGED = [1]


def over(f: Callable[..., Any], where: str, **options: Any) -> Callable[[Tensor], Any]:
    """`f` over the ragged dim ("r") or the last dim ("f")."""
    return lambda x: f(x, dim=RAGGED[0] if where == "r" else x.dim() - 1, **options)


TWICE = {"gradgrad": True}
NAMES = ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
CASES = [
    *(Case(f"{name} {where}", over(getattr(torch, name), where), options=TWICE) for where in "rf" for name in NAMES),
    Case("cumsum int", over(torch.cumsum, "r"), dtype=torch.int32),
    Case("cumsum bool", over(torch.cumsum, "r"), dtype=torch.bool),
    Case("cumsum to double", over(torch.cumsum, "r", dtype=torch.float64)),
    Case("cumprod int", over(torch.cumprod, "r"), dtype=torch.int64),
    Case("cummax int", over(torch.cummax, "r"), dtype=torch.int64),
    Case("cumsum half", over(torch.cumsum, "r"), dtype=torch.bfloat16),
    Case("method", lambda x: x.cumsum(-1)),
    Case("by name", lambda x: torch.cumsum(input=x, dim=-1)),
    Case("in place", lambda x: (x * 1).cumsum_(x.dim() - 1)),
]  # fmt: skip
NEW = {"new_structure": True}
DIFFS = [
    Case("diff r", over(torch.diff, "r"), options=NEW | TWICE),
    Case("diff f", over(torch.diff, "f"), options=TWICE),
    Case("diff by default", torch.diff),
    Case("diff twice r", over(torch.diff, "r", n=2), options=NEW),
    Case("diff of nothing", over(torch.diff, "r", n=0)),
    Case("diff bool", over(torch.diff, "r"), dtype=torch.bool, options=NEW),
    Case("diff int", lambda x: x.diff(1, RAGGED[0]), dtype=torch.int32, options=NEW),
    *(Case(f"diff with ends {w}", lambda x, a, b, w=w: over(torch.diff, w, prepend=a, append=b)(x),
           lambda x: (x * 2, x * 3), options=NEW) for w in "rf"),
]  # fmt: skip


def run(case: Case, layout: Layout, **options: Any) -> None:
    RAGGED[0] = layout.ragged_dim
    run_case(case, layout, **options)


@grid(CASES)
def test_over_a_dim(case: Case, layout: Layout) -> None:
    run(case, layout)


@grid(DIFFS)
def test_diff(case: Case, layout: Layout) -> None:
    run(case, layout)


def test_diff_over_the_batch_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Expected another dim than the batch dim"):
        sample().diff(dim=0)


@pytest.mark.parametrize("case", [*CASES[:10], *DIFFS[:2]], ids=str)
@pytest.mark.parametrize("name", ["usual", "gaps", "transposed"])
def test_compiled(case: Case, name: str) -> None:
    run(case, BY_NAME[name], compiled=True)


@pytest.mark.parametrize("layout", STRUCTURES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_batch_is_refused(name: str, layout: Layout) -> None:
    with pytest.raises(RuntimeError, match="Expected another dim than the batch dim"):
        getattr(torch, name)(sample(layout), dim=0)


def test_named_tuples() -> None:
    x = sample()
    for dim in (1, 2):
        assert type(torch.cummax(x, dim)) is torch.return_types.cummax
        assert type(x.cummin(dim)) is torch.return_types.cummin


@pytest.mark.parametrize("layout", STRUCTURES, ids=str)
def test_in_place_leaves_gaps_alone(layout: Layout) -> None:
    x = sample(layout)
    wanted = [c.clone().cumsum_(layout.ragged_dim - 1) for c in x.unbind()]
    before = x.values().clone()
    assert x.cumsum_(layout.ragged_dim) is x
    for got, w in zip(x.unbind(), wanted):
        torch.testing.assert_close(got, w)
    assert torch.equal(before.isnan(), x.values().isnan())
