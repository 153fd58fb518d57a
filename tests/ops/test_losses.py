"""Losses: without reduction token by token, with one over all real elements of the batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import njt
from tests.reference import Case, grid, run_case
from tests.samples import BY_NAME, STRUCTURES, USUAL, components, sample

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using a target size"),  # dense torch's own advice
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides"),
]
RAGGED_1 = [s for s in STRUCTURES if s.ragged_dim == 1]
RAGGED_2 = [s for s in STRUCTURES if s.ragged_dim == 2]


def over(x: Tensor, values: Tensor, ragged_dim: int | None = None) -> Tensor:
    return njt.nested_tensor_from_jagged(
        values, x.offsets(), x.lengths(), jagged_dim=ragged_dim or x.ragged_dim
    )


def alike(x: Tensor) -> list[Tensor]:
    return [over(x, torch.rand_like(x.values()))]


def classes(x: Tensor) -> list[Tensor]:
    """Class indices of (B, j1, 4), or of (B, 2, j1, ...)."""
    if x.ragged_dim == 1:
        return [over(x, torch.randint(0, 4, x.values().shape[:1]))]
    shape = x.values().shape
    return [over(x, torch.randint(0, shape[0], shape[1:]), x.ragged_dim - 1)]


def signs(x: Tensor) -> list[Tensor]:
    return [*alike(x), over(x, torch.randint(0, 2, x.values().shape[:1]) * 2 - 1)]


def sigmoid(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y, **options: loss(x.sigmoid(), y, **options)


ELEMENT = {
    "mse_loss": (F.mse_loss, alike),
    "l1_loss": (F.l1_loss, alike),
    "smooth_l1_loss": (partial(F.smooth_l1_loss, beta=0.5), alike),
    "huber_loss": (partial(F.huber_loss, delta=0.7), alike),
    "binary_cross_entropy": (sigmoid(F.binary_cross_entropy), alike),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, alike),
    "kl_div": (F.kl_div, alike),
    "soft_margin_loss": (lambda x, y, **o: F.soft_margin_loss(x, y.detach(), **o), alike),
    "poisson_nll_loss": (F.poisson_nll_loss, alike),
    "gaussian_nll_loss": (lambda x, y, **o: F.gaussian_nll_loss(x, y, y + 0.5, **o), alike),
    "hinge_embedding_loss": (F.hinge_embedding_loss, alike),
    "dense target": (F.mse_loss, lambda x: [torch.rand(4)]),
    "weights": (lambda x, y, w, **o: F.binary_cross_entropy_with_logits(x, y, weight=w.detach(), **o),
                lambda x: [*alike(x), torch.rand(4)]),
}  # fmt: skip
CLASSES = {
    "cross_entropy": (F.cross_entropy, classes),
    "label smoothing": (partial(F.cross_entropy, label_smoothing=0.1), classes),
    "ignore_index": (partial(F.cross_entropy, ignore_index=1), classes),
    "nll_loss": (lambda x, y, **o: F.nll_loss(x, y, **o), classes),
    "probabilities": (F.cross_entropy, alike),
}
VECTORS = {
    "cosine_embedding_loss": (F.cosine_embedding_loss, signs),
    "triplet_margin_loss": (lambda x, y, **o: F.triplet_margin_loss(x, y, x * y, **o), alike),
    "multi_margin_loss": (F.multi_margin_loss, classes),
}


def cases(table: dict[str, Any]) -> list[Case]:
    """Every loss without reduction, as the loop over components sees it (batch of one)."""
    # torch's nll_loss2d of transposed logits has no backward
    without = {"nll_loss": ["transposed"]}
    return [
        Case(n, partial(fn, reduction="none"), others, without=without.get(n, ()))
        for n, (fn, others) in table.items()
    ]


@grid(cases(ELEMENT))
def test_elements(case: Case, layout: object) -> None:
    run_case(case, layout, gradgrad=True)


@grid(cases(CLASSES), RAGGED_2)
def test_classes_in_dim_1(case: Case, layout: object) -> None:
    run_case(case, layout)


def reduced(
    fn: Callable[..., Any], x: Tensor, others: list[Tensor], reduction: str
) -> tuple[Tensor, Tensor]:
    """The loss of nested operands, and of all their tokens as one dense batch."""
    ours = fn(x, *others, reduction=reduction)
    whole = [torch.cat(components(t), t.ragged_dim - 1) if t.is_nested else t for t in (x, *others)]
    if x.ragged_dim > 1:
        whole = [t.unsqueeze(0) if o.is_nested else t for t, o in zip(whole, (x, *others))]
    leaf = whole[0].requires_grad_()
    wanted = fn(leaf, *whole[1:], reduction=reduction)
    torch.testing.assert_close(ours, wanted)
    (ours_grad,) = torch.autograd.grad(ours, x)
    (wanted_grad,) = torch.autograd.grad(wanted, leaf)
    packed = torch.cat(components(ours_grad), ours_grad.ragged_dim - 1)
    torch.testing.assert_close(packed, wanted_grad if x.ragged_dim == 1 else wanted_grad.squeeze(0))
    return ours, wanted


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("layout", [s for s in RAGGED_1 if sum(s.lengths)], ids=str)
@pytest.mark.parametrize("name", [*ELEMENT, *CLASSES, *VECTORS])
def test_reductions_count_real_elements(name: str, layout: object, reduction: str) -> None:
    """The mean over all real elements of the batch, b021."""
    fn, others = {**ELEMENT, **CLASSES, **VECTORS}[name]
    x = sample(layout).detach()
    reduced(fn, x.requires_grad_(), others(x), reduction)


@pytest.mark.parametrize("name", ["usual", "gaps"])
@pytest.mark.parametrize("loss", [*CLASSES, *VECTORS])
def test_token_losses(loss: str, name: str) -> None:
    fn, others = {**CLASSES, **VECTORS}[loss]
    x = sample(BY_NAME[name])
    given = others(x)
    out = fn(x, *given, reduction="none")
    for i, c in enumerate(components(x)):
        wanted = fn(c, *(components(o)[i] for o in given), reduction="none")
        torch.testing.assert_close(components(out)[i], wanted)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("name", sorted({*ELEMENT, *CLASSES, *VECTORS} - {"gaussian_nll_loss"}))
def test_compiled(name: str, reduction: str) -> None:
    fn, others = {**ELEMENT, **CLASSES, **VECTORS}[name]
    x = sample(USUAL)
    run = torch.compile(partial(fn, reduction=reduction), fullgraph=True, backend="aot_eager")
    given = others(x)
    out, wanted = run(x, *given), fn(x, *given, reduction=reduction)
    if reduction == "none":
        out, wanted = out.values(), wanted.values()
    torch.testing.assert_close(out, wanted)


def test_a_mean_of_nothing_is_nan() -> None:
    x = sample(BY_NAME["all empty"])
    assert F.mse_loss(x, x * 2).isnan()
    assert F.mse_loss(x, x * 2, reduction="sum") == 0


def test_batchmean_divides_by_components() -> None:
    x = sample(USUAL)
    (y,) = alike(x)
    wanted = F.kl_div(x.values(), y.values(), reduction="sum") / 3
    torch.testing.assert_close(F.kl_div(x, y, reduction="batchmean"), wanted)


SIMILAR = [
    Case("cosine_similarity", lambda x, y: F.cosine_similarity(x, y, -1), alike),
    Case("pairwise_distance", F.pairwise_distance, alike),
]


@grid(SIMILAR)
def test_similarity(case: Case, layout: object) -> None:
    run_case(case, layout)


def test_a_dense_target_of_classes_is_refused() -> None:
    with pytest.raises(TypeError, match="nested target"):
        F.cross_entropy(sample(USUAL), torch.zeros(8, dtype=torch.int64))


def test_other_lengths_are_refused() -> None:
    x = sample(USUAL)
    with pytest.raises(RuntimeError, match="equal lengths"):
        F.mse_loss(x, sample(BY_NAME["one component"]))


def test_operands_that_do_not_fit() -> None:
    """A batch or rank that dense refuses is not cut to size."""
    x = njt.nested_tensor([torch.randn(2, 4), torch.randn(3, 4), torch.randn(1, 4)])
    for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss):
        with pytest.raises(RuntimeError, match="the batch sizes differ"):
            loss(x, torch.randn(4, 1, 4))
        with pytest.raises(RuntimeError, match="operands of one rank"):
            loss(x, x.unsqueeze(2))
