"""FlopCounterMode counts true ragged FLOPs, forward and backward (issue b087)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import njt


def counted(fn) -> int:
    with FlopCounterMode(display=False) as mode:
        fn()
    return mode.get_total_flops()


def test_linear_counts_tokens_as_the_dense_call_on_values() -> None:
    values = torch.randn(7, 4, requires_grad=True)
    weight = torch.randn(5, 4, requires_grad=True)
    x = njt.nested_tensor_from_jagged(values, torch.tensor([0, 3, 3, 7]))
    assert counted(lambda: F.linear(x, weight)) == 2 * 7 * 4 * 5
    step = counted(lambda: F.linear(x, weight).values().sum().backward())
    assert step == counted(lambda: F.linear(values, weight).sum().backward())


def test_attention_counts_each_sequence() -> None:
    lengths, heads, width = (3, 1, 4), 2, 8
    x = njt.nested_tensor([torch.randn(n, heads, width) for n in lengths]).transpose(1, 2)
    total = counted(lambda: F.scaled_dot_product_attention(x, x, x))
    assert total == sum(2 * n * n * heads * width * 2 for n in lengths)


def test_grouped_products_count_rows_in_use() -> None:
    x = njt.nested_tensor([torch.randn(n, 4) for n in (3, 1, 4)])
    matrices = torch.randn(3, 4, 5)
    gaps = njt.nested_tensor_from_jagged(
        torch.randn(11, 4), torch.tensor([0, 4, 6, 11]), torch.tensor([3, 1, 4])
    )
    for batch in (x, gaps):
        assert counted(lambda batch=batch: batch @ matrices) == 2 * 8 * 4 * 5
        assert counted(lambda batch=batch: batch.transpose(1, 2) @ batch) == 2 * 8 * 4 * 4
