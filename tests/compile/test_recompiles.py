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
from tests.compile.streams import check_stream, nested

EIGHT = [
    [3, 5, 2],
    [4, 7, 2, 9],
    [1, 1],  # longest 1
    [8, 0, 3, 4, 5],  # shortest 0
    [1, 0, 1],
    [0, 13],
    [2, 3, 30, 1, 1, 2, 6],
    [6, 6],
]
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
def test_eight_batches(name: str) -> None:
    fn, make = CASES[name]
    check_stream(fn, make, batches=EIGHT, parameters=PARAMETERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_eight_batches_inductor(name: str) -> None:
    fn, make = CASES[name]
    check_stream(fn, make, batches=EIGHT, parameters=PARAMETERS, backend="inductor")


def test_one_component_then_more() -> None:
    """A batch of one goes through the graph of the others where nothing depends on it, or takes one of its own."""
    check_stream(encoder, one, batches=[[3, 5, 2], [6], [4, 4]], most=1)
    check_stream(encoder, one, batches=[[6], [3, 5, 2], [4, 4], [7]])
    check_stream(classifier, one, batches=[[3, 5, 2], [6], [4, 4], [7]])


@pytest.mark.parametrize("total", [0, 1])
def test_a_total_of_none_or_one_takes_one_more(total: int) -> None:
    check_stream(encoder, one, batches=[[3, 5, 2], [total, 0], [4, 4], [0, total]], most=3)


def test_dynamic_false_compiles_each_batch() -> None:
    check_stream(encoder, one, batches=[[3, 5, 2], [4, 7]], dynamic=False)


@pytest.mark.parametrize("fn", [encoder, classifier], ids=lambda f: f.__name__)
def test_dynamic_true(fn: Callable[..., Any]) -> None:
    check_stream(fn, one, batches=[[3, 5, 2], [4, 7], [1, 9, 1]], dynamic=True)
