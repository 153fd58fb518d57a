"""Training steps around and inside compiled functions: nested parameters, their gradients and optimizers' states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import njt
from tests.compile.streams import Counting, gappy, nested, rows

Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def _with(kind: Any, **options: Any) -> Optimizer:
    return lambda parameters: kind(parameters, lr=0.1, **options)


OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": _with(torch.optim.SGD, momentum=0.9, foreach=False),
    "SGD, foreach": _with(torch.optim.SGD, momentum=0.9, foreach=True),
    "Adam": _with(torch.optim.Adam, foreach=False),
    "Adam, foreach": _with(torch.optim.Adam, foreach=True),
    "AdamW": _with(torch.optim.AdamW, amsgrad=True, weight_decay=0.1),
}


class Prompts(nn.Module):
    """A row of weights and a nested parameter: a learned prompt for each task."""

    def __init__(self, prompts: njt.NestedTensor) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.prompts = nn.Parameter(prompts)
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self) -> Tensor:
        return F.gelu(self.prompts * self.weight).sum(1).square().sum()


def trained(prompts: njt.NestedTensor, make: Optimizer, backend: Any) -> list[Tensor]:
    """The parameters after 3 steps; forward and step compiled if there is a backend."""
    module = Prompts(prompts.clone())
    optimizer = make(module.parameters())
    forward: Callable[[], Tensor] = module.forward
    step: Callable[[], Any] = partial(type(optimizer).step, optimizer)
    if backend is not None:
        forward = torch.compile(forward, fullgraph=True, backend=backend)
        step = torch.compile(step, backend=backend)
    for _ in range(3):
        optimizer.zero_grad()
        forward().backward()
        step()
    return [rows(p.detach()) for p in module.parameters()]


@pytest.mark.parametrize("make", [nested, gappy], ids=["no gaps", "gaps"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_nested_parameter(name: str, make: Callable[..., Any]) -> None:
    counting = Counting("aot_eager")
    prompts = make([3, 5, 2])
    ours = trained(prompts, OPTIMIZERS[name], counting)
    theirs = trained(prompts, OPTIMIZERS[name], None)
    torch.testing.assert_close(ours, theirs)
    # the forward, the first step, which makes the state, and the others
    assert counting.graphs <= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_nested_parameter_inductor(name: str) -> None:
    prompts = nested([3, 5, 2])
    ours = trained(prompts, OPTIMIZERS[name], "inductor")
    theirs = trained(prompts, OPTIMIZERS[name], None)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
