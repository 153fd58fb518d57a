"""The softmax family over features and over the ragged dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import njt
from tests.reference import Case, check_against_components, grid, run_case
from tests.samples import BY_NAME, STRUCTURES, Layout, sample

# the loop's side sees dense components, which don't know their ragged dim
RAGGED = [1]


def over(f: Callable[..., Any], where: str, **options: Any) -> Callable[[Tensor], Any]:
    """`f` over the ragged dim ("r") or the last dim ("f")."""
    return lambda x: f(x, dim=RAGGED[0] if where == "r" else x.dim() - 1, **options)


TWICE = {"gradgrad": True}
CASES = [
    Case(f"{name}{where}", over(f, where), options=options)
    for where in "rf"
    for name, f, options in (
        ("softmax ", torch.softmax, TWICE),
        ("log_softmax ", F.log_softmax, TWICE),
        ("softmin ", F.softmin, {}),
        ("normalize ", F.normalize, {}),
    )
] + [
    Case("method", lambda x: x.softmax(-1)),
    Case("functional", lambda x: F.softmax(x, -1, 3, torch.float64)),
    Case("with dtype", over(torch.softmax, "r", dtype=torch.float64)),
    Case("special", lambda x: torch.special.log_softmax(x, -1)),
    Case("half", over(torch.softmax, "r"), dtype=torch.bfloat16),
    Case("normalize 1", over(F.normalize, "r", p=1.0)),
    Case("renorm", lambda x: torch.renorm(x, 2, 2, 0.5), features=(3,)),
    Case("renorm a component", lambda x: torch.renorm(x, 2, 0, 0.5), options={"grad": False}),
]


def alike(x: Tensor) -> list[Tensor]:
    values = torch.rand_like(x.values()) + 0.5
    return [
        njt.nested_tensor_from_jagged(values, x.offsets(), x.lengths(), jagged_dim=x.ragged_dim)
    ]


PAIRS = [
    Case(
        "cosine_similarity features", lambda x, y: F.cosine_similarity(x, y, dim=-1), others=alike
    ),
    Case(
        "cosine_similarity ragged",
        lambda x, y: F.cosine_similarity(x, y, dim=RAGGED[0]),
        others=alike,
    ),
    Case(
        "to a dense one",
        lambda x, y: F.cosine_similarity(x, y, dim=-1),
        others=lambda x: [torch.rand(4)],
    ),
]


def run(case: Case, layout: Layout, **options: Any) -> None:
    RAGGED[0] = layout.ragged_dim
    run_case(case, layout, **options)


@grid(CASES)
def test_over_a_dim(case: Case, layout: Layout) -> None:
    run(case, layout)


@grid(PAIRS)
def test_two_operands(case: Case, layout: Layout) -> None:
    run(case, layout)


@pytest.mark.parametrize("case", [*CASES[:8], PAIRS[0], PAIRS[1]], ids=str)
@pytest.mark.parametrize("name", ["usual", "gaps", "transposed"])
def test_compiled(case: Case, name: str) -> None:
    run(case, BY_NAME[name], compiled=True)


@pytest.mark.parametrize("layout", STRUCTURES, ids=str)
@pytest.mark.parametrize("f", [torch.softmax, F.log_softmax, F.softmin], ids=lambda f: f.__name__)
def test_batch_is_refused(f: Callable[..., Any], layout: Layout) -> None:
    with pytest.raises(RuntimeError, match="Expected another dim than the batch dim"):
        f(sample(layout), dim=0)


def test_no_dim_is_refused() -> None:
    with pytest.raises(TypeError, match="no dim"):
        F.softmax(sample())


def test_out_of_range() -> None:
    with pytest.raises(IndexError, match="Dimension out of range"):
        torch.softmax(sample(), 3)


@pytest.mark.parametrize("layout", STRUCTURES, ids=str)
@pytest.mark.parametrize("where", ["r", "f"])
@pytest.mark.parametrize("hard", [False, True])
def test_gumbel_softmax(where: str, hard: bool, layout: Layout) -> None:
    """A distribution over the dim; where hard, one-hot with the gradient of the soft one."""
    x = sample(layout, requires_grad=True)
    dim = layout.ragged_dim if where == "r" else -1
    out = F.gumbel_softmax(x, tau=0.7, hard=hard, dim=dim)
    assert out.structure is x.structure
    for c in out.unbind():
        if c.numel():
            total = c.sum(dim - 1 if where == "r" else -1)
            torch.testing.assert_close(total, torch.ones_like(total))
            if hard:
                assert set(c.unique().tolist()) <= {0.0, 1.0} or c.allclose(c.round())
    weight = torch.randn_like(x)
    if out.numel():
        (out * weight).sum().backward()


def test_below_autograd() -> None:
    """cross_entropy and others reach aten::_softmax from C++, with its own derivative."""
    x, aten = sample(requires_grad=True), torch.ops.aten
    for dim in (1, 2):
        with torch._C.DisableTorchFunctionSubclass():
            out = aten._log_softmax.default(x, dim, False)
            again = aten._softmax.default(x, dim, False)
        torch.testing.assert_close(out.values(), torch.log_softmax(x, dim).values())
        torch.testing.assert_close(again.values(), torch.softmax(x, dim).values())
        weight = torch.randn_like(x.values())
        ours, theirs = (
            torch.autograd.grad((o.values() * weight).sum(), x)[0].values()
            for o in (out, torch.log_softmax(x, dim))
        )
        torch.testing.assert_close(ours, theirs)


def test_second_operand_of_equal_lengths() -> None:
    x, y = sample(), sample(BY_NAME["int32 offsets"])
    check_against_components(lambda a, b: F.cosine_similarity(a, b, dim=-1), x, y)
