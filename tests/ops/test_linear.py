"""Matrix products: shared weights, a matrix per component, sums over the ragged dim."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import njt
from njt.kernels import grouped
from tests.reference import Case, PerComponent, check_against_components, grid, run_case
from tests.samples import BY_NAME, STRUCTURES, USUAL, sample

RAGGED_1 = [s for s in STRUCTURES if s.ragged_dim == 1]
RAGGED_2 = [s for s in STRUCTURES if s.ragged_dim == 2]


def weights(*shape: int) -> Tensor:
    return torch.randn(shape)


def per_component(x: Tensor, *shape: int) -> PerComponent:
    return PerComponent(torch.randn(x.shape[0], *shape))


def other_width(x: Tensor) -> Tensor:
    values = torch.randn(*x.values().shape[:-1], 3)
    return njt.nested_tensor_from_jagged(values, x.offsets(), x.lengths(), jagged_dim=x.ragged_dim)


CASES = [
    Case("linear", F.linear, lambda x: (weights(5, 4), weights(5))),
    Case("linear without bias", F.linear, lambda x: (weights(5, 4),)),
    Case("bilinear", F.bilinear, lambda x: (x * 2, weights(5, 4, 4), weights(5))),
    Case("matmul with a matrix", torch.matmul, lambda x: (weights(4, 5),)),
    Case("matmul with a vector", torch.matmul, lambda x: (weights(4),)),
    Case("@ with (1, 4, 5)", lambda x, w: x @ w, lambda x: (weights(*[1] * (x.dim() - 2), 4, 5),)),
]
PER_COMPONENT = [
    Case("bmm", torch.bmm, lambda x: (per_component(x, 4, 5),)),
    Case("matmul", torch.matmul, lambda x: (per_component(x, 4, 5),)),
    Case("__matmul__", lambda x, w: x @ w, lambda x: (per_component(x, 4, 5),)),
    Case("dense first", lambda x, w: w @ x.mT, lambda x: (per_component(x, 5, 4),)),
    Case("shared dense first", lambda x, w: w @ x.mT, lambda x: (weights(5, 4),)),
    Case("vector first", lambda x, w: w @ x.mT, lambda x: (weights(4),)),
    Case("baddbmm", lambda x, b, w: torch.baddbmm(b, x, w, beta=0.5, alpha=3),
         lambda x: (per_component(x, 1, 5), per_component(x, 4, 5)), options={"gradgrad": False}),
    Case("sum over rows", lambda x, y: x.mT @ y, lambda x: (torch.randn_like(x),)),
    Case("sum over rows, other width", lambda x, y: x.mT @ y, lambda x: (other_width(x),)),
    Case("rows of tokens", lambda x, w: x.unsqueeze(-2) @ w, lambda x: (per_component(x, 1, 4, 5),)),
    Case("linear attention", lambda x, y: (x.softmax(-1) @ (y.mT @ x)) / (1 + x.exp().sum(-1, keepdim=True)),
         lambda x: (torch.randn_like(x),), options={"gradgrad": False}),
]  # fmt: skip
HEADS = [
    Case("bmm over heads", torch.matmul, lambda x: (per_component(x, 2, 4, 5),)),
    Case("heads share", torch.matmul, lambda x: (per_component(x, 1, 4, 5),)),
    Case("heads, components share", torch.matmul, lambda x: (weights(2, 4, 5),)),
    Case("sum over rows", lambda x, y: x.mT @ y, lambda x: (torch.randn_like(x),)),
    Case("ragged batch dim", lambda x: x.transpose(1, 2) @ x.transpose(1, 2).mT),
]


@grid(CASES)
def test_equals_loop(case: Case, layout: object) -> None:
    run_case(case, layout, **{"gradgrad": True, **case.options})


@grid(PER_COMPONENT, RAGGED_1)
def test_a_matrix_per_component(case: Case, layout: object) -> None:
    run_case(case, layout, **{"gradgrad": True, **case.options})


@grid(HEADS, RAGGED_2)
def test_heads(case: Case, layout: object) -> None:
    run_case(case, layout, **{"gradgrad": True, **case.options})


@pytest.mark.parametrize("name", ["usual", "empty components", "gaps"])
@pytest.mark.parametrize("case", [*CASES, *PER_COMPONENT], ids=str)
def test_compiled(case: Case, name: str) -> None:
    run_case(case, BY_NAME[name], compiled=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int64])
@pytest.mark.parametrize(
    "fn", [torch.matmul, lambda x, w: x.mT @ (x @ w)], ids=["multiply", "contract"]
)
def test_dtypes(fn: object, dtype: torch.dtype) -> None:
    x = sample(USUAL, (4,), dtype)
    w = torch.randint(-3, 3, (3, 4, 8)).to(dtype)
    check_against_components(fn, x, PerComponent(w))


def test_many_components_take_the_grouped_product() -> None:
    lengths = torch.randint(0, 4, (grouped.MANY + 3,))
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    x = njt.nested_tensor_from_jagged(torch.randn(int(offsets[-1]), 8), offsets)
    w = torch.randn(len(lengths), 8, 12)
    check_against_components(lambda x, w: x.mT @ (x @ w), x, PerComponent(w))


@pytest.mark.parametrize("op", ["grouped_multiply", "grouped_contract"])
def test_operators_keep_their_promises(op: str) -> None:
    offsets = torch.tensor([0, 2, 2, 5])
    rows = torch.randn(5, 3, requires_grad=True)
    second = torch.randn(3, 3, 2) if op == "grouped_multiply" else torch.randn(5, 2)
    args = (rows, second.requires_grad_(), offsets, None, 3)
    torch.library.opcheck(getattr(torch.ops.njt, op).default, args)


@pytest.mark.parametrize(
    "fn", [lambda x, w: x @ w, lambda x, w: F.linear(x, w.mT)], ids=["@", "linear"]
)
def test_autocast(fn: object) -> None:
    x, w = sample(USUAL), torch.randn(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert fn(x, w).dtype is torch.bfloat16
        assert (x @ torch.randn(3, 4, 5)).dtype is torch.bfloat16
        assert (x.mT @ x).dtype is torch.bfloat16


def test_ragged_twice_is_refused() -> None:
    x = sample(USUAL)
    with pytest.raises(RuntimeError, match="ragged in one dim at most"):
        x @ x.mT


@pytest.mark.parametrize(
    "w",
    [torch.ones(3, 5), torch.ones(2, 4, 5), torch.ones(1, 1, 4, 5)],
    ids=lambda w: str(tuple(w.shape)),
)
def test_misfits_are_refused(w: Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"matmul\(\): got nested"):
        sample(USUAL) @ w


EINSUM = [
    Case("bjd,de->bje", lambda x, w: torch.einsum("bjd,de->bje", x, w), lambda x: (weights(4, 5),)),
    Case("bjd,bde->bje", lambda x, w: torch.einsum("bjd,bde->bje", x, w), lambda x: (per_component(x, 4, 5),)),
    Case("bde,bjd->bej", lambda w, x: torch.einsum("bde,bjd->bej", x, w), lambda x: (per_component(x, 4, 5),)),
    Case("bjd,bje->bde", lambda x, y: torch.einsum("bjd,bje->bde", x, y), lambda x: (other_width(x),)),
    Case("bjd,bjd->bj", lambda x, y: torch.einsum("bjd,bjd->bj", x, y), lambda x: (torch.randn_like(x),)),
    Case("bjd,bjd->b", lambda x, y: torch.einsum("bjd,bjd->b", x, y), lambda x: (torch.randn_like(x),)),
    Case("bjd->bd", lambda x: torch.einsum("bjd->bd", x)),
    Case("bjd->bdj", lambda x: torch.einsum("bjd->bdj", x)),
    Case("...d,de->...e", lambda x, w: torch.einsum("...d,de->...e", x, w), lambda x: (weights(4, 5),)),
    Case("implicit", lambda x, w: torch.einsum("bjd,dk", [x, w]), lambda x: (weights(4, 5),)),
    Case("three operands", lambda x, w, y: torch.einsum("bjd,bde,bje->bj", x, w, y),
         lambda x: (per_component(x, 4, 3), other_width(x))),
    Case("labels of one operand", lambda x, w: torch.einsum("bjd,bef->bjf", x, w), lambda x: (per_component(x, 4, 5),)),
]  # fmt: skip
EINSUM_HEADS = [
    Case("bhjd,bhde->bhje", lambda x, w: torch.einsum("bhjd,bhde->bhje", x, w), lambda x: (per_component(x, 2, 4, 5),)),
    Case("bhjd,bde->bjhe", lambda x, w: torch.einsum("bhjd,bde->bjhe", x, w), lambda x: (per_component(x, 4, 5),)),
    Case("bhjd,bhje->bhde", lambda x, y: torch.einsum("bhjd,bhje->bhde", x, y), lambda x: (torch.randn_like(x),)),
    Case("bhjd,bhjd->bh", lambda x, y: torch.einsum("bhjd,bhjd->bh", x, y), lambda x: (torch.randn_like(x),)),
    Case("bhjd,bhje->bed", lambda x, y: torch.einsum("bhjd,bhje->bed", x, y), lambda x: (torch.randn_like(x),)),
]  # fmt: skip


@grid(EINSUM, RAGGED_1)
def test_einsum(case: Case, layout: object) -> None:
    run_case(case, layout)


@grid(EINSUM_HEADS, RAGGED_2)
def test_einsum_heads(case: Case, layout: object) -> None:
    run_case(case, layout)


@pytest.mark.parametrize("name", ["usual", "gaps"])
@pytest.mark.parametrize("case", EINSUM, ids=str)
def test_einsum_compiled(case: Case, name: str) -> None:
    run_case(case, BY_NAME[name], compiled=True)


def test_einsum_over_everything() -> None:
    x = sample(BY_NAME["gaps"])
    w = torch.randn(3)
    rows = torch.cat(list(x.unbind()))
    torch.testing.assert_close(torch.einsum("bjd,bje->de", x, x), rows.T @ rows)
    torch.testing.assert_close(
        torch.einsum("bjd,b->d", x, w), torch.stack([c.sum(0) for c in x.unbind()]).T @ w
    )


@pytest.mark.parametrize("equation", ["bid,bjd->bij", "bjd,bjd->jd", "jbd,bd->jb", "bjd,bje->dbe"])
def test_einsum_refuses(equation: str) -> None:
    x = sample(USUAL)
    second = torch.randn(3, 4) if equation.startswith("jbd") else x
    with pytest.raises(RuntimeError, match=r"einsum\(\): got"):
        torch.einsum(equation, x, second)
