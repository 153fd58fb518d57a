"""F.scaled_dot_product_attention on nested tensors: each sequence attends to its own keys."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import njt
from tests.reference import Case, PerComponent, check_against_components, grid, run_case
from tests.samples import BY_NAME, STRUCTURES, components, sample

RAGGED_2 = [s for s in STRUCTURES if s.ragged_dim == 2]  # (B, 2, j1, 4)
RAGGED_1 = [s for s in STRUCTURES if s.ragged_dim == 1]  # (B, j1, 4): one head
ATTEND = F.scaled_dot_product_attention


def over(x: Tensor, values: Tensor) -> Tensor:
    return njt.nested_tensor_from_jagged(values, x.offsets(), x.lengths(), jagged_dim=x.ragged_dim)


def key_value(x: Tensor) -> list[Tensor]:
    return [over(x, torch.randn_like(x.values())) for _ in range(2)]


def cut(fn: Any) -> Any:
    """`fn(q, k, v, mask)` where the loop over components sees the mask's corner."""

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if not q.is_nested:
            mask = mask[..., : q.shape[-2], : k.shape[-2]]
        return fn(q, k, v, mask)

    return run


WINDOW = (torch.arange(7)[:, None] - torch.arange(7)).abs() <= 1
CASES = [
    Case("plain", ATTEND, key_value),
    Case("causal", partial(ATTEND, is_causal=True), key_value),
    Case("scale", partial(ATTEND, scale=0.3), key_value),
    Case("window", cut(lambda q, k, v, m: ATTEND(q, k, v, m)), lambda x: [*key_value(x), WINDOW]),
    Case("bias", cut(lambda q, k, v, m: ATTEND(q, k, v, m)), lambda x: [*key_value(x), torch.randn(7, 7)]),
    Case("bias of keys", cut(lambda q, k, v, m: ATTEND(q, k, v, m)),
         lambda x: [*key_value(x), torch.randn(1, 7)]),
]  # fmt: skip
HEADS = [
    Case("bias per component", cut(lambda q, k, v, m: ATTEND(q, k, v, m)),
         lambda x: [*key_value(x), PerComponent(torch.randn(x.shape[0], 2, 7, 7))]),
    Case("bias per head", cut(lambda q, k, v, m: ATTEND(q, k, v, m)),
         lambda x: [*key_value(x), torch.randn(1, 2, 7, 7)]),
    Case("key and value of one head", partial(ATTEND, enable_gqa=True),
         lambda x: [over(x, torch.randn(1, *x.values().shape[1:])) for _ in range(2)], options={"grad": False}),
]  # fmt: skip
LAYOUTS = [*RAGGED_2, *RAGGED_1]


@grid(CASES, LAYOUTS)
def test_equals_loop(case: Case, layout: object) -> None:
    """b049, b051"""
    run_case(case, layout)


@grid(HEADS, RAGGED_2)
def test_heads(case: Case, layout: object) -> None:
    run_case(case, layout)


@pytest.mark.parametrize("case", [*CASES, *HEADS], ids=str)
@pytest.mark.parametrize("name", ["ragged dim 2", "ragged dim 2 with gaps"])
def test_compiled(case: Case, name: str) -> None:
    run_case(case, BY_NAME[name], compiled=True)


def heads(lengths: tuple[int, ...], count: int, size: int = 8) -> Tensor:
    return njt.nested_tensor([torch.randn(n, count, size) for n in lengths]).transpose(1, 2)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("lengths", [(3, 2, 5), (1, 1, 1), (0, 4, 0)])
def test_cross_attention(lengths: tuple[int, ...], masked: bool) -> None:
    q, k, v = heads((4, 1, 2), 2), heads(lengths, 2), heads(lengths, 2)
    mask = torch.randn(4, 5) if masked else None
    out = ATTEND(q, k, v, mask)
    assert out.offsets() is q.offsets()
    for o, a, b, c in zip(*map(components, (out, q, k, v))):
        corner = None if mask is None else mask[: a.shape[1], : b.shape[1]]
        wanted = ATTEND(a[None], b[None], c[None], corner)[0] if b.shape[1] else torch.zeros_like(a)
        torch.testing.assert_close(o, wanted)


@pytest.mark.parametrize(
    "lengths", [(64, 1, 1, 1, 1, 1, 1, 1), (5, 6, 4)], ids=["looped", "padded"]
)
@pytest.mark.parametrize("shape", [(64, 64), (1, 2, 64, 64), (8, 1, 64, 64)])
def test_masks_with_and_without_padding(lengths: tuple[int, ...], shape: tuple[int, ...]) -> None:
    q, k, v = (heads(lengths, 2) for _ in range(3))
    if len(shape) == 4 and shape[0] > 1:
        shape = (len(lengths), *shape[1:])
    mask = torch.randn(shape, requires_grad=True)
    out = ATTEND(q, k, v, mask)
    total = 0
    for i, (o, a, b, c) in enumerate(zip(*map(components, (out, q, k, v)))):
        n = a.shape[1]
        corner = mask[..., :n, :n]
        corner = corner[i if shape[0] > 1 else 0] if len(shape) == 4 else corner
        wanted = ATTEND(a[None], b[None], c[None], corner[None])[0]
        torch.testing.assert_close(o, wanted)
        total = total + wanted.square().sum()
    ours, theirs = (torch.autograd.grad(t, mask)[0] for t in (out.values().square().sum(), total))
    torch.testing.assert_close(ours, theirs)


def test_grouped_heads_with_a_mask() -> None:
    q, k, v = heads((3, 5), 4), heads((3, 5), 2), heads((3, 5), 2)
    out = ATTEND(q, k, v, WINDOW, enable_gqa=True)
    for o, a, b, c in zip(*map(components, (out, q, k, v))):
        n = a.shape[1]
        wanted = ATTEND(a[None], b[None], c[None], WINDOW[:n, :n], enable_gqa=True)[0]
        torch.testing.assert_close(o, wanted)


@pytest.mark.parametrize("mask", [None, WINDOW], ids=["plain", "window"])
def test_autocast_mixes_dtypes(mask: Tensor | None) -> None:
    """Autocast casts all three, b091."""
    q, k, v = heads((3, 5), 2), heads((3, 5), 2).bfloat16(), heads((3, 5), 2)
    with torch.autocast("cpu", torch.bfloat16):
        out = ATTEND(q, k, v, mask)
    assert out.dtype is torch.bfloat16


def test_dense_keys_are_equal_lengths() -> None:
    q, k, v = heads((3, 5), 2), torch.randn(2, 2, 4, 8), torch.randn(2, 2, 4, 8)
    out = ATTEND(q, k, v)
    for i, (o, a) in enumerate(zip(*map(components, (out, q)))):
        torch.testing.assert_close(o, ATTEND(a[None], k[i : i + 1], v[i : i + 1])[0])


def test_tokens_as_batch() -> None:
    """(B, j1, S, D): the ragged dim is a batch dim, as for each component."""
    x = sample(BY_NAME["usual"], (3, 4))
    check_against_components(ATTEND, x, torch.randn_like(x), torch.randn_like(x))


def test_dropout_drops() -> None:
    q = heads((30, 50), 2)
    ones = torch.ones_like(q)
    assert ATTEND(q, q, ones, dropout_p=0.5).values().std() > 0.01


@pytest.mark.parametrize("mask", [torch.ones(2, 2), torch.ones(3, 1, 7, 7), torch.ones(7)])
def test_masks_that_do_not_fit(mask: Tensor) -> None:
    q = heads((3, 5), 2)
    with pytest.raises(RuntimeError, match="a mask that broadcasts to"):
        ATTEND(q, q, q, mask)


def test_a_dense_query_is_refused() -> None:
    k = heads((3, 5), 2)
    with pytest.raises(TypeError, match="a nested query"):
        ATTEND(torch.randn(2, 2, 4, 8), k, k)
