"""Drawing by weight: what each component alone could give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference import Case, grid, run_case
from tests.samples import BY_NAME, STRUCTURES, Layout, components, sample

SOME = [s for s in STRUCTURES if s.lengths and min(s.lengths) and s.ragged_dim < 3]
ANY = [s for s in STRUCTURES if s.ragged_dim == 1]


def sure(draws: int, **options: Any) -> Callable[[Tensor], Tensor]:
    """Draws where all weight lies on one position, so that chance has no say."""

    def draw(x: Tensor) -> Tensor:
        weights = (x == x.amax(-1, True)).float()
        if x.is_nested:
            return torch.multinomial(weights, draws, **options)
        return torch.multinomial(weights.squeeze(0), draws, **options).unsqueeze(0)

    return draw


OVER_FEATURES = [
    Case("multinomial over features", sure(1), options={"grad": False}),
    Case("more than one", sure(3, replacement=True), options={"grad": False}),
]
OVER_ROWS = [
    Case("multinomial over rows", sure(1), features=(), options={"grad": False}),
    Case("rows more than once", sure(3, replacement=True), features=(), options={"grad": False}),
]


@grid(OVER_FEATURES, ANY)
def test_over_features(case: Case, layout: Layout) -> None:
    run_case(case, layout)


@grid(OVER_ROWS, SOME)
def test_over_rows(case: Case, layout: Layout) -> None:
    run_case(case, layout)


@pytest.mark.parametrize("case", [OVER_FEATURES[0], OVER_ROWS[0]], ids=str)
def test_compiled(case: Case) -> None:
    run_case(case, compiled=True)


def test_all_without_replacement() -> None:
    """As many as there are: each position once; padding is never drawn."""
    x = sample(BY_NAME["equal lengths"], features=(), positive=True)
    drawn = torch.multinomial(x, 3)
    assert drawn.sort(-1).values.tolist() == [[0, 1, 2]] * 2
    y = sample(BY_NAME["gaps"], features=(5,), positive=True)
    for rows in components(torch.multinomial(y, 5)):
        assert bool((rows.sort(-1).values == torch.arange(5)).all())


def test_frequencies() -> None:
    x = sample(BY_NAME["usual"], features=(), positive=True)
    drawn = torch.multinomial(x, 4000, replacement=True, generator=torch.Generator().manual_seed(1))
    for row, weights in zip(drawn, components(x)):
        share = torch.bincount(row, minlength=len(weights)) / 4000
        torch.testing.assert_close(share, weights / weights.sum(), atol=0.05, rtol=0)


def test_too_many_draws_are_refused() -> None:
    x = sample(features=(), positive=True)
    with pytest.raises(RuntimeError, match="2 draws from a component of 1"):
        torch.multinomial(x, 2)
    with pytest.raises(RuntimeError, match="from a component of 0"):
        sample(BY_NAME["empty components"], features=(), positive=True).multinomial(1, True)
    with pytest.raises(RuntimeError, match=r"Expected \(B, j1\)"):
        torch.multinomial(sample(features=(2, 3), positive=True), 1)
