"""Convolution and pooling: along each component's rows, and over the features of each token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import njt
from tests.reference import Case, check_against_components, run_case
from tests.samples import BY_NAME, Layout, sample

LONG = [
    Layout("usual", (5, 3, 7), ragged_dim=2),
    Layout("one component", (5,), ragged_dim=2),
    Layout("gaps", (5, 3, 7), ragged_dim=2, gaps=True),
    Layout("transposed", (5, 3, 7), ragged_dim=2, transposed=True),
    Layout("bounds unknown", (5, 3, 7), ragged_dim=2, bounds=False),
    Layout("int32 offsets", (5, 3, 7), ragged_dim=2, offsets_dtype=torch.int32),
]


def weights(*shape: int):
    return lambda x: (torch.randn(shape), torch.randn(shape[0]))


SAME = [
    Case("conv1d, same", lambda x, w, b: F.conv1d(x, w, b, padding=1), weights(4, 2, 3), features=()),
    Case('conv1d, "same", even kernel', lambda x, w, b: F.conv1d(x, w, b, padding="same"), weights(4, 2, 4),
         features=()),
    Case("conv1d, depthwise", lambda x, w, b: F.conv1d(x, w, b, padding=1, groups=2), weights(2, 1, 3), features=()),
    Case("conv1d, dilated", lambda x, w, b: F.conv1d(x, w, b, padding=2, dilation=2), weights(4, 2, 3), features=()),
    Case("conv2d, one ragged dim", lambda x, w, b: F.conv2d(x, w, b, padding=1), weights(4, 2, 3, 3), features=(4,)),
    Case("conv1d, kernel 1", lambda x, w, b: F.conv1d(x, w, b), weights(4, 2, 1), features=()),
    Case("conv2d, kernel 1 in the ragged dim", lambda x, w, b: F.conv2d(x, w, b, padding=(0, 1)),
         weights(4, 2, 1, 3), features=(4,)),
    Case('conv1d, "same", wide', lambda x, w, b: F.conv1d(x, w, b, padding="same"), weights(4, 2, 6), features=()),
    Case("max_pool1d, same", lambda x: F.max_pool1d(x, 3, 1, 1), features=()),
    Case("avg_pool1d, same", lambda x: F.avg_pool1d(x, 3, 1, 1), features=()),
]  # fmt: skip
OTHER = [
    Case("conv1d, valid", lambda x, w, b: F.conv1d(x, w, b), weights(4, 2, 3), features=()),
    Case("conv1d, stride", lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1), weights(4, 2, 3), features=()),
    Case("conv1d, wide padding", lambda x, w, b: F.conv1d(x, w, b, padding=4), weights(4, 2, 3), features=()),
    Case('conv2d, "same"', lambda x, w, b: F.conv2d(x, w, b, padding="same"), weights(4, 2, 2, 3), features=(4,)),
    Case("max_pool1d", lambda x: F.max_pool1d(x, 2), features=()),
    Case("max_pool1d, stride", lambda x: F.max_pool1d(x, 3, 2, 1), features=()),
    Case("max_pool2d", lambda x: F.max_pool2d(x, 2), features=(4,)),
    Case("avg_pool1d", lambda x: F.avg_pool1d(x, 3, 2), features=()),
    Case("avg_pool1d, padding not counted",
         lambda x: F.avg_pool1d(x, 3, 2, 1, count_include_pad=False), features=()),
    Case("avg_pool2d", lambda x: F.avg_pool2d(x, 2, 1, 1), features=(4,)),
]  # fmt: skip
TOKENS = [
    Case("conv1d of tokens", lambda x, w, b: _tokens(F.conv1d, x, w, b), weights(3, 2, 3), features=(2, 5)),
    Case("conv2d of tokens", lambda x, w, b: _tokens(F.conv2d, x, w, b), weights(3, 2, 2, 2), features=(2, 4, 4)),
    Case("avg_pool1d of features", lambda x: F.avg_pool1d(x, 3, 2), features=(7,)),
    Case("max_pool1d of features", lambda x: F.max_pool1d(x, 3, 2), features=(7,)),
    Case("adaptive_avg_pool1d of features", lambda x: F.adaptive_avg_pool1d(x, 2), features=(7,)),
    Case("adaptive_max_pool1d of features", lambda x: F.adaptive_max_pool1d(x, 2), features=(7,)),
    Case("pad features", lambda x: F.pad(x, (1, 2)), features=(4,)),
    Case("pad two features", lambda x: F.pad(x, (1, 2, 0, 3), value=2.0), features=(4, 3)),
    Case("reflect features", lambda x: F.pad(x, (1, 2), "reflect"), features=(4,)),
]  # fmt: skip
LOOPED = [
    Case("max_pool1d, ceil_mode", lambda x: F.max_pool1d(x, 2, ceil_mode=True), features=()),
    Case("adaptive_avg_pool1d over rows", lambda x: F.adaptive_avg_pool1d(x, 2), features=()),
    Case("pad rows", lambda x: F.pad(x, (1, 2)), features=()),
    Case("replicate rows", lambda x: F.pad(x, (1, 2), "replicate"), features=()),
]
RAGGED_1 = [
    Layout("gaps", (2, 1, 3), gaps=True),
    *(BY_NAME[n] for n in ("usual", "one component", "int32 offsets", "strided values")),
]
pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even"
)  # dense torch's own


def _tokens(fn, x, *weights):
    """The loop sees (1, n, *), where n tokens are the batch."""
    return fn(x, *weights) if x.is_nested else fn(x.squeeze(0), *weights).unsqueeze(0)


def _run(case: Case, layout: Layout, **options) -> None:
    tolerance = (1e-4, 1e-4)
    run_case(case, layout, tolerance=tolerance, **options)


@pytest.mark.parametrize("layout", LONG, ids=str)
@pytest.mark.parametrize("case", SAME, ids=str)
def test_lengths_stay(case: Case, layout: Layout) -> None:
    """b015"""
    _run(case, layout, gradgrad="conv1d" in case.name)


@pytest.mark.parametrize("layout", LONG, ids=str)
@pytest.mark.parametrize("case", OTHER, ids=str)
def test_lengths_change(case: Case, layout: Layout) -> None:
    _run(case, layout)


@pytest.mark.parametrize("layout", RAGGED_1, ids=str)
@pytest.mark.parametrize("case", TOKENS, ids=str)
def test_over_features(case: Case, layout: Layout) -> None:
    """b013"""
    _run(case, layout)


@pytest.mark.parametrize("case", [*SAME, *TOKENS], ids=str)
def test_compiled(case: Case) -> None:
    _run(case, LONG[0] if case in SAME else RAGGED_1[0], compiled=True)


@pytest.mark.filterwarnings("ignore:.*runs once per component")
@pytest.mark.parametrize("case", LOOPED, ids=str)
def test_component_by_component(case: Case) -> None:
    _run(case, LONG[0])


@pytest.mark.parametrize("lengths", [(), (0, 0), (0, 4, 0)])
def test_kernel_1_of_few_rows(lengths: tuple[int, ...]) -> None:
    x = sample(Layout("few", lengths, ragged_dim=2), ()).detach().requires_grad_()
    w = torch.randn(3, 2, 1)
    out = F.conv1d(x, w)
    torch.testing.assert_close(out.values(), w[..., 0] @ x.values())
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.values().shape == x.values().shape


def test_empty_components_stay_empty() -> None:
    x = njt.nested_tensor([torch.randn(n, 2) for n in (0, 4, 0)]).transpose(1, 2)
    w = torch.randn(3, 2, 3)
    out = F.conv1d(x, w, padding=1)
    assert out.seqlens.tolist() == [0, 4, 0]
    torch.testing.assert_close(out.values(), F.conv1d(x.values(), w, padding=1))
    with pytest.raises(RuntimeError, match="component of length 0"):
        F.conv1d(x, w)


def test_no_component() -> None:
    x = sample(Layout("none", (), ragged_dim=2), ())
    assert F.conv1d(x, torch.randn(3, 2, 3), padding=1).shape[:2] == (0, 3)


def test_dense_raises_for_short_components_and_so_do_we() -> None:
    x = sample(Layout("short", (5, 1), ragged_dim=2), ())
    check_against_components(F.conv1d, x, torch.randn(3, 2, 3), raises=RuntimeError)


def test_ragged_channels_are_refused() -> None:
    with pytest.raises(RuntimeError, match="channels before the ragged dim"):
        F.conv1d(sample(BY_NAME["usual"]), torch.randn(3, 2, 3))


def test_a_module_with_circular_padding() -> None:
    conv = torch.nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular")
    njt.rules.per_component.FALLBACKS.clear()
    with pytest.warns(UserWarning, match="once per component"):
        check_against_components(
            conv, sample(LONG[0], ()), tolerance=(1e-4, 1e-4), new_structure=True
        )
