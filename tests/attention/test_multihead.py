"""nn.MultiheadAttention and the transformer modules: what each sequence alone gives."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import njt
from tests.samples import BY_NAME, components, sample

EMBED, HEADS = 8, 2


def batch(lengths: tuple[int, ...], size: int = EMBED) -> Tensor:
    return njt.nested_tensor([torch.randn(n, size) for n in lengths])


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(1)
    return nn.MultiheadAttention(EMBED, HEADS, batch_first=True, **options)


def check(module: nn.Module, call: Callable[..., Tensor], *inputs: Tensor) -> None:
    """`call(module, *inputs)` on nested tensors against each component alone: values and all gradients."""
    leaves = [x.values().detach().requires_grad_() for x in inputs]
    ours = call(
        module,
        *(
            njt.nested_tensor_from_jagged(v, x.offsets(), x.lengths())
            for v, x in zip(leaves, inputs)
        ),
    )
    parts = [[c.requires_grad_() for c in components(x)] for x in inputs]
    wanted = [call(module, *(p[None] for p in row))[0] for row in zip(*parts)]
    for o, w in zip(components(ours), wanted):
        torch.testing.assert_close(o, w, rtol=1e-4, atol=1e-5)
    if not ours.requires_grad:
        return
    weights = [torch.randn_like(w) for w in wanted]
    parameters = list(module.parameters())
    loss = sum((o * w).sum() for o, w in zip(ours.unbind(), weights))
    got = torch.autograd.grad(loss, [*leaves, *parameters], allow_unused=True)
    loss = sum((o * w).sum() for o, w in zip(wanted, weights))
    flat = [p for row in parts for p in row]
    theirs = torch.autograd.grad(loss, [*flat, *parameters], allow_unused=True)
    for a, b in zip(got[len(leaves) :], theirs[len(flat) :]):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    mine = [
        c
        for x, g in zip(inputs, got)
        for c in components(njt.nested_tensor_from_jagged(g, x.offsets(), x.lengths()))
    ]
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def triangle(q: Tensor, k: Tensor) -> Tensor:
    """A bool mask, for components alone cut to their size."""
    n, m = (x.max_seqlen if x.is_nested else x.shape[1] for x in (q, k))
    return torch.ones(n, m, dtype=torch.bool).triu(1)


CALLS = {
    "self": lambda m, x: m(x, x, x, need_weights=False)[0],
    "self, weights": lambda m, x: m(x, x, x)[0],
    "mask": lambda m, x: m(x, x, x, need_weights=False, attn_mask=triangle(x, x))[0],
    "mask, weights": lambda m, x: m(x, x, x, attn_mask=triangle(x, x))[0],
    "causal": lambda m, x: m(x, x, x, need_weights=False, attn_mask=triangle(x, x), is_causal=True)[
        0
    ],
    "causal, weights": lambda m, x: m(x, x, x, attn_mask=triangle(x, x), is_causal=True)[0],
}


@pytest.mark.parametrize(
    "name", ["usual", "gaps", "one component", "equal lengths", "int32 offsets"]
)
@pytest.mark.parametrize("call", CALLS)
def test_self_attention(call: str, name: str) -> None:
    layout = BY_NAME[name]
    lengths = tuple(
        n for n in layout.lengths if n
    )  # dense attention of no token is an error in torch's module
    x = sample(type(layout)(**{**vars(layout), "lengths": lengths}), (EMBED,))
    check(attention(), CALLS[call], x)


@pytest.mark.parametrize("weights", [False, True])
def test_cross_attention(weights: bool) -> None:
    q, k = batch((3, 1, 4)), batch((2, 5, 1))
    check(attention(), lambda m, q, k: m(q, k, k, need_weights=weights)[0], q, k)
    v = njt.nested_tensor_from_jagged(torch.randn_like(k.values()), k.offsets())
    check(attention(), lambda m, q, k, v: m(q, k, v, need_weights=weights)[0], q, k, v)


@pytest.mark.parametrize(
    "options", [{"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str
)
def test_options(options: dict[str, bool]) -> None:
    check(attention(**options), CALLS["self"], batch((3, 1, 4)))


def test_other_key_sizes() -> None:
    q, k = batch((3, 1, 4)), batch((2, 5, 1), 6)
    v = njt.nested_tensor_from_jagged(torch.randn(8, 5), k.offsets())
    check(attention(kdim=6, vdim=5), lambda m, q, k, v: m(q, k, v, need_weights=False)[0], q, k, v)


@pytest.mark.parametrize("average", [True, False])
def test_weights_are_padded_with_zeros(average: bool) -> None:
    m, x = attention(), batch((3, 1, 4))
    _, weights = m(x, x, x, average_attn_weights=average)
    assert weights.shape == ((3, 4, 4) if average else (3, HEADS, 4, 4))
    for i, c in enumerate(components(x)):
        n = len(c)
        wanted = m(c[None], c[None], c[None], average_attn_weights=average)[1][0]
        torch.testing.assert_close(weights[i][..., :n, :n], wanted)
        assert weights[i].sum().item() == pytest.approx(wanted.sum().item(), rel=1e-5)


@pytest.mark.parametrize("weights", [False, True])
def test_dense_memory_with_a_padding_mask(weights: bool) -> None:
    m, q, memory = attention(), batch((3, 1, 4)), torch.randn(3, 5, EMBED)
    ignored = torch.arange(5) >= torch.tensor([2, 5, 1])[:, None]
    out, _ = m(q, memory, memory, key_padding_mask=ignored, need_weights=weights)
    for i, (o, c) in enumerate(zip(components(out), components(q))):
        wanted, _ = m(
            c[None], memory[i : i + 1], memory[i : i + 1], key_padding_mask=ignored[i : i + 1]
        )
        torch.testing.assert_close(o, wanted[0])


def encoder(**options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 16, dropout=0.0, batch_first=True, **options)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # norm_first keeps torch from its own nested path, and it says so
        return nn.TransformerEncoder(layer, 2)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
def test_encoder(options: dict[str, Any], train: bool) -> None:
    """b047"""
    check(encoder(**options).train(train), lambda m, x: m(x), batch((4, 7, 1)))
    with torch.no_grad():
        check(encoder(**options).train(train), lambda m, x: m(x), batch((4, 7, 1)))


def test_causal_encoder() -> None:
    check(encoder(), lambda m, x: m(x, mask=triangle(x, x), is_causal=True), batch((4, 7, 1)))


def test_decoder() -> None:
    torch.manual_seed(1)
    layer = nn.TransformerDecoderLayer(EMBED, HEADS, 16, dropout=0.0, batch_first=True)
    decoder = nn.TransformerDecoder(layer, 2)
    target, memory = batch((3, 1, 4)), batch((2, 5, 1))
    check(decoder, lambda m, t, s: m(t, s), target, memory)
    check(
        decoder,
        lambda m, t, s: m(t, s, tgt_mask=triangle(t, t), tgt_is_causal=True),
        target,
        memory,
    )


def test_transformer() -> None:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Transformer(EMBED, HEADS, 1, 1, 16, dropout=0.0, batch_first=True)
    check(model, lambda m, s, t: m(s, t), batch((3, 1, 4)), batch((2, 5, 1)))


@pytest.mark.parametrize("make", [attention, encoder], ids=["attention", "encoder"])
def test_compiled(make: Callable[[], nn.Module]) -> None:
    module = make()
    call = CALLS["self"] if make is attention else lambda m, x: m(x)
    run = torch.compile(lambda x: call(module, x), fullgraph=True, backend="aot_eager")
    check(module, lambda m, x: run(x) if x.is_nested else call(m, x), batch((4, 2, 3)))
    x = batch((2, 6, 3, 1))
    torch.testing.assert_close(run(x).values(), call(module, x).values())


def test_dropout_drops() -> None:
    m, x = attention(dropout=0.5), batch((30, 20))
    out = [m(x, x, x, need_weights=w)[0].values() for w in (True, True, False, False)]
    assert not torch.equal(out[0], out[1])
    assert not torch.equal(out[2], out[3])
    m.eval()
    torch.testing.assert_close(m(x, x, x)[0].values(), m(x, x, x, need_weights=False)[0].values())


def test_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert encoder()(batch((3, 5))).shape[-1] == EMBED
        x = batch((3, 5))
        assert attention()(x, x, x, need_weights=False)[0].dtype is torch.bfloat16


def test_the_door_leaves_dense_modules_alone() -> None:
    m, x = attention().eval(), torch.randn(2, 3, EMBED)
    scripted = torch.jit.script(m)
    torch.testing.assert_close(scripted(x, x, x)[0], m(x, x, x)[0])
    torch.testing.assert_close(copy.deepcopy(m)(x, x, x)[0], m(x, x, x)[0])
    stored = io.BytesIO()
    torch.save(m, stored)
    stored.seek(0)
    torch.testing.assert_close(torch.load(stored, weights_only=False)(x, x, x)[0], m(x, x, x)[0])
    torch.export.export(m, (x, x, x))


def test_masks_that_do_not_go_together() -> None:
    m, x = attention(add_zero_attn=True), batch((3, 5))
    with pytest.raises(NotImplementedError, match="add_zero_attn"):
        m(x, x, x, attn_mask=torch.zeros(5, 5))


def test_a_dense_query_is_refused() -> None:
    m, x = attention(), batch((3, 5))
    with pytest.raises(TypeError, match="a nested query"):
        m(torch.randn(2, 3, EMBED), x, x)
