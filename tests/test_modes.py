"""What surrounds a program: gradients that add up, modes, profilers, autocast, workers, optimizers, processes, files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import njt
from tests.samples import BY_NAME, components, sample


def leaf(layout: str = "usual", *features: int) -> njt.NestedTensor:
    """A nested tensor that collects a gradient itself; 8 features unless told."""
    return sample(BY_NAME[layout], features or (8,)).detach().requires_grad_()


def loop(fn: Callable[[Tensor], Tensor], x: njt.NestedTensor) -> tuple[list[Tensor], list[Tensor]]:
    """Results of `fn` on the components of `x`, and the components, which collect gradients."""
    parts = [c.requires_grad_() for c in components(x)]
    return [fn(c) for c in parts], parts


def check(ours: Any, theirs: list[Tensor], close: float = 1e-5) -> None:
    """A nested result and the loop's."""
    for a, b in zip(ours.unbind(), theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=close, atol=close)


# ---- gradients that add up

LAYOUTS = ["usual", "gaps", "transposed", "empty components", "bounds unknown", "ragged dim 2"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_of_a_leaf_add_up(layout: str, create_graph: bool) -> None:
    x = leaf(layout)
    parts = [c.requires_grad_() for c in components(x)]
    for fn in (torch.square, torch.sin, lambda t: t * 3):
        fn(x).sum().backward(create_graph=create_graph)
        for c in parts:
            fn(c).sum().backward()
    assert isinstance(x.grad, njt.NestedTensor)
    assert x.grad.structure is x.structure
    check(x.grad.detach(), [c.grad for c in parts])  # type: ignore[misc]


def test_a_second_backward_says_nothing() -> None:
    # torch's warning comes once a process, so the process has to be new
    program = """if True:
        import torch, njt
        x = njt.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], requires_grad=True)
        for _ in range(2):
            (x * 2).sum().backward()
        assert (x.grad.values() == 4).all()
    """
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
