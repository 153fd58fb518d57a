"""Factories, casts and copies: values from nowhere, structure from the operand."""

from __future__ import annotations

import copy

import pytest
import torch

import njt
from tests.reference import Case, grid, run_case
from tests.samples import BY_NAME, STRUCTURES, components, sample

CASES = [
    Case("zeros_like", torch.zeros_like, options={"grad": False}),
    Case("ones_like", lambda x: torch.ones_like(x, dtype=torch.float64), options={"grad": False}),
    Case("full_like", lambda x: torch.full_like(x, 2.5), options={"grad": False}),
    Case("double", lambda x: x.double()),
    Case("to half", lambda x: x.to(torch.half)),
    Case("to int", lambda x: x.to(torch.int32), options={"grad": False}),
    Case("to with copy", lambda x: x.to(x.dtype, copy=True)),
    Case("to complex", lambda x: x.to(torch.complex64), options={"grad": False}),
    Case("type_as", lambda x, t: x.type_as(t), lambda x: (torch.zeros((), dtype=torch.float64),),
         options={"grad": False}),
    Case("new_zeros", lambda x: x.new_zeros(x.shape), options={"grad": False}),
    Case("clone", lambda x: x.clone()),
]  # fmt: skip


@grid(CASES)
def test_like(case: Case, layout: object) -> None:
    run_case(case, layout)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled(case: Case) -> None:
    run_case(case, compiled=True)


@pytest.mark.parametrize("name", ["rand_like", "randn_like", "empty_like"])
@pytest.mark.parametrize("layout", STRUCTURES, ids=str)
def test_random_like(name: str, layout: object) -> None:
    """b069"""
    x = sample(layout)  # type: ignore[arg-type]
    y = getattr(torch, name)(x)
    assert y.structure is x.structure
    assert y.shape == x.shape


def test_nothing_to_convert() -> None:
    x = sample()
    assert x.to(torch.float32) is x
    assert x.cpu() is x
    assert x.float() is x
    assert x.to("cpu", torch.float32, non_blocking=True) is x
    assert x.to(torch.float32, copy=True) is not x


@pytest.mark.parametrize("name", ["usual", "gaps", "ragged dim 2"])
def test_copy_(name: str) -> None:
    x = sample(BY_NAME[name])
    y = torch.zeros_like(x)
    assert y.copy_(x) is y
    for a, b in zip(components(y), components(x)):
        torch.testing.assert_close(a, b)
    y.copy_(torch.tensor(2.0))
    assert all(bool((c == 2).all()) for c in components(y))
    y.copy_(torch.arange(4.0))
    for c in components(y):
        torch.testing.assert_close(c, torch.arange(4.0).expand_as(c))


def test_elements() -> None:
    x = njt.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])])
    assert x.tolist() == [[1, 2], [3]]
    assert 3 in x
    assert 4 not in x
    assert njt.nested_tensor([torch.tensor([7])]).item() == 7
    assert torch.equal(x, x.clone())
    assert not torch.equal(x, x + 1)
    with pytest.raises(RuntimeError, match=r"bool\(\): got nested .* Expected one element"):
        bool(x)
    for call in (lambda: x.resize_(2), lambda: x.apply_(abs)):
        with pytest.raises(NotImplementedError, match="Expected a tensor that owns"):
            call()


def test_deepcopy_keeps_one_structure() -> None:
    x = sample()
    a, b = copy.deepcopy([x, x * 2])
    assert a.structure is b.structure
    assert a.structure is not x.structure


def test_foreach() -> None:
    """b073"""
    for name in ("usual", "gaps"):
        x, d = sample(BY_NAME[name], requires_grad=True), torch.ones(4)
        a, b = torch._foreach_mul([x, d], [x, d])
        torch.testing.assert_close(b, d)
        for got, c in zip(components(a), components(x)):
            torch.testing.assert_close(got, c * c)
        norms = torch._foreach_norm([x, d])
        torch.testing.assert_close(norms[0], torch.cat(x.unbind()).norm())
        y = sample(BY_NAME[name])
        torch._foreach_add_([y, d], 1.0)
        for got, c in zip(components(y), components(sample(BY_NAME[name]))):
            assert got.shape == c.shape
        assert bool((d == 2).all())
