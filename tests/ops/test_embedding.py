"""Embedding look-ups by nested indices, bags, one-hot encoding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import njt
from tests.reference import Case, grid, run_case
from tests.samples import BY_NAME, STRUCTURES, USUAL, components, sample

RAGGED_1 = [s for s in STRUCTURES if s.ragged_dim == 1]


def ids(x: Tensor) -> Tensor:
    """The sample's integers as indices below 10; rows in gaps stay as far out as they are."""
    packed = x.values()
    packed = torch.where(packed > 1000, packed, packed % 10)
    return njt.nested_tensor_from_jagged(packed, x.offsets(), x.lengths(), jagged_dim=x.ragged_dim)


def table(x: Tensor) -> list[Tensor]:
    return [torch.randn(10, 5)]


def look_up(fn, **options):
    return lambda x, w: fn(ids(x) if x.is_nested else x % 10, w, **options)


CASES = [
    Case("embedding", look_up(F.embedding), table, dtype=torch.int64),
    Case("padding_idx", look_up(F.embedding, padding_idx=3), table, dtype=torch.int64),
    Case("torch.embedding", lambda x, w: torch.embedding(w, ids(x) if x.is_nested else x % 10), table,
         dtype=torch.int64),
    Case("int32", look_up(F.embedding), table, dtype=torch.int32),
    Case("of scalars", look_up(F.embedding), table, dtype=torch.int64, features=()),
    Case("one_hot", lambda x: F.one_hot(ids(x) if x.is_nested else x % 10, 10), dtype=torch.int64),
]  # fmt: skip
BAGS = [
    Case(mode, look_up(F.embedding_bag, mode=mode), table, dtype=torch.int64, features=(),
         without=["gaps", "empty components", "all empty"])  # dense torch takes no (1, 0) bag
    for mode in ("sum", "mean", "max")
]  # fmt: skip


@grid(CASES)
def test_equals_loop(case: Case, layout: object) -> None:
    run_case(case, layout)


@grid(BAGS, RAGGED_1)
def test_bags(case: Case, layout: object) -> None:
    run_case(case, layout)


@pytest.mark.parametrize("name", ["usual", "gaps"])
@pytest.mark.parametrize("case", [*CASES, *BAGS], ids=str)
def test_compiled(case: Case, name: str) -> None:
    if name == "gaps" and case in BAGS:
        name = "int32 offsets"  # leaving rows out in a graph has a size that data decide
    run_case(case, BY_NAME[name], compiled=True)


@pytest.mark.parametrize("name", ["usual", "gaps", "empty components"])
def test_weighted_bags(name: str) -> None:
    x = ids(sample(BY_NAME[name], (), torch.int64))
    w = torch.randn(10, 5, requires_grad=True)
    shares = torch.randn(x.values().shape, requires_grad=True)
    out = F.embedding_bag(
        x,
        w,
        mode="sum",
        per_sample_weights=njt.nested_tensor_from_jagged(shares, x.offsets(), x.lengths()),
    )
    starts = x.offsets().tolist()
    wanted = torch.stack([
        (w[c] * shares[s : s + len(c), None]).sum(0) for c, s in zip(components(x), starts)
    ])  # fmt: skip
    torch.testing.assert_close(out, wanted)
    for a, b in zip(*(torch.autograd.grad(t.square().sum(), (w, shares)) for t in (out, wanted))):
        torch.testing.assert_close(a, b)


def test_modules() -> None:
    x = njt.nested_tensor([torch.tensor([1, 2, 3]), torch.tensor([4])])
    out = torch.nn.Embedding(10, 4)(x)
    assert out.shape[2] == 4
    assert out.offsets() is x.offsets()
    assert torch.nn.EmbeddingBag(10, 4)(x).shape == (2, 4)


def test_index_out_of_range_is_an_error() -> None:
    with pytest.raises(IndexError):
        F.embedding(njt.nested_tensor([torch.tensor([10])]), torch.randn(10, 4))


def test_arguments_in_the_wrong_order() -> None:
    with pytest.raises(TypeError, match="Swap the arguments"):
        F.embedding(torch.tensor([1]), sample(USUAL))
    with pytest.raises(ValueError, match="leave them out"):
        F.embedding_bag(sample(USUAL, (), torch.int64), torch.randn(10, 4), torch.tensor([0]))
