"""Pointwise operators: one nested operand, two, a dense one of every shape that broadcasts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import njt
from tests.reference import Case, PerComponent, check_against_components, grid, run_case
from tests.samples import BY_NAME, STRUCTURES, sample


def alike(x):
    """A second operand of the same structure."""
    return [
        njt.nested_tensor_from_jagged(
            torch.rand_like(x.values()) + 0.5, x.offsets(), x.lengths(), jagged_dim=x.ragged_dim
        )
    ]


def row_each(x):
    """A dense row for each component, (B, 1, ..)."""
    size = [1 if d == x.ragged_dim else n for d, n in enumerate(x.shape)]
    return [PerComponent(torch.rand(size) + 0.5)]


UNARY = [
    Case("x + 1", lambda x: x + 1),
    Case("2 - x", lambda x: 2 - x),
    Case("exp", torch.exp),
    Case("log", torch.log, positive=True),
    Case("sgn", torch.sgn),
    Case("gelu", F.gelu),
    Case(
        "bucketize",
        # dense warns of components that lie in another order
        lambda x: torch.bucketize(
            x if x.is_nested else x.contiguous(), torch.tensor([-1.0, 0.0, 1.0])
        ),
        options={"grad": False},
    ),
    Case("hardtanh", F.hardtanh),
    Case("softplus", F.softplus),
    Case("elu", F.elu),
    Case("pow", lambda x: x**3, options={"gradgrad": True}),
    Case("clamp", lambda x: x.clamp(-1, 1)),
    Case("to another dtype", lambda x: x.to(torch.float64)),
    Case("frexp", torch.frexp),
    Case("where a number", lambda x: torch.where(x > 0, x, 0.0)),
    Case("masked_fill", lambda x: x.masked_fill(x > 0, 7.0)),
    Case("is positive", lambda x: x > 0),
    Case("nan_to_num", torch.nan_to_num),
]
BINARY = [
    Case("nested + nested", torch.add, others=alike, options={"gradgrad": True}),
    Case("nested * nested", torch.mul, others=alike, options={"gradgrad": True}),
    Case("nested / nested", torch.div, others=alike),
    Case("itself", lambda x: x * x),
    Case("maximum", torch.maximum, others=alike),
    Case("copysign", torch.copysign, others=alike),
    Case("floor_divide", torch.floor_divide, others=alike, options={"grad": False}),
    Case("complex", lambda x, y: torch.complex(x, y).abs(), others=alike),
    Case("where", lambda x, y: torch.where(x > y, x, y), others=alike),
    Case("addcmul", lambda x, y: torch.addcmul(x, y, y), others=alike),
    Case("lerp", lambda x, y: torch.lerp(x, y, 0.3), others=alike),
    Case("by name", lambda x, y: torch.add(input=x, other=y, alpha=2), others=alike),
    Case("dense (D,)", torch.mul, others=lambda x: [torch.rand(4)]),
    Case("dense first", lambda x, w: w / x, others=lambda x: [torch.rand(4)]),
    Case("dense ()", torch.mul, others=lambda x: [torch.tensor(2.0)]),
    Case("dense (1, 1, D)", torch.mul, others=lambda x: [torch.rand(*[1] * (x.dim() - 1), 4)]),
    Case("dense row each", torch.mul, others=row_each),
    Case("dense row each first", lambda x, w: w - x, others=row_each),
    Case("xlogy with a row each", torch.xlogy, others=row_each),
]


@grid(UNARY)
def test_one_operand(case: Case, layout) -> None:
    run_case(case, layout)


@grid(BINARY)
def test_two_operands(case: Case, layout) -> None:
    run_case(case, layout)


@pytest.mark.parametrize("case", [UNARY[0], BINARY[0], BINARY[-3]], ids=str)
@pytest.mark.parametrize("name", ["usual", "gaps", "transposed"])
def test_compiled(case: Case, name: str) -> None:
    run_case(case, BY_NAME[name], compiled=True)


@pytest.mark.parametrize("layout", STRUCTURES, ids=str)
def test_equal_lengths_made_apart_combine(layout) -> None:
    """Whoever made them: other offsets, int32 or int64, gaps or none (issue b001)."""
    x, y = sample(layout), sample(layout)
    check_against_components(torch.mul, x, y)
    closed = sample(BY_NAME["usual"]), sample(BY_NAME["int32 offsets"])
    check_against_components(torch.add, *closed)


def test_gaps_meet_no_gaps() -> None:
    gapped = sample(BY_NAME["gaps"])
    packed = njt.nested_tensor([torch.randn(n, 4) for n in (2, 0, 3)])
    check_against_components(torch.add, gapped, packed)
    check_against_components(torch.sub, packed, gapped)


def test_one_row_each_as_nested() -> None:
    """b003: a nested operand with one row per component is a row for each."""
    x = sample()
    rows = njt.nested_tensor([torch.rand(1, 4) for _ in range(3)])
    for out in (x * rows, rows * x):
        for got, c, r in zip(out.unbind(), x.unbind(), rows.unbind()):
            torch.testing.assert_close(got, c * r)
        assert out.structure is x.structure


def test_dense_of_the_common_length() -> None:
    x = sample(BY_NAME["equal lengths"])
    dense = torch.rand(2, 3, 4)
    out = x + dense
    for i, got in enumerate(out.unbind()):
        torch.testing.assert_close(got, x[i] + dense[i])


@pytest.mark.parametrize("layout", STRUCTURES, ids=str)
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x.mul_(x),
        lambda x: x.fill_(3),
        lambda x: x.masked_fill_(x > 0, 0.5),
        lambda x: torch.exp(x.clone(), out=x),
        lambda x: torch.add(x, 2, out=x),
    ],
    ids=["add_", "mul_", "fill_", "masked_fill_", "exp out", "add out"],
)
def test_in_place_returns_itself_and_leaves_gaps_alone(layout, write) -> None:
    """A3: the same object; rows in gaps may be somebody else's and keep every bit."""
    x = sample(layout)
    before = x.values().clone()
    wanted = [write(c.clone()) for c in x.unbind()]
    assert write(x) is x
    for got, w in zip(x.unbind(), wanted):
        torch.testing.assert_close(got, w)
    if layout.gaps:
        mask = x.structure.row_mask(before.shape[x.ragged_dim - 1])
        unused = (~mask).nonzero().flatten()
        d = x.ragged_dim - 1
        kept, was = (v.index_select(d, unused).view(torch.int32) for v in (x.values(), before))
        assert torch.equal(kept, was)


def test_type_promotion() -> None:
    x = sample(dtype=torch.int64)
    assert (x + 1.5).dtype is torch.float32
    assert (x / 2).dtype is torch.float32
    assert (x + sample(dtype=torch.float64)).dtype is torch.float64
    assert (x.to(torch.bfloat16) + torch.tensor(1.0)).dtype is torch.bfloat16


def test_saved_for_backward_then_written_raises() -> None:
    x = sample(requires_grad=True)
    y = x * 1
    z = y * y
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: torch.clamp(x, min=y),
        lambda x, y: torch.clamp(x, max=y, min=y - 1),
        lambda x, y: torch.mul(input=x, other=y),
        lambda x, y: torch.sub(x, other=y, alpha=2),
    ],
    ids=["clamp min", "clamp both", "all by name", "other"],
)
def test_operands_by_name_have_gradients(call) -> None:
    """Of another structure with the same lengths, as by position."""
    leaves = [torch.randn(n, 2, requires_grad=True) for n in (5, 7)]
    x = njt.nested_tensor_from_jagged(leaves[0], torch.tensor([0, 2, 5]))
    y = njt.nested_tensor_from_jagged(leaves[1], torch.tensor([1, 4, 7]), torch.tensor([2, 3]))
    out = call(x, y)
    loop = [call(a, b) for a, b in zip(x.unbind(), y.unbind())]
    assert all(torch.equal(a, b) for a, b in zip(out.unbind(), loop, strict=True))
    got = torch.autograd.grad((out * out).sum(), leaves)
    wanted = torch.autograd.grad(torch.cat([a * a for a in loop]).sum(), leaves)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)
