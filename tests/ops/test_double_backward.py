"""Second derivatives through broadcast dense operands, whose first gradients are sums over tokens."""

from __future__ import annotations

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
