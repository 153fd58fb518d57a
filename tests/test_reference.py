"""The oracle itself: right functions pass, and each kind of fault is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor

import njt
from tests.reference import Case, PerComponent, check_against_components, grid, run_case
from tests.samples import BY_NAME, USUAL, components, layouts, sample


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 3


def _rebuilt(x: Tensor, values: Tensor, offsets: Tensor | None = None) -> Tensor:
    return njt.nested_tensor_from_jagged(values, x.offsets() if offsets is None else offsets)


def _if_nested(
    wrong: Callable[[Tensor], Any], right: Callable[[Tensor], Any]
) -> Callable[[Tensor], Any]:
    return lambda x: wrong(x) if x.is_nested else right(x)


def _double(x: Tensor) -> Tensor:
    return x * 2


WRONG = {
    "another value": (_if_nested(lambda x: x * 2.01, _double), "component 0"),
    "one wrong component": (
        _if_nested(
            lambda x: _rebuilt(x, torch.cat([x.values()[:-1] * 2, x.values()[-1:] * 3])), _double
        ),
        "component 2",
    ),
    "no gradient": (_if_nested(lambda x: x.detach() * 2, _double), "requires_grad"),
    "wrong gradient": (
        _if_nested(lambda x: _rebuilt(x, _WrongBackward.apply(x.values())), _double),
        "gradient of operand 0",
    ),
    "another dtype": (_if_nested(lambda x: (x * 2).double(), _double), "float64"),
    "a structure of its own": (
        _if_nested(lambda x: _rebuilt(x, x.values() * 2, x.offsets().clone()), _double),
        "new structure",
    ),
    "one result too many": (_if_nested(lambda x: (x * 2, x * 2), _double), "number of results"),
    "dense for nested": (_if_nested(lambda x: (x * 2).values(), _double), "dense, of components"),
    "another answer": (_if_nested(lambda x: 2, lambda x: 3), "2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_fault_is_found(name: str) -> None:
    wrong, says = WRONG[name]
    with pytest.raises((AssertionError, RuntimeError), match=says):
        check_against_components(wrong, sample())


def test_wrong_longest_length_is_found() -> None:
    def wrong(x: Tensor) -> Tensor:
        if not x.is_nested:
            return x[:, :1]
        starts = torch.arange(x.shape[0] + 1)
        values = x.values()[x.offsets()[:-1]]
        y = njt.nested_tensor_from_jagged(values, starts)
        y.max_seqlen = 3
        return y

    with pytest.raises(AssertionError, match="max_seqlen 3"):
        check_against_components(wrong, sample())


def test_copy_for_a_view_is_found() -> None:
    check_against_components(lambda x: x.unflatten(-1, (2, 2)), sample(), view=True)
    with pytest.raises(AssertionError, match="no view"):
        check_against_components(lambda x: x.clone(), sample(), view=True)


def test_wrong_gradient_of_a_dense_operand_is_found() -> None:
    def wrong(x: Tensor, w: Tensor) -> Tensor:
        return x * (_WrongBackward.apply(w) / 2 if x.is_nested else w)

    with pytest.raises(AssertionError, match="gradient of operand 1"):
        check_against_components(wrong, sample(), torch.randn(4))


def test_wrong_second_gradient_is_found() -> None:
    class WrongTwice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, v: Tensor) -> Tensor:
            ctx.save_for_backward(v)
            return v**3

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 3 * ctx.saved_tensors[0].detach() ** 2 * g

    fn = _if_nested(lambda x: _rebuilt(x, WrongTwice.apply(x.values())), lambda x: x**3)
    check_against_components(fn, sample(dtype=torch.float64))
    with pytest.raises(AssertionError, match="second gradient"):
        check_against_components(fn, sample(dtype=torch.float64), gradgrad=True)


def test_an_error_must_be_raised_by_both() -> None:
    def refuses(x: Tensor) -> Tensor:
        raise IndexError

    check_against_components(refuses, sample(), raises=IndexError)
    with pytest.raises(IndexError):
        check_against_components(refuses, sample())
    with pytest.raises(pytest.fail.Exception):
        check_against_components(_if_nested(_double, refuses), sample(), raises=IndexError)


def test_reading_a_gap_shows() -> None:
    x = sample(BY_NAME["gaps"])
    assert x.values().isnan().any()
    assert not any(c.isnan().any() for c in components(x))
    with pytest.raises(AssertionError):  # the sum over all rows, gaps included
        check_against_components(
            _if_nested(lambda x: x.values().sum(), lambda x: x.sum()),
            x,
            join=lambda parts: torch.stack(parts).sum(0),
        )


CASES = [
    Case("add a scalar", lambda x: x + 1),
    Case(
        "multiply by a row",
        lambda x, w: x * w,
        lambda x: (torch.randn(4),),
        options={"gradgrad": True},
    ),
    Case("a nested operand", lambda x, y: x * y, lambda x: (x.detach() + 1,)),
    Case(
        "a row for each component",
        lambda x, d: x * d,
        lambda x: (PerComponent(torch.randn(x.shape[0], *(1,) * (x.dim() - 2), 4)),),
    ),
    Case("linear", F.linear, lambda x: (torch.randn(5, 4), torch.randn(5))),
    Case("two results", lambda x: x.chunk(2, -1), options={"view": True}),
]


@grid(CASES)
def test_right_functions_pass(case: Case, layout: Any) -> None:
    run_case(case, layout)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_right_functions_pass_compiled(case: Case) -> None:
    run_case(case, USUAL, compiled=True)


@given(layouts())
def test_any_layout(layout: Any) -> None:
    check_against_components(torch.sin, sample(layout))


def test_grid_knows_its_layouts() -> None:
    with pytest.raises(AssertionError, match="of no layout"):
        grid([Case("c", _double, without=["of no layout"])])
