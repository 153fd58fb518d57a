"""Sorting, quantiles, flip and roll over features and over the ragged dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference import Case, check_against_components, grid, run_case
from tests.samples import BY_NAME, STRUCTURES, Layout, sample

EMPTY = [str(layout) for layout in STRUCTURES if layout.lengths and min(layout.lengths) == 0]
# the loop's side sees dense components, which don't know their ragged dim
RAGGED = [1]


def over(f: Callable[..., Any], where: str, **options: Any) -> Callable[[Tensor], Any]:
    """`f` over the ragged dim ("r") or the last dim ("f")."""
    return lambda x: f(x, dim=RAGGED[0] if where == "r" else x.dim() - 1, **options)


def with_nan(f: Callable[..., Any]) -> Callable[[Tensor], Any]:
    """`f` of x with nan in place of what is above 1."""
    return lambda x: f(torch.where(x > 1, torch.nan, x))


INDICES = {"grad": False}
SHAPED = [
    *(Case(f"sort {w}", over(torch.sort, w), options={"gradgrad": True}) for w in "rf"),
    *(Case(f"sort down {w}", over(torch.sort, w, descending=True, stable=True)) for w in "rf"),
    *(Case(f"argsort {w}", over(torch.argsort, w, stable=True), options=INDICES) for w in "rf"),
    Case("sort int", over(torch.sort, "r", stable=True), dtype=torch.int64),
    Case("sort bool", over(torch.sort, "r", stable=True), dtype=torch.bool),
    Case("flip bool", over(lambda x, dim: torch.flip(x, (dim,)), "r"), dtype=torch.bool),
    Case("roll bool", over(lambda x, dim: torch.roll(x, 1, dim), "r"), dtype=torch.bool),
    Case("sort nan", with_nan(over(torch.sort, "r")), options=INDICES),
    Case("sort by position", lambda x: x.sort(-1, True)),
    Case("sort by default", torch.sort),
    Case("topk features", lambda x: torch.topk(x, 2)),
    Case("topk least", lambda x: x.topk(3, -1, False)),
    *(Case(f"flip {w}", over(lambda x, dim: torch.flip(x, (dim,)), w)) for w in "rf"),
    Case("flip both", lambda x: x.flip(RAGGED[0], -1)),
    *(Case(f"roll {w}", over(lambda x, dim: torch.roll(x, 1, dim), w)) for w in "rf"),
    Case("roll back by many", lambda x: x.roll((-5, 3), (RAGGED[0], -1))),
]
REDUCED = [
    *(Case(f"topk ragged, {k}", over(torch.topk, "r", k=k), without=EMPTY, options={"raises": RuntimeError})
      for k in (1,)),
    *(Case(f"quantile {w} {how}", over(torch.quantile, w, q=0.3, interpolation=how), without=EMPTY)
      for w in "rf" for how in ("linear", "lower", "higher", "midpoint", "nearest")),
    Case("quantile kept", over(torch.quantile, "r", q=0.75, keepdim=True), without=EMPTY),
    Case("quantile of nan", with_nan(over(torch.quantile, "r", q=0.4)), without=EMPTY),
    Case("nanquantile of nan", with_nan(over(torch.nanquantile, "r", q=0.4)), without=EMPTY),
    Case("nanquantile features", with_nan(over(torch.nanquantile, "f", q=0.4)), without=EMPTY),
    Case("quantile of a tensor", lambda x: torch.quantile(x, torch.tensor(0.4), -1), without=EMPTY),
]  # fmt: skip


def run(case: Case, layout: Layout, **options: Any) -> None:
    RAGGED[0] = layout.ragged_dim
    run_case(case, layout, **options)


@grid(SHAPED)
def test_shape_kept(case: Case, layout: Layout) -> None:
    run(case, layout)


@grid(REDUCED)
def test_reduced(case: Case, layout: Layout) -> None:
    if layout.lengths == () and "nan" in case.name:
        pytest.skip("nothing to compare")
    run(case, layout)


COMPILED = [SHAPED[0], SHAPED[1], SHAPED[4], SHAPED[10], *SHAPED[12:16], REDUCED[0], REDUCED[1]]


@pytest.mark.parametrize("case", COMPILED, ids=str)
@pytest.mark.parametrize("name", ["usual", "gaps", "transposed"])
def test_compiled(case: Case, name: str) -> None:
    if name in case.without:
        pytest.skip("the dense operator refuses an empty component")
    run(case, BY_NAME[name], compiled=True)


def test_several_quantiles() -> None:
    x, q = sample(), torch.tensor([0.1, 0.6])
    wanted = torch.stack([torch.quantile(c, q, 0) for c in x.unbind()], 1)
    torch.testing.assert_close(torch.quantile(x, q, 1), wanted)
    with pytest.raises(NotImplementedError, match="q of 2 numbers over feature dims"):
        torch.quantile(x, q, -1)


def test_more_than_there_are() -> None:
    x = sample()
    with pytest.raises((RuntimeError, IndexError), match="component of 1 rows"):
        torch.topk(x, 2, 1)


def test_msort_and_others_over_the_batch_are_refused() -> None:
    x = sample()
    for f in (
        torch.msort,
        torch.flipud,
        lambda x: x.flip(0),
        lambda x: x.roll(1, 0),
        lambda x: x.sort(0),
    ):
        with pytest.raises(RuntimeError, match="Expected another dim than the batch dim"):
            f(x)


def distinct(f: Callable[..., Any], rows: bool = False, **options: bool) -> Callable[[Tensor], Any]:
    """All results of `f` of few different numbers; those of a component alone with a batch dim."""

    def all_of(x: Tensor) -> Any:
        found = f(
            x % 3,
            return_inverse=True,
            return_counts=True,
            dim=RAGGED[0] if rows else None,
            **options,
        )
        if found[0].is_nested:
            return found
        has_batch = (rows, not rows, False)
        return tuple(t if b else t.unsqueeze(0) for t, b in zip(found, has_batch))

    return all_of


DISTINCT = [
    Case(f"{f.__name__}{' of rows' * rows}", distinct(f, rows), features=features, dtype=dtype,
         without=EMPTY * rows, options={"new_structure": True})
    for f in (torch.unique, torch.unique_consecutive) for rows in (False, True)
    for features, dtype in (((), torch.int64), ((2,), torch.int64), ((2,), torch.float32))
]  # fmt: skip


@pytest.mark.parametrize("layout", STRUCTURES, ids=str)
@pytest.mark.parametrize("k", range(len(DISTINCT)), ids=lambda k: f"{DISTINCT[k]} {k}")
def test_distinct(k: int, layout: Layout) -> None:
    if str(layout) in DISTINCT[k].without:
        return
    RAGGED[0] = layout.ragged_dim
    run_case(DISTINCT[k], layout, grad=False)


@pytest.mark.parametrize("k", [0, 1, 6, 7])
def test_distinct_compiled(k: int) -> None:
    RAGGED[0] = 1
    run_case(DISTINCT[k], grad=False, compiled=True)


def test_distinct_alone() -> None:
    x = sample(dtype=torch.int64)
    for got in (torch.unique(x), x.unique(), x.unique(sorted=False)):
        for g, c in zip(got.unbind(), x.unbind()):
            torch.testing.assert_close(g, c.unique())


def test_distinct_over_other_dims_is_refused() -> None:
    for f in (torch.unique, torch.unique_consecutive):
        with pytest.raises(NotImplementedError, match=r"loop over x.unbind\(\)"):
            f(sample(), dim=-1)
        with pytest.raises(RuntimeError, match="Expected another dim than the batch dim"):
            f(sample(), dim=0)


def test_fliplr() -> None:
    check_against_components(torch.fliplr, sample())
