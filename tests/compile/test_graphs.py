"""Nested tensors go into a graph, are made in it and come out of it: same values, gradients and structure as eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import njt
from tests.compile.streams import BATCHES, check_stream, gappy, nested, offsets, unbounded

jagged = njt.nested_tensor_from_jagged
torch.manual_seed(0)
LINEAR = nn.Linear(8, 8)
CLOSED_OVER = nested([3, 5, 2])


def layer(x: Tensor) -> Tensor:
    return F.gelu(LINEAR(x)) + 1


@dataclass(frozen=True)
class Graph:
    """A function, how its inputs are made of lengths, and how many compilations its batches take."""

    fn: Callable[..., Any]
    make: Callable[[Sequence[int]], Sequence[Any]]
    most: int = 2


def leaf(n: Sequence[int]) -> tuple[Any, ...]:
    return (nested(n, requires_grad=True),)


def plain(n: Sequence[int]) -> tuple[Any, ...]:
    return (nested(n),)


def pair(n: Sequence[int]) -> tuple[Any, ...]:
    x = nested(n)
    return x, x * 2


def apart(n: Sequence[int]) -> tuple[Any, ...]:
    return nested(n), nested(n)


def packed(n: Sequence[int]) -> tuple[Any, ...]:
    return torch.randn(sum(n), 8, requires_grad=True), offsets(n)


def padded(n: Sequence[int]) -> Tensor:
    return torch.randn(len(n), max(n), 8, requires_grad=True)


def mask(n: Sequence[int]) -> Tensor:
    return torch.arange(max(n)) < torch.tensor(n)[:, None]


def tensors(n: Sequence[int]) -> list[Tensor]:
    return [torch.randn(k, 8, requires_grad=True) for k in n[:2]]


def of_view(n: Sequence[int]) -> tuple[Any, ...]:
    base = torch.randn(sum(n), 8, requires_grad=True) * 1
    return (jagged(base, offsets(n)),)


def two_slices(n: Sequence[int]) -> tuple[Any, ...]:
    base, o = torch.randn(2 * sum(n), 8), offsets(n)
    return jagged(base[: sum(n)], o), jagged(base[sum(n) :], o)


def heads(n: Sequence[int]) -> tuple[Any, ...]:
    return (nested(n).unflatten(-1, (2, 4)).transpose(1, 2),)


def attention(x: Tensor) -> Tensor:
    q = LINEAR(x).unflatten(-1, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


def rebuilt(x: njt.NestedTensor) -> Tensor:
    y = x * 2
    return jagged(y.values() * 2, y.offsets()) + x


def bounds(x: njt.NestedTensor) -> Tensor:
    y = x * 2
    return y * y.max_seqlen + x.min_seqlen


GRAPHS = {
    "in, out": Graph(layer, leaf),
    "values out": Graph(lambda x: layer(x).values(), leaf),
    "dense out": Graph(lambda x: layer(x).sum(), leaf),
    "values of a view in": Graph(layer, of_view),
    "ragged dim 2 in": Graph(lambda x: F.gelu(x) * 2, heads),
    "gaps in": Graph(layer, lambda n: (gappy(n, requires_grad=True),)),
    "gaps in, padded out": Graph(
        lambda x: layer(x).to_padded_tensor(0.0), lambda n: (gappy(n),), 3
    ),
    "two of one structure": Graph(lambda x, y: x * y + y, pair),
    "two of equal lengths": Graph(lambda x, y: x * y + y, apart),
    "two over slices of one base": Graph(lambda x, y: x * y + y, two_slices),
    "closed over": Graph(lambda x: x * 2 + CLOSED_OVER.values().sum(), plain),
    # made in the graph
    "from values and offsets": Graph(lambda v, o: layer(jagged(v, o)), packed),
    "M5: with bounds": Graph(
        lambda v, o, a, b: layer(jagged(v, o, min_seqlen=a, max_seqlen=b)),
        lambda n: (*packed(n), min(n), max(n)),
        3,
    ),
    "from lengths": Graph(
        lambda v, n: layer(jagged(v, lengths=n)), lambda n: (packed(n)[0], torch.tensor(n)), 3
    ),
    "ragged dim 2": Graph(lambda v, o: jagged(v.t(), o, jagged_dim=2) * 2, packed),
    "from padded and lengths": Graph(
        lambda p, n: layer(njt.from_padded(p, lengths=n)), lambda n: (padded(n), torch.tensor(n)), 4
    ),
    "from padded and a mask": Graph(
        lambda p, m: layer(njt.from_padded(p, mask=m)), lambda n: (padded(n), mask(n)), 4
    ),
    "from a list": Graph(lambda *ts: layer(njt.as_nested_tensor(list(ts))), tensors, 3),
    "from a detached list": Graph(
        lambda *ts: layer(njt.nested_tensor(list(ts))),
        lambda n: [t.detach() for t in tensors(n)],
        3,
    ),
    "from dense": Graph(lambda p: layer(njt.as_nested_tensor(p)), lambda n: (padded(n),), 4),
    "narrowed": Graph(
        lambda p, n: njt.narrow(p, 1, 0, n) * 2, lambda n: (padded(n), torch.tensor(n)), 4
    ),
    "from values and offsets of another": Graph(rebuilt, plain),
    # read in the graph
    "M4: bounds": Graph(bounds, plain),
    "M4: bounds nobody knows": Graph(bounds, lambda n: (unbounded(n),)),
    "M7: attention, bounds nobody knows": Graph(
        attention, lambda n: (unbounded(n, requires_grad=True),)
    ),
    "padded, bounds nobody knows": Graph(
        lambda x: x.to_padded_tensor(0.0) * 2, lambda n: (unbounded(n),)
    ),
    "M1: what nobody knows stays unknown": Graph(layer, lambda n: (unbounded(n),)),
    "lengths": Graph(lambda x: x.values() * (x * 2).seqlens.float().mean(), plain),
    "no gaps": Graph(lambda x: x * 2 if (x * 2).lengths() is None else x * 3, plain),
    "number of components": Graph(lambda x: x.values() * x.shape[0] + len(x) + x.shape[2], plain),
    "branch on the number of components": Graph(
        lambda x: x * 2 if x.shape[0] > 2 else x * 3, plain, 2
    ),
    "same ragged size": Graph(lambda x, y: x * 2 if x.shape[1] == y.shape[1] else x * 3, pair),
    "another ragged size": Graph(lambda x, y: x * 2 if x.shape[1] == y.shape[1] else x * 3, apart),
    "ragged dim": Graph(lambda x: x * x.ragged_dim, plain),
    "is_nested": Graph(lambda x: x * 2 if x.is_nested else x * 3, plain),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_as_eager(name: str) -> None:
    case = GRAPHS[name]
    check_stream(case.fn, case.make, most=case.most, parameters=list(LINEAR.parameters()))


INDUCTOR = ["in, out", "M5: with bounds"]  # the others take their time


@pytest.mark.parametrize(
    "name", [n if n in INDUCTOR else pytest.param(n, marks=pytest.mark.slow) for n in GRAPHS]
)
def test_as_eager_inductor(name: str) -> None:
    case = GRAPHS[name]
    check_stream(
        case.fn,
        case.make,
        most=case.most,
        parameters=list(LINEAR.parameters()),
        backend="inductor",
        batches=BATCHES[:2],
    )


def test_setting_a_bound() -> None:
    """M6: as in eager, the bound is set for every tensor of the batch."""

    def widen(x: njt.NestedTensor) -> Tensor:
        x.max_seqlen = 9
        return x * 2

    x = nested([3, 5, 2])
    y = torch.compile(widen, fullgraph=True, backend="aot_eager")(x)
    assert (x.max_seqlen, y.max_seqlen) == (9, 9)


def test_bounds_known_between_forward_and_backward() -> None:
    """The gradient comes with bounds that the graph did not have."""
    x = unbounded([3, 5, 2], requires_grad=True)
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert y.max_seqlen == 5
    (ours,) = torch.autograd.grad(y, x, torch.ones_like(y))
    z = layer(x)
    (theirs,) = torch.autograd.grad(z, x, torch.ones_like(z))
    torch.testing.assert_close(ours.values(), theirs.values())


@pytest.mark.parametrize("make", [nested, unbounded, gappy])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_numel_is_that_of_the_components(make: Any, backend: str) -> None:
    def f(x: Any) -> Any:
        return x.sum() / x.numel() + x.nelement() + torch.numel(x), x.numel(), x.nbytes

    compiled = torch.compile(lambda x: f(torch.nan_to_num(x)), backend=backend, fullgraph=True)
    for lengths in ([3, 5, 2], [4, 1, 2, 9]):
        x = make(lengths)
        ours, theirs = compiled(x), f(torch.nan_to_num(x))
        torch.testing.assert_close(ours[0], theirs[0])
        assert ours[1:] == theirs[1:] == (8 * sum(lengths), 32 * sum(lengths))
