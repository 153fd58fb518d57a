"""A stream of batches compiles at most twice, whatever their number of components, totals and lengths.

M2: a new longest length is no reason. What is: the rest of a size of 0 or 1, once each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import njt
from njt import _compat
from tests.compile.streams import check_stream, nested

# other numbers of components, totals, longest and shortest lengths, with every 0 and 1 there can be
EIGHT = {
    "usual first": [[3, 5, 2], [4, 7, 2, 9], [1, 1], [0, 13], [6], [1, 0], [0, 0], [1]],
    "one component first": [[6], [3, 5, 2], [0, 0, 0], [8, 0, 3, 4, 5], [0], [0, 1], [1], [4, 4]],
    "one row first": [[1], [2, 3, 30, 1, 1, 2, 6], [0, 0], [9], [1, 1, 1], [0], [1, 0], [6, 6]],
    "no row first": [[0, 0], [0], [1], [3, 5, 2], [7], [1, 0, 1], [0, 1, 0], [12, 1]],
    "single rows first": [[1, 1, 1], [5, 1], [0, 0, 0], [1], [4], [2, 2, 2, 2], [0], [1, 0]],
}
# before torch 2.13, which sizes are 0 or 1 is compiled in
MOST = 2 if _compat.UNKNOWN_DIMS else 8
torch.manual_seed(0)
PROJECT = nn.Linear(8, 24)
OUT = nn.Linear(8, 8)
NORM = nn.LayerNorm(8)
PARAMETERS = [*PROJECT.parameters(), *OUT.parameters(), *NORM.parameters()]


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 4)).transpose(1, 2)


def encoder(x: Tensor) -> Tensor:
    q, k, v = (heads(t) for t in PROJECT(NORM(x)).chunk(3, dim=-1))
    return x + OUT(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def classifier(x: Tensor) -> Tensor:
    return F.gelu(OUT(x)).sum(1)


def pad_op_unpad(x: njt.NestedTensor) -> Tensor:
    padded = F.gelu(OUT(x.to_padded_tensor(0.0)))
    return njt.from_padded(padded, offsets=x.offsets(), total_length=x.values().shape[0])


def cross_attention(x: Tensor, y: Tensor) -> Tensor:
    _, k, v = (heads(t) for t in PROJECT(y).chunk(3, dim=-1))
    return F.scaled_dot_product_attention(heads(OUT(x)), k, v).transpose(1, 2).flatten(2)


def made_apart(x: Tensor, y: Tensor) -> Tensor:
    return OUT(x) * y


def one(lengths: Sequence[int]) -> tuple[Any, ...]:
    return (nested(lengths, requires_grad=True),)


def reverse(lengths: Sequence[int]) -> tuple[Any, ...]:
    return (*one(lengths), *one(lengths[::-1]))


def twice(lengths: Sequence[int]) -> tuple[Any, ...]:
    return (*one(lengths), *one(lengths))


CASES = {
    "encoder": (encoder, one),
    "classifier": (classifier, one),
    "pad, operator, unpad": (pad_op_unpad, one),
    "cross attention": (cross_attention, reverse),
    "two that were made apart": (made_apart, twice),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "order", ["usual first", *(pytest.param(o, marks=pytest.mark.slow) for o in [*EIGHT][1:])]
)
def test_eight_batches(name: str, order: str) -> None:
    fn, make = CASES[name]
    check_stream(fn, make, batches=EIGHT[order], parameters=PARAMETERS, most=MOST)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_eight_batches_inductor(name: str) -> None:
    fn, make = CASES[name]
    check_stream(
        fn, make, batches=EIGHT["usual first"], parameters=PARAMETERS, most=MOST, backend="inductor"
    )


@pytest.mark.parametrize("order", [*EIGHT][1:])
def test_a_small_batch_first(order: str) -> None:
    """A graph made for sizes of 0 or 1 serves all others."""
    most = 1 if _compat.UNKNOWN_DIMS else MOST
    check_stream(classifier, one, batches=EIGHT[order], parameters=PARAMETERS, most=most)


def test_dynamic_false_compiles_each_batch() -> None:
    check_stream(encoder, one, batches=[[3, 5, 2], [4, 7]], dynamic=False)


@pytest.mark.parametrize("fn", [encoder, classifier], ids=lambda f: f.__name__)
def test_dynamic_true(fn: Callable[..., Any]) -> None:
    check_stream(fn, one, batches=[[3, 5, 2], [4, 7], [1, 9, 1]], dynamic=True)


ASKED: dict[str, Callable[[Any], bool]] = {
    "components": lambda x: x.shape[0] > 2,
    "one component": lambda x: x.shape[0] == 1,
    "rows": lambda x: x.values().shape[0] > 5,
    "no element": lambda x: x.values().numel() == 0,
    "longest": lambda x: x.max_seqlen > 1,
    "shortest": lambda x: x.min_seqlen == 0,
}


@pytest.mark.parametrize("order", EIGHT)
@pytest.mark.parametrize("name", ASKED)
def test_a_program_that_asks_for_sizes(name: str, order: str) -> None:
    """Each answer has a graph of its own, and batches that get another one don't run it."""
    asked, most = ASKED[name], 4 if _compat.UNKNOWN_DIMS else MOST
    check_stream(lambda x: x * 2 if asked(x) else x * 3, one, batches=EIGHT[order], most=most)


def test_no_mark_stays() -> None:
    x = nested([1, 0])
    torch.compile(classifier, backend="eager")(x)
    for inner in (x._values, x._offsets, x._extent):
        assert not hasattr(inner, "_dynamo_unbacked_indices")
