"""Compiled or not, nested tensors live with autocast, checkpoints, hooks, modes, torch.func and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import njt
from tests.compile.streams import nested, offsets, rows

torch.manual_seed(0)
LINEAR, NORM = nn.Linear(8, 8), nn.LayerNorm(8)


def attention(x: Tensor) -> Tensor:
    q = LINEAR(NORM(x)).unflatten(-1, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


def grads(fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Of a fresh leaf, collected by `backward`."""
    torch.manual_seed(1)
    x = nested([3, 5, 2], requires_grad=True)
    rows(fn(x)).float().square().sum().backward()
    assert x.grad is not None
    return x.grad.values()


def autocast_inside(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return attention(x)


def autocast_outside(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return compiled(attention)(x)


def hooked(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return attention(x)


def offloaded(x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return attention(x)


SAME: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "autocast inside": (compiled(autocast_inside), autocast_inside),
    "autocast outside": (autocast_outside, autocast_inside),
    "checkpoint": (lambda x: checkpoint(attention, x, use_reentrant=False), attention),
    "reentrant checkpoint": (lambda x: checkpoint(attention, x, use_reentrant=True), attention),
    "checkpoint compiled": (
        compiled(lambda x: checkpoint(attention, x, use_reentrant=False)),
        attention,
    ),
    "saved tensor hooks": (hooked, attention),
    "offloaded": (offloaded, attention),
}


@pytest.mark.parametrize("name", SAME)
def test_same_gradients(name: str) -> None:
    ours, theirs = SAME[name]
    close = 3e-2 if "autocast" in name else 1e-5
    torch.testing.assert_close(grads(ours), grads(theirs), rtol=close, atol=close)


def test_inference_mode() -> None:
    with torch.inference_mode():
        x = nested([3, 5, 2])
        y = compiled(attention)(x)
        torch.testing.assert_close(y.values(), attention(x).values())


class Names(TorchDispatchMode):
    """Operators that a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Functions that a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("mode", "name"), [(Names(), "aten.linear.default"), (Functions(), "linear")]
)
def test_modes_see_what_runs(mode: Any, name: str) -> None:
    x = nested([3, 5, 2])
    with mode:
        y = attention(x)
    torch.testing.assert_close(y.values(), attention(x).values())
    assert name in mode.seen


def test_flops_are_those_of_the_rows_in_use() -> None:
    x = nested([3, 5, 2])
    with FlopCounterMode(display=False) as counter:
        attention(x)
    assert counter.get_total_flops() == 2 * 10 * 8 * 8 + 2 * 2 * (9 + 25 + 4) * 8


def test_functional_call_and_jvp() -> None:
    module, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), nested([3, 5, 2])
    again = torch.func.functional_call(module, dict(module.named_parameters()), (x,))
    torch.testing.assert_close(again.values(), module(x).values())
    out, tangent = torch.func.jvp(lambda t: t * t, (x,), (x,))
    torch.testing.assert_close(tangent.values(), 2 * out.values())


def test_make_fx_leaves_plain_operators() -> None:
    def fn(values: Tensor, starts: Tensor) -> Tensor:
        return F.gelu(njt.nested_tensor_from_jagged(values, starts)).values()

    graph = make_fx(fn, tracing_mode="symbolic")(torch.randn(10, 8), offsets([3, 5, 2]))
    assert [n.target for n in graph.graph.nodes if n.op == "call_function"][:1] == [
        torch.ops.aten.gelu.default
    ]


def test_make_fx_of_the_values_of_a_nested_tensor() -> None:
    # a view, whose base make_fx describes with bounds that are no inputs of the graph
    x = nested([3, 5, 2])
    x.max_seqlen  # noqa: B018

    def fn(values: Tensor, starts: Tensor) -> Tensor:
        return F.softmax(njt.nested_tensor_from_jagged(values, starts), 1).values()

    run = make_fx(fn, tracing_mode="symbolic")(x.values(), x.offsets())
    y = nested([4, 1, 6, 2])
    torch.testing.assert_close(run(y.values(), y.offsets()), F.softmax(y, 1).values())


def test_make_fx_of_a_nested_tensor() -> None:
    run = make_fx(F.gelu, tracing_mode="symbolic")(nested([3, 5, 2]))
    y = nested([4, 1, 6, 2])
    torch.testing.assert_close(run(y).values(), F.gelu(y).values())
    for mode in ("real", "fake"):
        with pytest.raises(AttributeError, match="tracing_mode='symbolic'"):
            make_fx(nn.Linear(8, 8), tracing_mode=mode)(nested([3, 5, 2]))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_torchscript_is_refused() -> None:
    for fn, args in (
        (LINEAR, (nested([3, 5]),)),
        (
            lambda v, o: njt.nested_tensor_from_jagged(v, o).sum(1),
            (torch.ones(8, 8), offsets([3, 5])),
        ),
    ):
        with pytest.raises(NotImplementedError, match=r"torch.jit.trace\(\): got a nested tensor"):
            torch.jit.trace(fn, args)


def test_a_ragged_size_is_no_number() -> None:
    with pytest.raises(RuntimeError, match=r"Use x\.max_seqlen"):
        int(nested([3, 5]).shape[1])


def test_a_compiled_training_step() -> None:
    module = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        module(x).values().square().sum().backward()
        optimizer.step()

    before = module.weight.detach().clone()
    torch.compile(step, backend="aot_eager")(nested([3, 5, 2]))
    assert not torch.equal(module.weight, before)
