"""Structures in a graph: shared ones are known to be equal, others are compared while it runs, never assumed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.streams import Counting, nested, rows

Batch = tuple[Tensor, Tensor]


def shared(lengths: Sequence[int]) -> Batch:
    x = nested(lengths, 2, 4)
    return x, x * 2


def apart(first: Sequence[int], second: Sequence[int]) -> Batch:
    return nested(first, 2, 4), nested(second, 2, 4)


def product(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def by_symbol(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 if x.shape[1] == y.shape[1] else x * 3


def attention(x: Tensor, y: Tensor) -> Tensor:
    q, k = x.transpose(1, 2), y.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, k)


PAIRS: list[tuple[Callable[..., Tensor], Batch, Batch]] = [
    (product, shared([3, 5, 2]), apart([3, 5, 2], [3, 5, 2])),
    (product, apart([3, 5, 2], [3, 5, 2]), shared([3, 5, 4])),
    (product, apart([3, 5, 2], [3, 5, 2]), apart([4, 5], [4, 5])),
    (by_symbol, shared([3, 5, 2]), apart([3, 5, 2], [3, 5, 2])),
    (by_symbol, apart([3, 5, 2], [3, 5, 2]), shared([3, 5, 2])),
    (attention, shared([3, 5, 2]), apart([3, 5, 2], [2, 6, 2])),
]


@pytest.mark.parametrize("case", range(len(PAIRS)))
def test_second_batch(case: int) -> None:
    """A graph made for shared structures is not run on others, and the other way round."""
    fn, first, second = PAIRS[case]
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    for x, y in (first, second):
        torch.testing.assert_close(rows(compiled(x, y)), rows(fn(x, y)))


@pytest.mark.parametrize("first", ["shared", "apart"])
@pytest.mark.parametrize("lengths", [[5, 3, 2], [5, 3, 4]], ids=["same total", "other total"])
def test_unequal_lengths_raise(first: str, lengths: list[int]) -> None:
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    compiled(*(shared([3, 5, 2]) if first == "shared" else apart([3, 5, 2], [3, 5, 2])))
    with pytest.raises(RuntimeError):
        compiled(*apart([3, 5, 2], lengths))


def test_equal_lengths_need_one_graph() -> None:
    counting = Counting("aot_eager")
    compiled = torch.compile(product, fullgraph=True, backend=counting)
    for lengths in ([3, 5, 2], [4, 4], [1, 9, 2, 2]):
        compiled(*apart(lengths, lengths))
    assert counting.graphs == 1


SEEDED = """
import torch
from tests.compile.streams import nested

def branch(x):
    return x * 2 if x.shape[0] > 2 else x * 3

for first, second in (([3, 5, 2], [3, 5]), ([3, 5], [3, 5, 2])):
    torch._dynamo.reset()
    compiled = torch.compile(branch, fullgraph=True, backend="aot_eager")
    for lengths in (first, second, [7]):
        x = nested(lengths)
        torch.testing.assert_close(compiled(x).values(), branch(x).values())
"""


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
def test_outer_sizes_are_guarded_whatever_the_hash_seed(seed: int) -> None:
    """Which of two symbols torch keeps for a size hangs on the hash seed; the guard must not."""
    root = Path(__file__).parent.parent.parent
    environment: dict[str, Any] = {
        **os.environ,
        "PYTHONHASHSEED": str(seed),
        "PYTHONPATH": str(root),
    }
    subprocess.run(
        [sys.executable, "-c", SEEDED], check=True, env=environment, cwd=root, timeout=300
    )
