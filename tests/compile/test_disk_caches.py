"""Compiled graphs are found again on disk by a later process: the guards kept with them can be evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import njt


@pytest.fixture(params=[True, False], ids=["both caches", "inductor's alone"])
def autograd_cache(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Empty caches, switched on (conftest switches them off)."""
    with (
        fresh_cache(),
        torch._inductor.config.patch(fx_graph_cache=True),
        torch._functorch.config.patch(enable_autograd_cache=request.param),
    ):
        yield request.param


def _attention(x: Tensor) -> Tensor:
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2).values()


def _padded(x: Tensor) -> Tensor:
    return x.to_padded_tensor(0.0) * 2


@pytest.mark.parametrize("fn", [_attention, _padded], ids=lambda f: f.__name__)
def test_found_again(fn: Callable[[Tensor], Tensor], autograd_cache: bool) -> None:
    for run in range(2):
        torch.compiler.reset()  # what a new process starts with
        counters.clear()
        x = njt.nested_tensor([torch.randn(n, 8) for n in (3, 1, 4)], requires_grad=True)
        (ours,) = torch.autograd.grad(torch.compile(fn, fullgraph=True)(x).sum(), x)
        (wanted,) = torch.autograd.grad(fn(x).sum(), x)
        torch.testing.assert_close(ours.values(), wanted.values(), rtol=1e-4, atol=1e-5)
        hits = (
            counters["aot_autograd"]["autograd_cache_hit"]
            + counters["inductor"]["fxgraph_cache_hit"]
        )
        assert bool(hits) == bool(run), dict(counters["inductor"])
