"""Integer arithmetic of dims, against what dense tensors do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from njt import dims

rank_and_dims = st.integers(2, 5).flatmap(
    lambda n: st.tuples(
        st.just(n), st.integers(1, n - 1), st.integers(1, n - 1), st.integers(1, n - 1)
    )
)


def shaped(rank: int, ragged_dim: int) -> torch.Tensor:
    """A tensor whose only dim of size 7 is the ragged one."""
    return torch.empty([7 if d == ragged_dim else 2 for d in range(rank)])


@given(rank_and_dims)
def test_where_the_ragged_dim_goes(drawn) -> None:
    rank, ragged_dim, a, b = drawn
    x = shaped(rank, ragged_dim)
    assert x.transpose(a, b).shape[dims.swap(ragged_dim, a, b)] == 7
    assert x.unsqueeze(a).shape[dims.insert(ragged_dim, a)] == 7
    order = [0, *reversed(range(1, rank))]
    assert x.permute(order).shape[dims.permute(ragged_dim, order)] == 7
    gone = [d for d in {a, b} if d != ragged_dim]
    assert x.sum(gone or 0).shape[dims.drop(ragged_dim, gone or [0])] == 7


@given(st.integers(1, 5), st.integers(-7, 7))
def test_canonical_as_dense(rank, dim) -> None:
    if -rank <= dim < rank:
        assert dims.canonical(dim, rank) == dim % rank
        return
    with pytest.raises(IndexError) as wanted:
        torch.empty([1] * rank).size(dim)
    with pytest.raises(IndexError) as got:
        dims.canonical(dim, rank)
    assert str(got.value) == str(wanted.value)


def test_canonical_all() -> None:
    assert dims.canonical_all(None, 3) == (0, 1, 2)
    assert dims.canonical_all([], 2) == (0, 1)
    assert dims.canonical_all(-1, 3) == (2,)
    with pytest.raises(RuntimeError, match="more than once"):
        dims.canonical_all((1, -2), 3)
