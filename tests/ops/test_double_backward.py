"""Second derivatives through broadcast dense operands, whose first gradients are sums over tokens."""

from __future__ import annotations

import pytest
import torch

import njt


def test_broadcast_operands_twice() -> None:
    values = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    row = torch.randn(1, 3, dtype=torch.float64, requires_grad=True)
    per_component = torch.randn(2, 1, 3, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, 2, 6])

    def f(v, w, b):
        x = njt.nested_tensor_from_jagged(v, offsets)
        return ((x * w + b) * (x * b)).values()

    assert torch.autograd.gradgradcheck(f, (values, row, per_component))


@pytest.mark.parametrize("complex_values", [False, True])
def test_a_gradient_without_storage(complex_values: bool) -> None:
    """The derivative of a step function is a tensor of zeros without memory."""
    dtype = torch.complex64 if complex_values else torch.float32
    x = njt.nested_tensor([torch.rand(2, 3), torch.rand(3, 3)]).to(dtype).requires_grad_()
    y = (x * 1).sgn_() if not complex_values else (x * 1).real.sgn()
    (grad,) = torch.autograd.grad(y.values().sum(), x)
    assert torch.equal(grad.values(), torch.zeros(5, 3, dtype=dtype))


@pytest.mark.parametrize("part", ["real", "imag"])
def test_parts_of_complex_numbers(part: str) -> None:
    """As attributes, which torch keeps apart from its functions."""
    values = torch.randn(5, 3, dtype=torch.complex64)
    leaf = values.clone().requires_grad_()
    getattr(leaf, part).square().sum().backward()
    x = njt.nested_tensor_from_jagged(values, torch.tensor([0, 2, 5])).requires_grad_()
    getattr(x, part).square().sum().backward()
    torch.testing.assert_close(x.grad.values(), leaf.grad)
