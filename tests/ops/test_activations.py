"""Activations with structure: glu, prelu, rrelu, and some that torch composes itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import njt
from tests.reference import Case, grid, run_case
from tests.samples import BY_NAME, STRUCTURES, USUAL, components, sample

CASES = [
    Case("glu", F.glu),
    Case("glu, dim", lambda x: F.glu(x, -2), features=(2, 3)),
    Case("prelu, one slope", F.prelu, lambda x: (torch.tensor([0.3]),)),
    Case("rrelu in eval", F.rrelu),
    Case("logsigmoid", F.logsigmoid),
    Case("softmin", lambda x: F.softmin(x, -1)),
    Case("softsign", F.softsign),
    Case("tanhshrink", F.tanhshrink),
    Case("selu", F.selu),
    Case("threshold", lambda x: F.threshold(x, 0.1, 20.0)),
]
CHANNELS = [Case("prelu", F.prelu, lambda x: (torch.rand(2),))]


@grid(CASES)
def test_equals_loop(case: Case, layout: object) -> None:
    run_case(case, layout)


@grid(CHANNELS, [s for s in STRUCTURES if s.ragged_dim > 1 and not s.transposed])
def test_channels(case: Case, layout: object) -> None:
    run_case(case, layout)


@pytest.mark.parametrize("name", ["usual", "gaps", "ragged dim 2"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled(case: Case, name: str) -> None:
    run_case(case, BY_NAME[name], compiled=True)


def test_softmin_over_rows() -> None:
    x = sample(USUAL)
    for a, b in zip(components(F.softmin(x, 1)), components(x)):
        torch.testing.assert_close(a, F.softmin(b, 0))


def test_rrelu_draws_slopes() -> None:
    x = njt.nested_tensor([-torch.ones(50), -torch.ones(30)])
    out = F.rrelu(x, 0.1, 0.3, training=True).values()
    assert out.std() > 0.01
    assert ((out >= -0.3) & (out <= -0.1)).all()
    y = x.clone()
    assert F.rrelu(y, 0.1, 0.3, training=False, inplace=True) is y
    torch.testing.assert_close(y.values(), torch.full((80,), -0.2))


def test_ragged_channels_are_refused() -> None:
    with pytest.raises(RuntimeError, match="the ragged dim"):
        F.prelu(sample(USUAL), torch.rand(3))
