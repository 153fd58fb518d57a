"""torch.func and forward mode over nested tensors: each transform must give what it gives on every component.

A line an operator, tried by vjp, jvp and jvp of vjp over the structures where they may differ; then every transform by
itself, and what is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, func
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import njt
from tests.samples import BY_NAME, Layout, components, sample

LAYOUTS = [
    BY_NAME[name]
    for name in (
        "usual",
        "empty components",
        "gaps",
        "bounds unknown",
        "ragged dim 2",
        "ragged dim 2 with gaps",
        "transposed",
    )
]


@dataclass(frozen=True)
class Case:
    """One operator: `fn(x, *others(x))`, differentiated by x and all others.

    Attributes:
        others: further operands; dense ones are seen whole by every component.
        batched: dense others of which component i is given row i, by their place among the operands.
        joined: whether the components' results add up to one dense result; else they are its rows.
        without: names of layouts that the dense operator refuses.
    """

    name: str
    fn: Callable[..., Any]
    others: Callable[[Tensor], Sequence[Tensor]] = lambda x: ()
    batched: tuple[int, ...] = ()
    joined: bool = False
    features: tuple[int, ...] = (4,)
    positive: bool = False
    without: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


EMPTY = ("empty components", "gaps")  # layouts that have components without rows


def _random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


def _alike(x: Tensor) -> tuple[Tensor]:
    return (torch.randn_like(x),)


def _padded(x: Tensor) -> Tensor:
    """(B, *, 5, 4), by ours or by hand."""
    if x.is_nested:
        return njt.to_padded_tensor(x, 0.5, (*x.shape[:-2], 5, 4))
    return F.pad(x, (0, 0, 0, 5 - x.shape[-2]), value=0.5)


def _written(write: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """A function that writes to a tensor of its own, and reads it afterwards."""

    def fn(x: Tensor) -> Tensor:
        y = x * x
        write(y)
        return y * x

    return fn


def _attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The dense one by its backend that has tangents; ours chooses for itself."""
    with nullcontext() if q.is_nested else sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, **options)


CASES = [
    Case("sin", torch.sin),
    Case("exp times self", lambda x: x.exp() * x),
    Case("power and abs", lambda x: x.abs() ** 3),
    Case("log", torch.log, positive=True),
    Case("gelu", F.gelu),
    Case("clamp", lambda x: x.clamp(-1.0, 1.0)),
    Case("where", lambda x: torch.where(x > 0, x * x, -x)),
    Case("masked_fill", lambda x: (x * x).masked_fill(x > 0, 2.0)),
    Case("add scalar", lambda x: 2 - x * 3),
    Case("product of two", lambda x, y: x * y + x, _alike),
    Case("quotient by dense", lambda x, w: x / w, lambda x: (_random(4) + 5,)),
    Case("linear", F.linear, lambda x: (_random(3, 4), _random(3))),
    Case("matmul with dense", torch.matmul, lambda x: (_random(4, 3),)),
    Case(
        "layer_norm",
        lambda x, w, b: F.layer_norm(x, (4,), w, b),
        lambda x: (_random(4), _random(4)),
    ),
    Case("rms_norm", lambda x, w: F.rms_norm(x, (4,), w, 1e-5), lambda x: (_random(4),)),
    Case("softmax", lambda x: x.softmax(-1)),
    Case("softmax over ragged", lambda x: x.softmax(-2)),
    Case("log_softmax over ragged", lambda x: x.log_softmax(-2)),
    Case("sum", lambda x: (x * x).sum(), joined=True),
    Case("sum of features", lambda x: x.sum(-1)),
    Case("sum over ragged", lambda x: (x * x).sum(-2)),
    Case("mean of features", lambda x: (x * x).mean(-1)),
    Case("mean over ragged", lambda x: (x * x).mean(-2), without=EMPTY),
    Case("max over ragged", lambda x: (x * x).amax(-2), without=("empty components", *EMPTY)),
    Case("largest with place", lambda x: x.max(-2).values, without=EMPTY),
    Case("logsumexp over ragged", lambda x: x.logsumexp(-2), without=EMPTY),
    Case("product over ragged", lambda x: x.prod(-2)),
    Case("variance over ragged", lambda x: x.var(-2, unbiased=False), without=EMPTY),
    Case("norm over ragged", lambda x: x.norm(dim=-2), without=EMPTY),
    Case("cumsum over ragged", lambda x: (x * x).cumsum(-2)),
    Case("cumprod over ragged", lambda x: x.cumprod(-2)),
    Case("logcumsumexp over ragged", lambda x: x.logcumsumexp(-2), without=EMPTY),
    Case("sort over ragged", lambda x: (x * x).sort(-2).values),
    Case("flip over ragged", lambda x: (x * x).flip(-2)),
    Case("pad", _padded),
    Case("cat", lambda x, y: torch.cat([x * x, y], -1), _alike),
    Case("stack", lambda x, y: torch.stack([x * y, y], -1), _alike),
    Case("transposed", lambda x: (x * x).transpose(-1, -2) * 2),
    Case("unflatten", lambda x: (x * x).unflatten(-1, (2, 2)).flatten(-2)),
    Case("indexing", lambda x: (x * x)[..., 1:3]),
    Case("select", lambda x: (x * x)[..., 2]),
    Case("split", lambda x: x.split(2, -1)[1] * x.chunk(2, -1)[0]),
    Case("unsqueeze", lambda x: (x * x).unsqueeze(-1).squeeze(-1)),
    Case("dropout, evaluating", lambda x: F.dropout(x * x, 0.5, training=False)),
    Case("mse_loss", lambda x, y: F.mse_loss(x, y, reduction="sum"), _alike, joined=True),
    Case("in place", _written(lambda y: y.mul_(3).add_(y).sin_())),
    Case("in place, by dense", lambda x, w: (x * x).mul_(w).sub_(w), lambda x: (_random(4),)),
    Case("written through select", _written(lambda y: y.select(-1, 1).mul_(3))),
    Case("written through transpose", _written(lambda y: y.transpose(-1, -2).exp_())),
    Case("written through unfold", _written(lambda y: y.unfold(-1, 2, 2)[..., 0].mul_(3))),
    Case("written through narrow", _written(lambda y: y.narrow(-1, 1, 2).copy_(y[..., :2] * 2))),
    Case("assigned", _written(lambda y: y.__setitem__((..., 0), 7.0))),
    Case("assigned by mask", _written(lambda y: y.__setitem__(y > 1, 0.5))),
    Case(
        "embedding",
        lambda x, w: F.embedding((x > 0).long(), w) ** 2 * x.unsqueeze(-1),
        lambda x: (_random(2, 3),),
    ),
    Case(
        "cross_entropy",
        lambda x: F.cross_entropy(x.movedim(-1, 1), x.detach().argmax(-1), reduction="sum"),
        joined=True,
    ),
    Case("attention", _attention, lambda x: (*_alike(x), *_alike(x))),
    Case(
        "causal attention", partial(_attention, is_causal=True), lambda x: (*_alike(x), *_alike(x))
    ),
]


# both sides


def _parts(t: Tensor, count: int, batched: bool) -> list[Tensor]:
    """What each component sees of an operand."""
    if t.is_nested:
        return [c.unsqueeze(0) for c in components(t)]
    return [t[i : i + 1] for i in range(count)] if batched else [t] * count


def _assert_parts(where: str, ours: Tensor, theirs: list[Tensor], joined: bool) -> None:
    """Ours, nested or dense, against the components'."""
    assert type(ours) in (Tensor, njt.NestedTensor), where
    if ours.is_nested:
        pieces = [c.unsqueeze(0) for c in components(ours)]
    elif joined:
        pieces, theirs = [ours], [sum(theirs)]  # type: ignore[list-item]
    else:
        pieces = list(ours.split(1))
    for i, (a, b) in enumerate(zip(pieces, theirs, strict=True)):
        torch.testing.assert_close(
            a, b, rtol=1e-8, atol=1e-10, msg=lambda text, i=i: f"{where}, component {i}: {text}"
        )


def _assert_no_gap_rows(where: str, t: Tensor) -> None:
    """Rows in gaps of a gradient or tangent are 0."""
    if not (t.is_nested and t.lengths() is not None):
        return
    packed = t.values().detach().clone()
    for start, length in zip(t.offsets().tolist(), t.lengths().tolist()):
        packed.narrow(t.ragged_dim - 1, start, length).zero_()
    assert not packed.any(), f"{where}: {packed}"


def check(case: Case, layout: Layout) -> None:
    """vjp, jvp, and jvp of vjp of one case, against the loop."""
    x = sample(layout, case.features, torch.float64, positive=case.positive)
    operands = [x, *case.others(x)]
    count, places = x.offsets().shape[0] - 1, range(len(operands))
    tangents = [torch.randn_like(t) for t in operands]

    def cut(t: Tensor, k: int) -> list[Tensor]:
        return _parts(t, count, k in case.batched)

    their_operands = list(zip(*(cut(t, k) for k, t in enumerate(operands))))
    their_tangents = list(zip(*(cut(t, k) for k, t in enumerate(tangents))))

    out, pull = func.vjp(case.fn, *operands)
    cotangent = torch.randn_like(out)
    gradients = pull(cotangent)
    their_cotangents = [cotangent] * count if case.joined else _parts(cotangent, count, True)
    wanted = []
    for parts, cot in zip(their_operands, their_cotangents):
        their_out, their_pull = func.vjp(case.fn, *parts)
        wanted.append((their_out, their_pull(cot)))
    _assert_parts("value", out, [w for w, _ in wanted], case.joined)
    for k in places:
        shared = not operands[k].is_nested and k not in case.batched
        _assert_parts(f"gradient {k}", gradients[k], [g[k] for _, g in wanted], shared)
        _assert_no_gap_rows(f"gradient {k}", gradients[k])

    out, pushed = func.jvp(case.fn, tuple(operands), tuple(tangents))
    pairs = [func.jvp(case.fn, a, b) for a, b in zip(their_operands, their_tangents)]
    _assert_parts("value under jvp", out, [a for a, _ in pairs], case.joined)
    _assert_parts("tangent", pushed, [b for _, b in pairs], case.joined)
    _assert_no_gap_rows("tangent", pushed)

    def pulled(*ts: Tensor, cotangent: Tensor = cotangent) -> Any:
        return func.vjp(case.fn, *ts)[1](cotangent)

    second = func.jvp(pulled, tuple(operands), tuple(tangents))[1]
    theirs = [
        func.jvp(lambda *ts, c=c: pulled(*ts, cotangent=c), a, b)[1]
        for a, b, c in zip(their_operands, their_tangents, their_cotangents)
    ]
    twice = func.jvp(
        lambda *ts: func.jvp(case.fn, ts, tuple(tangents))[1], tuple(operands), tuple(tangents)
    )[1]
    wanted = [
        func.jvp(lambda *ts, b=b: func.jvp(case.fn, ts, b)[1], a, b)[1]
        for a, b in zip(their_operands, their_tangents)
    ]
    _assert_parts("tangent of tangent", twice, wanted, case.joined)
    _assert_no_gap_rows("tangent of tangent", twice)
    for k in places:
        shared = not operands[k].is_nested and k not in case.batched
        _assert_parts(f"second derivative {k}", second[k], [t[k] for t in theirs], shared)
        _assert_no_gap_rows(f"second derivative {k}", second[k])


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, id=f"{case}-{layout}")
        for case in CASES
        for layout in LAYOUTS
        if str(layout) not in case.without
    ],
)
def test_each_operator(case: Case, layout: Layout) -> None:
    check(case, layout)


@pytest.mark.parametrize("name", EMPTY)
def test_logsumexp_of_nothing_is_flat(name: str) -> None:
    """The dense gradient of an empty logsumexp is NaN; ours leaves the tangents 0 and the other components alone."""
    x = sample(BY_NAME[name], (4,), torch.float64)
    tangent = torch.randn_like(x)
    full, along = (njt.nested_tensor([c for c in components(t) if len(c)]) for t in (x, tangent))
    there = x.seqlens > 0

    def fold(x: Tensor) -> Tensor:
        return x.logsumexp(1)

    out, pushed = func.jvp(fold, (x,), (tangent,))
    wanted, wanted_pushed = func.jvp(
        fold, (full,), (njt.NestedTensor(along.values(), full.structure),)
    )
    torch.testing.assert_close(out[there], wanted)
    torch.testing.assert_close(pushed[there], wanted_pushed)
    assert (out[~there] == -torch.inf).all()
    assert not pushed[~there].any()
    cotangent = torch.randn_like(out)
    (found,) = func.vjp(fold, x)[1](cotangent)
    (expected,) = func.vjp(fold, full)[1](cotangent[there])
    torch.testing.assert_close(torch.cat(components(found)), expected.values())
    _assert_no_gap_rows("gradient", found)


def test_gradients_of_gradients() -> None:
    """grad of grad, value_and_grad, and functional_call of a module."""
    x = sample(BY_NAME["usual"], (4,), torch.float64)
    cubes = func.grad(lambda x: (x**3).sum())
    torch.testing.assert_close(cubes(x).values(), 3 * x.values() ** 2)
    twice = func.grad(lambda x: cubes(x).sum())(x)
    torch.testing.assert_close(twice.values(), 6 * x.values())
    layer = torch.nn.Linear(4, 3, dtype=torch.float64)
    weights = dict(layer.named_parameters())

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return func.functional_call(layer, weights, (x,)).square().sum()

    found, value = func.grad_and_value(loss)(weights, x)
    theirs, wanted = func.grad_and_value(loss)(weights, x.values())
    torch.testing.assert_close(value, wanted)
    torch.testing.assert_close(found, theirs)


@pytest.mark.parametrize("name", ["usual", "gaps"])
@pytest.mark.parametrize("step", [torch.sign, torch.round, lambda x: x * 0])
def test_derivatives_of_steps_can_be_read(step: Callable[[Tensor], Tensor], name: str) -> None:
    """Torch makes such zeros without memory, and operators below autograd crash on them."""
    x = sample(BY_NAME[name], (4,), torch.float64)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(step(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    for zeros in (
        func.vjp(step, x)[1](torch.ones_like(x))[0],
        func.jvp(step, (x,), (torch.ones_like(x),))[1],
        func.grad(lambda x: func.grad(lambda x: step(x).sum())(x).sin().sum())(x),
        tangent,
    ):
        assert not torch.cat(components(zeros)).any()
        assert not zeros.clone().mul_(2).sum()
        assert (njt.to_padded_tensor(zeros + 1, 1.0) == 1).all()


COMPLEX: dict[str, Callable[[Tensor], Tensor]] = {
    "real": lambda x: x.real * 2,
    "conj": lambda x: x.conj() * x,
    "view of conj": lambda x: (x.conj().transpose(-1, -2) * 2).imag,
    "sum of conj": lambda x: x.conj().sum(-2),
    "cumprod": lambda x: x.cumprod(-2),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers(name: str, layout: Layout) -> None:
    """Forward mode by both doors and vjp, also of lazy conjugates, which torch wants alike in primal and tangent."""
    fn, x = COMPLEX[name], sample(layout, (4,), torch.complex128)
    tangent = torch.randn_like(x)
    cotangent = torch.randn_like(fn(x))
    parts, along = components(x.conj().resolve_conj()), components(tangent)
    for primal in (x.conj(), x.conj().resolve_conj()):
        pushed = func.jvp(fn, (primal,), (tangent,))[1]
        with forward_ad.dual_level():
            dual = fn(forward_ad.make_dual(primal, tangent))
            _assert_parts(
                "forward mode",
                forward_ad.unpack_dual(dual).tangent,
                _parts(pushed, len(x), True),
                False,
            )
        wanted = [func.jvp(fn, (c[None],), (t[None],))[1] for c, t in zip(parts, along)]
        _assert_parts("tangent", pushed, wanted, False)
        cuts = zip(parts, _parts(cotangent, len(x), True))
        pulled = [func.vjp(fn, c[None])[1](k)[0] for c, k in cuts]
        _assert_parts("gradient", func.vjp(fn, primal)[1](cotangent)[0], pulled, False)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_jacobians_by_a_weight(layout: Layout) -> None:
    """jacrev, jacfwd and hessian where what they are taken by is dense, and vmap of grad."""
    x, w = sample(layout, (4,), torch.float64), _random(4)

    def rows(x: Tensor, w: Tensor) -> Tensor:
        return (x * w).sin().sum(-2)

    def total(x: Tensor, w: Tensor) -> Tensor:
        return (x * w).exp().sum()

    parts = _parts(x, len(x), True)
    wanted = torch.cat([func.jacrev(rows, 1)(c, w) for c in parts])
    torch.testing.assert_close(func.jacrev(rows, 1)(x, w), wanted)
    torch.testing.assert_close(func.jacfwd(rows, 1)(x, w), wanted)
    curved = sum(func.hessian(total, 1)(c, w) for c in parts)
    torch.testing.assert_close(func.hessian(total, 1)(x, w), curved)
    weights, per_weight = _random(5, 4), func.grad(total, 1)
    torch.testing.assert_close(
        func.vmap(per_weight, (None, 0))(x, weights),
        torch.stack([per_weight(x, w) for w in weights]),
    )


@pytest.mark.parametrize("jacobian", [func.jacrev, func.jacfwd])
def test_jacobians_over_values(jacobian: Any) -> None:
    """The way that a refusal names."""
    x = sample(BY_NAME["usual"], (2,), torch.float64)

    def fn(values: Tensor) -> Tensor:
        return njt.NestedTensor(values, x.structure).softmax(1).values()

    found = jacobian(fn)(x.values())
    wanted = [jacobian(lambda c: c.softmax(0))(c) for c in components(x)]
    assert not found[:3, :, 3:].any()
    torch.testing.assert_close(found[:3, :, :3], wanted[0])
    torch.testing.assert_close(found[4:, :, 4:], wanted[2])


def test_linearize() -> None:
    x, t = (sample(BY_NAME["gaps"], (4,), torch.float64) for _ in range(2))

    def fn(x: Tensor) -> Tensor:
        return x.sin().sum(1)

    out, push = func.linearize(fn, x)
    wanted, pushed = func.jvp(fn, (x,), (t,))
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(push(t), pushed)


def test_compiled() -> None:
    """A transform in a compiled function breaks its graph, and gives what it gives without; with gaps, too."""
    for layout in LAYOUTS:
        x = sample(layout, (4,), torch.float64)
        for fn in (
            lambda x: func.grad(lambda x: (x**3).sum())(x),
            lambda x: func.jvp(lambda x: x.sin(), (x,), (x,))[1],
            lambda x: func.vmap(lambda c: c * 2, -1, -1)(x),
        ):
            ours = torch.compile(fn, backend="aot_eager")(x)
            for a, b in zip(components(ours), components(fn(x)), strict=True):
                torch.testing.assert_close(a, b)


def test_vmap_over_a_feature_dim() -> None:
    x = sample(BY_NAME["usual"], (4,), torch.float64)
    out = func.vmap(lambda c: c * c.sum(1, keepdim=True), in_dims=-1, out_dims=-1)(x)
    torch.testing.assert_close(out.values(), (x * x.sum(1, keepdim=True)).values())
    cubes = func.vmap(func.grad(lambda c: (c**3).sum()), in_dims=-1, out_dims=-1)(x)
    torch.testing.assert_close(cubes.values(), 3 * x.values() ** 2)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def test_custom_function_over_values() -> None:
    x = sample(BY_NAME["gaps"], (4,), torch.float64)

    def fn(x: Tensor) -> Tensor:
        return njt.NestedTensor(_Square.apply(x.values()), x.structure).sum()

    for a, b in zip(components(func.grad(fn)(x)), components(x), strict=True):
        torch.testing.assert_close(a, 2 * b)


REFUSED = {
    "vmap over the batch": ("vmap", lambda x: func.vmap(lambda c: c * 2, in_dims=0)(x)),
    "vmap over the ragged dim": ("vmap", lambda x: func.vmap(lambda c: c * 2, in_dims=1)(x)),
    "vmap to the front": ("vmap", lambda x: func.vmap(lambda w: x * w)(_random(5, 4))),
    "jacrev of nested": ("jacrev", lambda x: func.jacrev(lambda w: x * w)(_random(4))),
    "jacrev by nested": ("vmap", lambda x: func.jacrev(lambda x: x.sum(1))(x)),
    "jacfwd by nested": ("jacfwd", lambda x: func.jacfwd(lambda x: x.sum(1))(x)),
    "hessian by nested": ("jacfwd", lambda x: func.hessian(lambda x: x.sum())(x)),
    "functionalize": ("functionalize", lambda x: func.functionalize(lambda x: x * 2)(x)),
    "custom function": ("autograd.Function", lambda x: func.grad(lambda x: _Square.apply(x).sum())(x)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """What can't be, or is not, is said: by whom, and what to do instead."""
    named, call = REFUSED[name]
    with pytest.raises(NotImplementedError, match=rf"{named}.*\(\): got .* Expected "):
        call(sample(BY_NAME["usual"], (4,), torch.float64))


def test_forward_mode() -> None:
    x, t = (sample(BY_NAME["usual"], (4,), torch.float64) for _ in range(2))
    t = njt.NestedTensor(t.values(), x.structure, 1)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, t)
        tangent = forward_ad.unpack_dual(dual.sin()).tangent
    torch.testing.assert_close(tangent.values(), x.values().cos() * t.values())
