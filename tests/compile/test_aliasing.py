"""A5: outputs that are views of inputs are so after compilation, and what a graph writes is seen by everyone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import njt
from tests.compile.streams import nested


def _packed(x: Tensor) -> Tensor:
    return x.values() if isinstance(x, njt.NestedTensor) else x


VIEWS: dict[str, Callable[[Any], Tensor]] = {
    "itself": lambda x: x,
    "detach": lambda x: x.detach(),
    "values": lambda x: x.values(),
    "transpose": lambda x: x.transpose(1, 2),
    "unflatten": lambda x: x.unflatten(-1, (2, 4)),
    "heads": lambda x: x.unflatten(-1, (2, 4)).transpose(1, 2),
    "unsqueeze": lambda x: x.unsqueeze(-1),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_inputs(name: str, requires_grad: bool) -> None:
    fn, x = VIEWS[name], nested([3, 5, 2], requires_grad=requires_grad)
    ours, theirs = torch.compile(fn, fullgraph=True, backend="aot_eager")(x), fn(x)
    assert (ours is x) == (theirs is x)
    assert _packed(ours).data_ptr() == _packed(theirs).data_ptr() == x.values().data_ptr()
    assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
    assert ours.requires_grad == theirs.requires_grad
    if isinstance(theirs, njt.NestedTensor):
        assert isinstance(ours, njt.NestedTensor)
        assert ours.structure is theirs.structure
    if ours.requires_grad:
        (grad,) = torch.autograd.grad((_packed(ours) ** 2).sum(), x)
        torch.testing.assert_close(grad.values(), 2 * x.values().detach())


def _then(write: Callable[[Any], Any]) -> Callable[[Any], Tensor]:
    def fn(x: Any) -> Tensor:
        write(x)
        return x + 1

    return fn


WRITES: dict[str, Callable[[Any], Tensor]] = {
    "returned": lambda x: x.add_(1),
    "then used": _then(lambda x: x.mul_(2)),
    "through a view": _then(lambda x: x.transpose(1, 2).mul_(2)),
    "through the values": _then(lambda x: x.values().mul_(2)),
    "through a piece": _then(lambda x: x.chunk(2, -1)[0].mul_(2)),
    "zeroed": lambda x: x.zero_(),
    "copied over": lambda x: x.copy_(x * 2),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_into_inputs(name: str) -> None:
    fn, x = WRITES[name], nested([3, 5, 2])
    y, values = x.clone(), x.values()
    version = values._version
    ours, theirs = torch.compile(fn, fullgraph=True, backend="aot_eager")(x), fn(y)
    assert (ours is x) == (theirs is y)
    assert values._version > version
    torch.testing.assert_close(values, y.values())
    torch.testing.assert_close(_packed(ours), _packed(theirs))


GAPPED: dict[str, Callable[[Any, Any], Any]] = {
    "by a tensor of other rows": lambda x, y: x.add_(y),
    "by a number": lambda x, y: x.mul_(2),
    "one after the other": lambda x, y: x.sin_().mul_(y).clamp_(min=0),
    "copied over": lambda x, y: x.copy_(y.relu()),
    "from out of a graph": lambda x, y: torch.mul(x, y, out=x),
}


@pytest.mark.parametrize("name", GAPPED)
def test_writes_leave_gaps_alone(name: str) -> None:
    """In two batches, of which the second finds a graph for other sizes."""
    write = torch.compile(GAPPED[name], fullgraph=True, backend="aot_eager")
    for starts, lengths in (([0, 4, 8], [2, 3]), ([0, 6, 7, 9], [4, 0, 1])):
        offsets, used = torch.tensor(starts), torch.tensor(lengths)
        ours, theirs = (
            njt.nested_tensor_from_jagged(values, offsets, used)
            for values in torch.randn(starts[-1] + 1, 3).repeat(2, 1, 1)
        )
        other = njt.NestedTensor(torch.randn(starts[-1] + 1, 3), ours.structure, 1)
        before = theirs.values().clone()
        write(ours, other)
        GAPPED[name](theirs, njt.NestedTensor(other.values(), theirs.structure, 1))
        assert torch.equal(ours.values(), theirs.values())
        in_gaps = ~theirs.structure.row_mask(len(before))
        assert torch.equal(ours.values()[in_gaps], before[in_gaps])
        assert not torch.equal(ours.values(), before)
