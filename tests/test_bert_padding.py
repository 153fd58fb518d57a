"""C8: `unpad_input` and `pad_input` against plain loops."""

from __future__ import annotations

import pytest
import torch
from torch import func
from torch.autograd import forward_ad

from njt.bert_padding import pad_input, unpad_input

MASK = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])  # a hole, nothing, everything
UNUSED = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]])


@pytest.mark.parametrize("features", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("unused", [None, UNUSED], ids=["plain", "unused rows"])
@pytest.mark.parametrize("as_type", [torch.bool, torch.int32, torch.int64], ids=str)
def test_equals_loop(features, unused, as_type) -> None:
    """C8, C6: outputs in the order, dtypes and shapes that users know, N trailing dims, holes in masks."""
    x = torch.randn(3, 4, *features)
    kept = MASK if unused is None else MASK + unused
    wanted = [(b, s) for b in range(3) for s in range(4) if kept[b, s]]
    rows, indices, cu_seqlens, longest, used = unpad_input(x, MASK.to(as_type), unused)
    assert torch.equal(rows, torch.stack([x[at] for at in wanted]))
    assert indices.tolist() == [b * 4 + s for b, s in wanted]
    assert cu_seqlens.dtype == used.dtype == torch.int32
    assert cu_seqlens.tolist() == [sum(b < i for b, _ in wanted) for i in range(4)]
    assert longest == max(int(row.sum()) for row in kept)
    assert isinstance(longest, int)
    assert used.tolist() == MASK.sum(1).tolist()
    back = pad_input(rows, indices, 3, 4)
    for b in range(3):
        for s in range(4):
            assert torch.equal(back[b, s], x[b, s] if kept[b, s] else torch.zeros(features))


def test_gradients() -> None:
    """C5, C8: twice differentiable; NaN in padding reaches nothing."""
    x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    rows, indices, *_ = unpad_input(x, MASK)

    def there(x):
        return unpad_input(x, MASK)[0] ** 2

    def back(rows):
        return pad_input(rows, indices, 3, 4) ** 2

    packed = rows.detach().requires_grad_()
    for f, at in (there, x), (back, packed):
        assert torch.autograd.gradcheck(f, at)
        assert torch.autograd.gradgradcheck(f, at)
    spoiled = x.detach().masked_fill(MASK[..., None] == 0, torch.nan).requires_grad_()
    rows = unpad_input(spoiled, MASK)[0]
    assert not rows.isnan().any()
    (grad,) = torch.autograd.grad(rows.square().sum(), spoiled)
    assert torch.equal(grad[MASK == 0], torch.zeros(6, 2, dtype=torch.float64)[: (MASK == 0).sum()])


def test_transforms() -> None:
    """Tangents, second derivatives and vmap as of indexing."""
    x, t = torch.randn(2, 3, 4, 2, dtype=torch.float64)
    at = MASK.flatten().nonzero().flatten()

    def ours(x):
        rows, indices, *_ = unpad_input(x, MASK)
        return pad_input(rows.sin(), indices, 3, 4) ** 2

    def theirs(x):
        return (
            torch.zeros(12, 2, dtype=x.dtype)
            .index_put((at,), x.flatten(0, 1)[at].sin())
            .view(3, 4, 2)
            ** 2
        )

    def total(f):
        return lambda x: f(x).sum()

    for make in (
        lambda f: func.jvp(f, (x,), (t,)),
        lambda f: func.vjp(f, x)[1](t),
        lambda f: func.jvp(func.grad(total(f)), (x,), (t,)),
        lambda f: func.hessian(total(f))(x),
    ):
        torch.testing.assert_close(make(ours), make(theirs))
    rows = x.flatten(0, 1)[at]
    both = func.vmap(lambda r: pad_input(r, at, 3, 4), 1, 2)(rows)
    assert torch.equal(both, pad_input(rows, at, 3, 4))
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(ours(forward_ad.make_dual(x, t))).tangent
    torch.testing.assert_close(tangent, func.jvp(theirs, (x,), (t,))[1])


def test_empty_and_refused() -> None:
    rows, indices, cu_seqlens, longest, used = unpad_input(torch.randn(0, 4, 2), torch.ones(0, 4))
    assert (rows.shape, longest, used.shape) == ((0, 2), 0, (0,))
    assert cu_seqlens.tolist() == [0]
    assert pad_input(rows, indices, 0, 4).shape == (0, 4, 2)
    with pytest.raises(
        RuntimeError, match=r"hidden_states \(3, 4, 2\) and attention_mask \(3, 5\)"
    ):
        unpad_input(torch.randn(3, 4, 2), torch.ones(3, 5))
    with pytest.raises(RuntimeError, match=r"got 2 rows and indices \(3,\)"):
        pad_input(torch.randn(2, 2), torch.arange(3), 1, 4)
