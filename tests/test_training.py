"""What training loops put around a model: checkpoints, hooks on saved tensors, workers, processes, optimizers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import njt
from tests.samples import BY_NAME, sample

LAYOUTS = ["usual", "empty components", "gaps", "bounds unknown", "ragged dim 2 with gaps"]
aten = torch.ops.aten


class Block(nn.Module):
    """Every kind of rule; nested and dense, in and out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Two of structure x, of equal lengths; the first goes on, the others are (B, *) and (B, longest, *)."""
        d = x.ragged_dim
        h = self.linear(self.norm(x))
        if d == 1:
            q = h.unflatten(-1, (2, 4)).transpose(1, 2)
            h = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        h = F.dropout(h, 0.5) + torch.softmax(y, d) * x.sum(d, keepdim=True)
        return h, h.sum(d), njt.to_padded_tensor(h, 0.0)


Run = Callable[..., Any]


def step(run: Run, layout: str) -> list[Tensor]:
    """Gradients and loss of two blocks, one after the other, each called as `run(block, x, y)`."""
    block = Block()
    torch.manual_seed(0)
    x, y = (sample(BY_NAME[layout], (8,)).detach().requires_grad_() for _ in range(2))
    torch.manual_seed(1)
    h, sums, padded = run(block, x, y)
    h, more, padded_more = run(block, h, y)
    loss = sums.square().sum() + more.sin().sum() + (padded * padded_more).sum()
    loss = loss + njt.to_padded_tensor(h, 0.0).square().sum()
    loss.backward()
    for leaf in (x, y):
        assert type(leaf.grad) is type(leaf)
        assert leaf.grad.shape == leaf.shape
    grads = [p.grad for p in block.parameters()]
    return [*(torch.cat(leaf.grad.unbind(), x.ragged_dim - 1) for leaf in (x, y)), *grads, loss]


def plainly(block: Block, *args: Tensor) -> Any:
    return block(*args)


def under(context: Callable[[], AbstractContextManager[Any]]) -> Run:
    """A call inside of a context; the backward runs outside."""

    def run(block: Block, *args: Tensor) -> Any:
        with context():
            return block(*args)

    return run


# ---- checkpoints ----------------------------------------------------------------------------------------------------

COSTLY = {aten.linear.default, aten.native_dropout.default, torch.ops.njt.varlen_attention.default}


def keep_costly(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Of a usual policy."""
    return CheckpointPolicy.MUST_SAVE if op in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE


def keep_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Every operator's result is looked up by its number when the block runs again."""
    return CheckpointPolicy.MUST_SAVE


def selective(policy: Callable[..., CheckpointPolicy]) -> Run:
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return partial(checkpoint, use_reentrant=False, context_fn=contexts)


CHECKPOINTS: dict[str, Run] = {
    "by hooks": partial(checkpoint, use_reentrant=False),
    "to the end": partial(checkpoint, use_reentrant=False, early_stop=False),
    "checked": partial(checkpoint, use_reentrant=False, debug=True),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "costly kept": selective(keep_costly),
    "all kept": selective(keep_all),
    "one in the other": lambda block, *args: checkpoint(
        partial(checkpoint, block, use_reentrant=False), *args, use_reentrant=False
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint(name: str, layout: str) -> None:
    torch.testing.assert_close(step(CHECKPOINTS[name], layout), step(plainly, layout))


def test_checkpoint_without_the_state_of_the_generator() -> None:
    """Dropout then draws anew: other gradients than those of the loss."""
    run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    ours, theirs = step(run, "usual"), step(plainly, "usual")
    torch.testing.assert_close(ours[-1], theirs[-1])
    assert not torch.allclose(ours[0], theirs[0])


def test_checkpoint_takes_and_returns_containers() -> None:
    def fn(given: dict[str, Tensor], *, scale: float) -> dict[str, Tensor]:
        return {"out": torch.softmax(given["x"], 1) * scale, "dense": given["x"].sum(1)}

    grads = []
    for run in (partial(checkpoint, fn, use_reentrant=False), fn):
        torch.manual_seed(0)
        x = sample(BY_NAME["gaps"]).detach().requires_grad_()
        out = run({"x": x}, scale=3.0)
        assert out["out"].offsets() is x.offsets()
        (njt.to_padded_tensor(out["out"], 0.0).square().sum() + out["dense"].sum()).backward()
        grads.append(torch.cat(x.grad.unbind()))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_sequential(reentrant: bool) -> None:
    stack = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 4))
    x = sample().detach().requires_grad_()
    (theirs,) = torch.autograd.grad(stack(x).values().square().sum(), x)
    checkpoint_sequential(stack, 2, x, use_reentrant=reentrant).values().square().sum().backward()
    torch.testing.assert_close(x.grad.values(), theirs.values())


# ---- hooks on saved tensors -----------------------------------------------------------------------------------------


class ToHost:
    """Keeps numbers instead of tensors, and what it saw."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def pack(self, x: Tensor) -> Any:
        self.seen.append(x)
        if isinstance(x, njt.NestedTensor):
            return x.detach().values().numpy(), x.detach()
        return x.detach().numpy(), None

    def unpack(self, kept: Any) -> Tensor:
        values = torch.from_numpy(kept[0])
        return values if kept[1] is None else kept[1].with_values(values)

    def __call__(self) -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_tensor_hooks(layout: str) -> None:
    hooks = ToHost()
    torch.testing.assert_close(step(under(hooks), layout), step(plainly, layout))
    nested = [x for x in hooks.seen if isinstance(x, njt.NestedTensor)]
    assert nested
    # a structure is kept once, whatever is saved
    assert len({id(x.offsets()) for x in nested}) <= 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_offload_to_cpu(layout: str) -> None:
    run = under(torch.autograd.graph.save_on_cpu)
    torch.testing.assert_close(step(run, layout), step(plainly, layout))


def test_hooks_can_be_forbidden() -> None:
    run = under(partial(torch.autograd.graph.disable_saved_tensors_hooks, "not here"))
    torch.testing.assert_close(step(run, "usual"), step(plainly, "usual"))
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        x = sample().detach().requires_grad_()
        with pytest.raises(RuntimeError, match="not here"):
            checkpoint(torch.sin, x, use_reentrant=False)
