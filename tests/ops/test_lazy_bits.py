"""Conjugate and negative views: values that carry a bit instead of other numbers give what dense tensors give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import njt

LENGTHS = [3, 5, 2]


def nested() -> Any:
    g = torch.Generator().manual_seed(0)
    rows = [torch.randn(n, 6, dtype=torch.complex64, generator=g) for n in LENGTHS]
    return njt.nested_tensor(rows)


# each on a nested tensor and on its values
LINES: dict[str, Callable[[Any], Any]] = {
    "mul": lambda z: z.conj() * 2j,
    "from the right": lambda z: 2j * z.conj(),
    "add": lambda z: z.conj() + z,
    "neg": lambda z: -z.conj(),
    "sin": lambda z: z.conj().sin(),
    "eq": lambda z: z.conj() == z,
    "where": lambda z: torch.where(z.real > 0.5, z.conj(), z),
    "sum": lambda z: z.conj().sum(-1),
    "clone": lambda z: z.conj().clone(),
    "matmul": lambda z: z.conj() @ torch.ones(6, 6, dtype=z.dtype),
    "linear": lambda z: F.linear(z.conj(), torch.ones(2, 6, dtype=z.dtype)),
    "cat": lambda z: torch.cat([z.conj(), z], -1),
    "to": lambda z: z.conj().to(torch.complex128),
    "copy_": lambda z: z.clone().copy_(z.conj()),
    "in place": lambda z: z.clone().conj().mul_(2j),
    "out=": lambda z: torch.add(z.conj(), 1j, out=torch.empty_like(z)),
    "imag": lambda z: z.conj().imag,
    "imag times": lambda z: z.conj().imag * 3,
    "imag sin": lambda z: z.conj().imag.sin(),
    "real": lambda z: z.conj().real,
    "twice": lambda z: z.conj().conj() + 1j,
    "adjoint": lambda z: z.mT.conj().mT * 2j,
    "resolved": lambda z: torch.view_as_real(z.conj().resolve_conj()),
}


@pytest.mark.parametrize("name", LINES)
def test_as_dense(name: str) -> None:
    z = nested()
    ours, theirs = LINES[name](z), LINES[name](z.values())
    assert ours.dtype is theirs.dtype
    assert ours.values().is_conj() == theirs.is_conj()
    torch.testing.assert_close(ours.values(), theirs, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["mul", "add", "sin", "imag times", "matmul", "imag"])
def test_gradients(name: str) -> None:
    z = nested().requires_grad_()
    packed = z.values().detach().requires_grad_()
    ours, theirs = LINES[name](z).values(), LINES[name](packed)
    cotangent = torch.randn_like(theirs)
    (mine,) = torch.autograd.grad(ours, z, cotangent)
    (reference,) = torch.autograd.grad(theirs, packed, cotangent)
    torch.testing.assert_close(mine.values(), reference)


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    def f(z: Any) -> tuple[Any, Any]:
        return z.conj() * 2j, z.conj().imag * 3

    for ours, theirs in zip(
        torch.compile(f, backend=backend, fullgraph=True)(nested()), f(nested())
    ):
        torch.testing.assert_close(ours.values(), theirs.values())


def _written(z: Any, write: Callable[[Any], Any]) -> Tensor:
    write(z)
    return z.values() if z.is_nested else z


@pytest.mark.parametrize(
    "write",
    [lambda z: z.conj().mul_(2j), lambda z: z.imag.mul_(2), lambda z: z.conj().imag.add_(1)],
    ids=["conj", "imag", "imag of conj"],
)
def test_a_write_is_seen_by_the_base(write: Callable[[Any], Any]) -> None:
    z = nested()
    dense = z.values().clone()
    assert torch.equal(_written(z, write), _written(dense, write))


def test_questions() -> None:
    z = nested()
    assert z.conj().is_conj()
    assert torch.is_conj(z.conj())
    assert not z.is_conj()
    assert z.conj().imag.is_neg()
    assert not z.imag.is_neg()
    assert not z.conj().resolve_conj().is_conj()


def test_made_from_such_values() -> None:
    z = nested()
    x = njt.nested_tensor_from_jagged(z.values().conj(), z.offsets())
    assert torch.equal((x * 1).values(), z.values().conj() * 1)
    assert torch.equal(x.unbind()[1], z.values().conj()[3:8])
    padded = njt.to_padded_tensor(x, 0)
    assert torch.equal(padded[0, :3], z.values().conj()[:3])


# whose derivatives conjugate what they multiply by
CURVES: dict[str, Callable[[Any], Any]] = {
    "mul": lambda z: z * (z + 1j),
    "div": lambda z: 1j / z,
    "exp": torch.exp,
    "sin": torch.sin,
    "tanh": torch.tanh,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "pow": lambda z: z**3,
    "addcmul": lambda z: torch.addcmul(z, z, z.conj()),
    "rotary": lambda z: torch.view_as_real(z * torch.polar(torch.ones(6), torch.arange(6.0))),
    "var": lambda z: z.var(z.dim() - 2),
    "std": lambda z: z.std(z.dim() - 2),
}


@pytest.mark.parametrize("name", CURVES)
def test_derivatives_of_complex_functions(name: str) -> None:
    z = nested().requires_grad_()
    rows = [c.detach().requires_grad_() for c in z.unbind()]
    outs, references = list(CURVES[name](z).unbind()), [CURVES[name](r) for r in rows]
    cotangents = [torch.randn_like(r) for r in references]
    for ours, theirs in zip(outs, references):
        torch.testing.assert_close(ours, theirs)
    (grad,) = torch.autograd.grad(outs, z, cotangents)
    for ours, theirs in zip(grad.unbind(), torch.autograd.grad(references, rows, cotangents)):
        torch.testing.assert_close(ours, theirs)
