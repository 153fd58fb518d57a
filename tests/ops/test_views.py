"""View operators: values, gradients, structure, and that they share the operand's memory."""

from __future__ import annotations

import pytest
import torch

import njt
from tests.reference import Case, grid, run_case
from tests.samples import BY_NAME, STRUCTURES, sample

ALL = STRUCTURES
DIM_1 = [s for s in STRUCTURES if s.ragged_dim == 1]

VIEWS = [
    Case("transpose features", lambda x: x.transpose(-1, -2), features=(2, 3)),
    Case("transpose ragged", lambda x: x.transpose(1, -1)),
    Case("swapaxes", lambda x: torch.swapaxes(x, 1, -1)),
    Case("permute", lambda x: x.permute(0, *range(x.dim() - 1, 0, -1)), features=(2, 3)),
    Case("movedim", lambda x: x.movedim(-1, 1), features=(2, 3)),
    Case("mT", lambda x: x.mT, features=(2, 3)),
    Case("mH", lambda x: x.mH, features=(2, 3)),
    Case("unsqueeze last", lambda x: x.unsqueeze(-1)),
    Case("unsqueeze before ragged", lambda x: x.unsqueeze(1)),
    Case("squeeze", lambda x: x.squeeze(-2), features=(1, 3)),
    Case("squeeze two dims", lambda x: x.squeeze((-1, -3)), features=(1, 3, 1)),
    Case("squeeze of a size above 1", lambda x: x.squeeze(-1)),
    Case("unflatten", lambda x: x.unflatten(-1, (2, 2))),
    Case("unflatten, open size", lambda x: torch.unflatten(x, -1, (-1, 2))),
    Case("flatten features", lambda x: x.flatten(-2), features=(2, 3)),
    Case("flatten one dim", lambda x: x.flatten(-1)),
    Case("expand", lambda x: x.expand(*[-1] * (x.dim() - 1), 3), features=(1,)),
    Case("select", lambda x: x.select(-1, 2)),
    Case("select from the end", lambda x: x.select(-1, -1)),
    Case("narrow", lambda x: x.narrow(-1, 1, 2)),
    Case("diagonal", lambda x: x.diagonal(1, -2, -1), features=(3, 3)),
    Case("unfold", lambda x: x.unfold(-1, 2, 1)),
    Case("view_as itself", lambda x: x.view_as(x)),
    Case("alias", lambda x: torch.ops.aten.alias(x)),
    Case("view_as_real", torch.view_as_real, dtype=torch.complex64, options={"grad": False}),
    Case("view_as_complex", torch.view_as_complex, features=(2,), without=["strided values"]),
    Case("imag", lambda x: x.imag, dtype=torch.complex64, options={"grad": False}),
]  # fmt: skip
COPIES = [
    Case("reshape that copies", lambda x: x.transpose(-1, -2).reshape(*x.shape[:-2], 6), features=(2, 3)),
    Case("contiguous", lambda x: x.transpose(-1, -2).contiguous(), features=(2, 3)),
    Case("clone", lambda x: x.clone()),
    Case("clone with format", lambda x: x.clone(memory_format=torch.contiguous_format)),
]  # fmt: skip
RAGGED = [
    Case("flatten ragged and features", lambda x: x.flatten(x.dim() - 2), features=(4,),
         options={"new_structure": True}),
]  # fmt: skip


@grid(VIEWS)
def test_view(case: Case, layout: object) -> None:
    """A2: view operators alias the input's storage."""
    run_case(case, layout, view=bool(layout.rows))  # type: ignore[attr-defined]


@grid(COPIES)
def test_copy(case: Case, layout: object) -> None:
    run_case(case, layout, new_structure=case.name == "contiguous")


@grid(RAGGED)
def test_flatten_ragged(case: Case, layout: object) -> None:
    run_case(case, layout)


@pytest.mark.parametrize("name", ["usual", "gaps", "ragged dim 2"])
@pytest.mark.parametrize("case", VIEWS + RAGGED, ids=str)
def test_compiled(case: Case, name: str) -> None:
    run_case(case, BY_NAME[name], compiled=True)


@pytest.mark.parametrize("name", ["usual", "gaps", "strided values", "empty components"])
def test_packed_rows(name: str) -> None:
    """reshape(-1, D), view(-1, D) and flatten(0, 1) give the rows of all components."""
    x = sample(BY_NAME[name], requires_grad=True)
    rows = torch.cat(x.unbind())
    for got in (x.reshape(-1, 4), x.flatten(0, 1), x.flatten().view(-1, 4)):
        assert not got.is_nested
        torch.testing.assert_close(got, rows)
    if not x.structure.has_gaps:
        assert x.view(-1, 4).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_contiguous_closes_gaps() -> None:
    """b039"""
    x = sample(BY_NAME["gaps"])
    y = x.contiguous()
    assert y.is_contiguous()
    assert y.lengths() is None
    assert y.offsets().tolist() == [0, 2, 2, 5]


@pytest.mark.parametrize("name", ["usual", "gaps", "ragged dim 2"])
@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.unsqueeze_(-1),
        lambda x: x.unsqueeze_(1),
        lambda x: x.transpose_(1, -1),
        lambda x: x.swapaxes_(1, -1),
        lambda x: x.swapdims_(1, -1),
        lambda x: x.squeeze_(-1),
    ],
)
def test_in_place_view(op: object, name: str) -> None:
    """A3: in-place views return the same object, with its new shape, and are differentiable."""
    leaf = sample(BY_NAME[name], (1,), requires_grad=True)
    x = leaf * 2
    parts = [p.clone() for p in x.detach().unbind()]
    assert op(x) is x  # type: ignore[operator]
    wanted = [op(p.unsqueeze(0)).squeeze(0) for p in parts]  # type: ignore[operator]
    for got, part in zip(x.unbind(), wanted, strict=True):
        torch.testing.assert_close(got, part)
    assert x.dim() == wanted[0].dim() + 1
    x.sum().backward()


def test_messages() -> None:
    x = njt.nested_tensor([torch.zeros(2, 4), torch.zeros(1, 4)])
    for call in (
        lambda: x.transpose(0, 1),
        lambda: x.permute(1, 0, 2),
        lambda: x.squeeze(0),
        lambda: x.unsqueeze(0),
        lambda: x.diagonal(0, 1, 2),
        lambda: x.view(3, 4, 1),
        lambda: x.expand(3, -1, -1),
    ):
        with pytest.raises(RuntimeError, match=r"\(\): got .* Expected "):
            call()
    with pytest.raises(IndexError):
        x.select(5, 0)
