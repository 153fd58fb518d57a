"""Segment operators against the dense operator in a loop over segments: values, gradients, gaps, dtypes, graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from njt.kernels import (
    segments,
    segments_cuda,
    segments_torch,
    segments_triton_pieces,
    segments_triton_scan,
)
from njt.kernels.segments_reference import per_segment, rowwise

TOLERANCE = {
    torch.float64: {"atol": 1e-10, "rtol": 1e-10},
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.bfloat16: {"atol": 3e-2, "rtol": 3e-2},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
}


@dataclass(frozen=True)
class Batch:
    """Lengths of segments, with `gap` rows before and after each."""

    sizes: tuple[int, ...]
    gap: int = 0
    index: torch.dtype = torch.int64

    def place(self) -> dict[str, Any]:
        widths = torch.tensor([self.gap, *(n + self.gap for n in self.sizes)])
        lengths = torch.tensor(self.sizes, dtype=self.index) if self.gap else None
        return {"offsets": widths.cumsum(0).to(self.index), "lengths": lengths}

    @property
    def total(self) -> int:
        return sum(self.sizes) + self.gap * (len(self.sizes) + 1)

    def inside(self) -> Tensor:
        ids = segments.segment_ids(**self.place(), total=self.total)
        return ids < len(self.sizes)

    def values(
        self, dtype: torch.dtype, dim: int, draw: Callable[..., Tensor] = torch.randn
    ) -> Tensor:
        shape = [2, 3, 2][: max(dim, 1) + 1]
        shape[dim] = self.total
        x = draw(shape).to(dtype)
        if dtype.is_floating_point:
            x.movedim(dim, 0)[~self.inside()] = torch.nan
        return x


BATCHES = {
    "usual": Batch((5, 3, 8, 2)),
    "one": Batch((6,)),
    "empty ones": Batch((0, 3, 0, 0, 4, 0)),
    "all empty": Batch((0, 0)),
    "no segment": Batch(()),
    "gaps": Batch((4, 0, 7, 2), gap=2),
    "no segment, gaps": Batch((), gap=2),
    "int32": Batch((5, 3, 8), index=torch.int32),
    "long": Batch((300, 2, 130)),
}


@dataclass(frozen=True)
class Case:
    """`ours(values, offsets, ...)` and the dense operator on one segment; what an empty segment gives."""

    ours: Callable[..., Any]
    dense: Callable[[Tensor, int], Any]
    empty: float | None = None  # None: what the dense operator says
    rows: bool = False
    twice: bool = True
    draw: Callable[..., Tensor] = torch.randn


def ties(shape: list[int]) -> Tensor:
    return torch.randint(-2, 3, shape).double()


def some_nan(shape: list[int]) -> Tensor:
    x = torch.randn(shape)
    return x.masked_fill(torch.rand(shape) < 0.3, torch.nan)


INF = float("inf")
NAN = float("nan")
REDUCTIONS = {
    "sum": Case(segments.sum, torch.sum),
    "mean": Case(segments.mean, torch.mean),
    "amax": Case(segments.amax, torch.amax, -INF),
    "amax of ties": Case(segments.amax, torch.amax, -INF, draw=ties),
    "amin": Case(segments.amin, torch.amin, INF),
    "prod": Case(segments.prod, torch.prod),
    "prod with zeros": Case(segments.prod, torch.prod, draw=ties),
    "logsumexp": Case(segments.logsumexp, torch.logsumexp),
    "nansum": Case(segments.nansum, torch.nansum, draw=some_nan),
    "nanmean": Case(segments.nanmean, torch.nanmean, draw=some_nan),
    "var": Case(segments.var, torch.var, NAN),
    "std": Case(segments.std, torch.std, NAN),
    "population var": Case(
        lambda x, offsets, **k: segments.var(x, offsets, 0, **k),
        lambda x, d: x.var(d, correction=0),
        NAN,
    ),
    "max": Case(lambda *a, **k: segments.max(*a, **k)[0], lambda x, d: x.max(d)[0], -INF),
    "min": Case(lambda *a, **k: segments.min(*a, **k)[0], lambda x, d: x.min(d)[0], INF),
    "median": Case(lambda *a, **k: segments.median(*a, **k)[0], lambda x, d: x.median(d)[0], NAN),
    "nanmedian": Case(
        lambda *a, **k: segments.nanmedian(*a, **k)[0],
        lambda x, d: x.nanmedian(d)[0],
        NAN,
        draw=some_nan,
    ),
    "quantile": Case(
        lambda x, offsets, **k: segments.quantile(x, offsets, 0.3, **k),
        lambda x, d: x.quantile(0.3, d),
        NAN,
    ),
    "first": Case(
        lambda x, offsets, **k: segments.kthvalue(x, offsets, 1, **k)[0],
        lambda x, d: x.kthvalue(1, d)[0],
        0,
    ),
}
for _ord in (1, 2, 3, 0.5, -1, INF, -INF):
    REDUCTIONS[f"norm {_ord}"] = Case(
        lambda x, offsets, ord=_ord, **k: segments.vector_norm(x, offsets, ord, **k),
        lambda x, d, ord=_ord: torch.linalg.vector_norm(x, ord, d),
        0 if _ord > 0 else INF,
    )
ROWWISE = {
    "softmax": Case(segments.softmax, torch.softmax),
    "log_softmax": Case(segments.log_softmax, torch.log_softmax),
    "cumsum": Case(segments.cumsum, torch.cumsum),
    "cumprod": Case(segments.cumprod, torch.cumprod),
    "cumprod with zeros": Case(segments.cumprod, torch.cumprod, draw=ties),
    "logcumsumexp": Case(segments.logcumsumexp, torch.logcumsumexp),
    "cummax": Case(lambda *a, **k: segments.cummax(*a, **k)[0], lambda x, d: x.cummax(d)[0]),
    "cummin": Case(lambda *a, **k: segments.cummin(*a, **k)[0], lambda x, d: x.cummin(d)[0]),
    "sort": Case(lambda *a, **k: segments.sort(*a, **k)[0], lambda x, d: x.sort(d)[0]),
    "sort down": Case(
        lambda x, offsets, **k: segments.sort(x, offsets, True, **k)[0],
        lambda x, d: x.sort(d, descending=True)[0],
    ),
    "flip": Case(segments.flip, lambda x, d: x.flip(d)),
    "roll": Case(
        lambda x, offsets, **k: segments.roll(x, offsets, 3, **k), lambda x, d: x.roll(3, d)
    ),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0:UserWarning")
CASES = {**REDUCTIONS, **ROWWISE}
INTEGERS = {
    "sum": Case(segments.sum, torch.sum),
    "prod": Case(segments.prod, torch.prod),
    "any": Case(segments.any, torch.any),
    "all": Case(segments.all, torch.all),
    "count_nonzero": Case(segments.count_nonzero, torch.count_nonzero),
    "argmax": Case(segments.argmax, torch.argmax, -1),
    "argmin": Case(segments.argmin, torch.argmin, -1),
    "mode": Case(lambda *a, **k: segments.mode(*a, **k)[0], lambda x, d: x.mode(d)[0], 0),
    "median": Case(lambda *a, **k: segments.median(*a, **k)[0], lambda x, d: x.median(d)[0], 0),
    "cumsum": Case(segments.cumsum, torch.cumsum, rows=True),
    "argsort": Case(segments.argsort, lambda x, d: x.argsort(dim=d, stable=True), rows=True),
    "argsort down": Case(
        lambda x, offsets, **k: segments.argsort(x, offsets, True, **k),
        lambda x, d: x.argsort(dim=d, descending=True, stable=True),
        rows=True,
    ),
    "cummax": Case(lambda *a, **k: segments.cummax(*a, **k)[1], lambda x, d: x.cummax(d)[1], rows=True),
}  # fmt: skip


def expected(case: Case, x: Tensor, place: dict[str, Any], dim: int, rows: bool) -> Tensor:
    def dense(part: Tensor, d: int) -> Tensor:
        if part.shape[d] == 0 and case.empty is not None:
            return torch.full_like(part.sum(d), case.empty, dtype=_dtype(case, part, d))
        return case.dense(part, d)

    reference = rowwise if rows else per_segment
    return reference(dense, x, place["offsets"], place["lengths"], dim)


def _dtype(case: Case, part: Tensor, dim: int) -> torch.dtype:
    shape = list(part.shape)
    shape[dim] = 1
    return case.dense(part.new_ones(shape), dim).dtype


def check(case: Case, batch: Batch, dim: int, dtype: torch.dtype, rows: bool) -> None:
    x = batch.values(dtype, dim, case.draw).requires_grad_()
    y = x.detach().clone().requires_grad_()
    place = batch.place()
    ours = case.ours(x, dim=dim, **place)
    if not batch.sizes:
        shape = x.shape if rows else (0, *x.shape[:dim], *x.shape[dim + 1 :])
        assert ours.shape == shape
        assert not ours.any()
        return
    want = expected(case, y, place, dim, rows)
    torch.testing.assert_close(ours, want, equal_nan=True, **TOLERANCE[dtype])
    # a random cotangent; where the result is not finite (an empty segment) there is no gradient to speak of
    finite = want.isfinite()
    cotangent = torch.where(finite, torch.randn(want.shape).to(dtype), 0)
    (got,) = torch.autograd.grad(ours, x, cotangent)
    if want.requires_grad:
        (wanted,) = torch.autograd.grad(torch.where(finite, want, 0), y, cotangent)
    else:
        wanted = torch.zeros_like(y)
    wanted = wanted.nan_to_num(0.0)  # of cotangents 0 some dense formulas make nan
    gaps = ~batch.inside()
    assert not got.movedim(dim, 0)[gaps].any()
    torch.testing.assert_close(got, wanted.masked_fill(gaps.view(*[1] * dim, -1, *[1] * (x.dim() - dim - 1)), 0),
                               equal_nan=True, **TOLERANCE[dtype])  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "dim"),
    [
        *((b, 0) for b in BATCHES),
        ("usual", 1),
        ("gaps", 1),
        ("gaps", 2),
        ("long", 2),
        ("all empty", 1),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_equals_loop(name: str, batch: str, dim: int) -> None:
    check(CASES[name], BATCHES[batch], dim, torch.float64, name in ROWWISE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", ["usual", "gaps"])
@pytest.mark.parametrize(
    "name",
    ["sum", "mean", "amax", "logsumexp", "var", "norm 2", "softmax", "log_softmax", "cumsum", "nanmean", "sort"],
)  # fmt: skip
def test_dtypes(name: str, batch: str, dtype: torch.dtype) -> None:
    check(CASES[name], BATCHES[batch], 0, dtype, name in ROWWISE)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str, batch: str, dtype: torch.dtype) -> None:
    case, chosen = INTEGERS[name], BATCHES[batch]
    if dtype == torch.bool and name in ("mode", "median", "cummax", "argmax", "argmin"):
        return  # there is no dense operator to compare with
    x = torch.randint(0, 4, (chosen.total, 3)).to(dtype)
    place = chosen.place()
    ours = case.ours(x, **place)
    if chosen.sizes:
        want = expected(case, x, place, 0, case.rows)
        torch.testing.assert_close(ours, want)


DIFFERENTIABLE = [
    n for n in CASES if n not in ("nansum", "nanmean", "nanmedian", "norm inf", "norm -inf")
]


@pytest.mark.parametrize("batch", [Batch((3, 2)), Batch((2, 3), gap=1)], ids=["packed", "gaps"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_of_gradients(name: str, batch: Batch) -> None:
    x = batch.values(torch.float64, 0)
    inside = batch.inside()
    place = batch.place()

    def run(inner: Tensor) -> Tensor:
        rows = torch.full_like(x, torch.nan).index_copy(0, inside.nonzero()[:, 0], inner)
        return CASES[name].ours(rows, **place)

    inner = x[inside].requires_grad_()
    assert torch.autograd.gradcheck(run, (inner,))
    assert torch.autograd.gradgradcheck(run, (inner,))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("batch", ["usual", "gaps", "empty ones", "no segment"])
def test_linear_recurrence(batch: str, reverse: bool) -> None:
    chosen = BATCHES[batch]
    x, a = (chosen.values(torch.float64, 0).requires_grad_() for _ in range(2))
    place = chosen.place()
    y = segments.linear_recurrence(x, a, reverse=reverse, **place)
    want = torch.zeros_like(x)
    ends = (
        place["offsets"][1:]
        if place["lengths"] is None
        else place["offsets"][:-1] + place["lengths"]
    )
    for start, stop in zip(place["offsets"].tolist(), ends.tolist()):
        state = torch.zeros_like(x[0])
        for t in range(start, stop)[:: -1 if reverse else 1]:
            state = x[t] + a[t] * state
            want = want.index_copy(0, torch.tensor([t]), state[None])
    torch.testing.assert_close(y, want)
    if chosen.sizes:
        cotangent = torch.randn_like(want)
        for got, wanted in zip(
            torch.autograd.grad(y, (x, a), cotangent), torch.autograd.grad(want, (x, a), cotangent)
        ):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"])
def test_scan_without_lengths_on_the_host(name: str, reverse: bool, batch: str) -> None:
    """The doubling scan, which devices without another one use, against the bucketed one."""
    chosen = BATCHES[batch]
    x, place = chosen.values(torch.float64, 1, ties), chosen.place()
    x = torch.where(torch.rand(x.shape) < 0.1, torch.nan, x) if name.startswith("cum") else x
    ours = segments_torch.scan(x, *place.values(), None, 1, None, name, reverse)
    other = segments_torch.scan_bucketed(x, *place.values(), 1, name, reverse)
    torch.testing.assert_close(ours, other, equal_nan=True)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("descending", [False, True])
def test_sort_without_lengths_on_the_host(batch: str, descending: bool) -> None:
    chosen = BATCHES[batch]
    x, place = chosen.values(torch.float64, 1, ties), chosen.place()
    x = torch.where(torch.rand(x.shape) < 0.2, torch.nan, x)
    x = torch.where(torch.rand(x.shape) < 0.2, INF, x)
    x = torch.where(torch.rand(x.shape) < 0.2, -INF, x)
    ours = segments_torch.sort(x, *place.values(), None, 1, descending)
    other = segments_torch.sort_bucketed(x, *place.values(), 1, descending)
    torch.testing.assert_close(ours, other)
    if chosen.sizes:
        want = rowwise(
            lambda p, d: p.argsort(dim=d, descending=descending, stable=True), x, *place.values(), 1
        )
        torch.testing.assert_close(ours, want)


@pytest.mark.parametrize(
    "name", ["amax", "amin", "argmax", "argmin", "max", "median", "softmax", "logsumexp", "cummax"]
)
def test_nan_and_infinities(name: str) -> None:
    """NaN reaches the result of its own segment and no other; infinities as in the dense operator."""
    x = torch.tensor([1, NAN, 2, INF, 3, -INF, -INF, NAN, NAN, -INF, 5], dtype=torch.float64)
    offsets = torch.tensor([0, 3, 5, 7, 9, 11])
    dense = getattr(torch, name)
    first = (lambda y: y[0]) if name in ("max", "median", "cummax") else lambda y: y
    ours = first(getattr(segments, name)(x, offsets))
    reference = rowwise if name in ("softmax", "cummax") else per_segment
    want = reference(lambda p, d: first(dense(p, d)), x, offsets, None, 0)
    torch.testing.assert_close(ours, want, equal_nan=True)


def test_complex() -> None:
    x = torch.randn(7, 2, dtype=torch.complex128, requires_grad=True)
    offsets = torch.tensor([0, 3, 3, 7])
    for ours, dense in (
        (segments.sum, torch.sum),
        (segments.mean, torch.mean),
        (segments.prod, torch.prod),
    ):
        y, want = ours(x, offsets), per_segment(dense, x, offsets, None, 0)
        torch.testing.assert_close(y, want, equal_nan=True)
        keep = y.isfinite()
        (got,) = torch.autograd.grad(y[keep].abs().sum(), x)
        (wanted,) = torch.autograd.grad(want[keep].abs().sum(), x)
        torch.testing.assert_close(got, wanted)
    for ours, dense in ((segments.cumsum, torch.cumsum), (segments.cumprod, torch.cumprod)):
        y, want = ours(x, offsets), rowwise(dense, x, offsets, None, 0)
        torch.testing.assert_close(y, want)
        (got,) = torch.autograd.grad(y.abs().sum(), x)
        (wanted,) = torch.autograd.grad(want.abs().sum(), x)
        torch.testing.assert_close(got, wanted)


def test_a_million_tenths() -> None:
    x = torch.full((1_000_000, 1), 0.1)
    exact = x.double().sum()
    offsets = torch.tensor([0, 1_000_000])
    for ours in (segments.sum(x, offsets), segments.mean(x, offsets) * 1_000_000):
        assert abs(ours.double().sum() - exact) < 2e-6 * exact


def test_half_types_round_once() -> None:
    ones = torch.ones(100_000, 2, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 100_000])
    assert segments.sum(ones, offsets).tolist() == [[99840.0, 99840.0]]  # 100,000 in bfloat16
    assert segments.mean(ones, offsets).tolist() == [[1.0, 1.0]]


def test_topk() -> None:
    x = torch.randn(9, 2, requires_grad=True)
    offsets = torch.tensor([0, 4, 5, 9])
    top, index = segments.topk(x, offsets, 2)
    assert index[1, 1].tolist() == [-1, -1]
    for b, (i, j) in enumerate(((0, 4), (4, 5), (5, 9))):
        want = x[i:j].topk(min(2, j - i), 0)
        torch.testing.assert_close(top[b, : j - i], want.values)
        torch.testing.assert_close(index[b, : j - i], want.indices)


def test_bucketed_widths() -> None:
    """Blocks hold lengths within a factor of two, so that little of them is padding."""
    widths = []

    def fn(block: Tensor, mask: Tensor) -> Tensor:
        widths.append((block.shape[1], int(mask.sum(1).min())))
        return block.sum(1)

    x = torch.randn(60, 3)
    offsets = torch.tensor([0, 1, 33, 33, 36, 56, 60])
    out = segments.bucketed(fn, x, offsets)
    torch.testing.assert_close(out, segments.sum(x, offsets))
    assert all(width < 2 * shortest or shortest == 0 for width, shortest in widths)
    lengths = offsets.diff()
    torch.testing.assert_close(
        segments.bucketed(fn, x, offsets, host_lengths=lengths.tolist()), out
    )


def test_indices() -> None:
    offsets, lengths = torch.tensor([1, 3, 3, 7]), torch.tensor([1, 0, 2])
    ids = segments.segment_ids(offsets, lengths, 8)
    assert ids.tolist() == [3, 0, 3, 2, 2, 3, 3, 3]
    assert segments.positions(offsets, ids).tolist() == [0, 0, 0, 0, 1, 0, 0, 0]
    assert segments.row_index(offsets, lengths).tolist() == [1, 3, 4]
    assert segments.row_index(offsets, lengths, 3).tolist() == [1, 3, 4]
    assert segments.segment_ids(torch.tensor([0, 2, 2, 3]), None, 3).tolist() == [0, 0, 2]


COMPILED = [n for n in CASES if n not in ("norm 0.5", "norm -1", "norm 3", "population var")]


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_once(name: str, gaps: bool) -> None:
    """One graph for any batch size and total, forward and backward."""
    case = CASES[name]
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)

    compiled = torch.compile(case.ours, fullgraph=True, dynamic=True, backend=backend)
    for sizes in ((5, 3, 8, 2), (4, 2, 9), (2, 6, 1, 3, 3)):
        batch = Batch(sizes, gap=2 * gaps)
        x = batch.values(torch.float64, 0, case.draw).requires_grad_()
        y = x.detach().clone().requires_grad_()
        place = batch.place()
        ours, want = compiled(x, **place), case.ours(y, **place)
        torch.testing.assert_close(ours, want, equal_nan=True)
        cotangent = torch.randn_like(want)
        (got,) = torch.autograd.grad(ours, x, cotangent)
        (wanted,) = torch.autograd.grad(want, y, cotangent)
        torch.testing.assert_close(got, wanted, equal_nan=True)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "name", ["segment_reduce", "segment_softmax", "segment_scan", "segment_sort"]
)
def test_opcheck(name: str) -> None:
    x = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    last = {
        "segment_reduce": ("sum",),
        "segment_softmax": (False,),
        "segment_scan": ("cumsum", False),
        "segment_sort": (False,),
    }
    place = (torch.tensor([0, 3, 3, 7]), None, None, 0, None)
    torch.library.opcheck(getattr(torch.ops.njt, name).default, (x, *place, *last[name]))


def test_dim_is_checked() -> None:
    with pytest.raises(IndexError, match="dim 2"):
        segments.sum(torch.randn(3, 2), torch.tensor([0, 3]), dim=2)
    torch.testing.assert_close(
        segments.sum(torch.ones(2, 3), torch.tensor([0, 3]), dim=-1), torch.tensor([[3.0, 3.0]])
    )


# ---- Triton: through the interpreter where there is no GPU ------------------------------------------
TRITON = "cuda" if torch.cuda.is_available() else "cpu"
TRITON_BATCHES = {
    "usual": Batch((5, 3, 8, 2)),
    "long and empty": Batch((0, 23, 0, 1)),
    "gaps": Batch((4, 0, 7, 2), gap=2, index=torch.int32),
    "all empty": Batch((0, 0)),
}


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy runs the interpreter
@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("batch", TRITON_BATCHES)
@pytest.mark.parametrize("dim", [0, 1])
def test_triton(batch: str, cuts: bool, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel, whole segments or cut ones, against the loop."""
    monkeypatch.setattr(segments_triton_pieces, "CUT", 4)
    monkeypatch.setattr(segments_triton_pieces, "is_cut", lambda *_: cuts)
    chosen = TRITON_BATCHES[batch]
    x = chosen.values(torch.float32, dim)
    place = {k: None if v is None else v.to(TRITON) for k, v in chosen.place().items()}
    on_device = (*place.values(), dim)
    got = {}
    for name in ("sum", "amax", "prod", "logsumexp", "mean"):
        got[name] = segments_cuda.reduce(x.to(TRITON), *on_device, None, name)
        want = expected(REDUCTIONS[name], x, chosen.place(), dim, False)
        torch.testing.assert_close(got[name].cpu(), want, equal_nan=True)
    for log in (False, True):
        y = segments_cuda.softmax(x.to(TRITON), *on_device, None, log)
        leaf = x.clone().requires_grad_()
        name = "log_softmax" if log else "softmax"
        want = expected(ROWWISE[name], leaf, chosen.place(), dim, True)
        torch.testing.assert_close(y.cpu(), want)
        cotangent = torch.randn_like(want)
        (wanted,) = torch.autograd.grad(want, leaf, cotangent)
        gaps = ~chosen.inside()
        cotangent.movedim(dim, 0)[gaps] = torch.nan
        back = segments_cuda.softmax_backward(cotangent.to(TRITON), y, *on_device, None, log)
        torch.testing.assert_close(back.cpu(), wanted.nan_to_num(0.0))
    wide = segments_cuda.broadcast(got["sum"], *on_device, None, x.shape[dim])
    torch.testing.assert_close(wide.cpu(), segments.broadcast(got["sum"].cpu(), **chosen.place(), total=x.shape[dim], dim=dim))  # fmt: skip
    g = torch.randn_like(got["amax"])
    shared = segments_cuda.ties(g, x.round().to(TRITON), got["amax"].round(), *on_device, None)
    want = segments_torch.ties(
        g.cpu(), x.round(), got["amax"].round().cpu(), *chosen.place().values(), None, dim,
        lambda *a: segments.ops.reduce(*a), lambda *a: segments.ops.broadcast(*a),
    )  # fmt: skip
    torch.testing.assert_close(shared.cpu(), want)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]
)  # fmt: skip
def test_triton_dtypes(dtype: torch.dtype) -> None:
    offsets = torch.tensor([0, 3, 3, 7], device=TRITON)
    x = torch.randint(0, 5, (7, 3)).to(dtype).to(TRITON)
    for name in ("sum", "amax", "amin") if not dtype.is_complex else ("sum", "mean"):
        if dtype == torch.bool and name == "sum":
            continue
        ours = segments_cuda.reduce(x, offsets, None, 0, None, name)
        want = torch.ops.njt.segment_reduce(x.cpu(), offsets.cpu(), None, None, 0, None, name)
        torch.testing.assert_close(ours.cpu(), want, equal_nan=True)
    ours = segments_cuda.broadcast(x[:3], offsets, None, 0, None, 7)
    torch.testing.assert_close(ours.cpu(), x[:3].cpu()[[0, 0, 0, 2, 2, 2, 2]])


@pytest.mark.parametrize("name", ["amax", "amin", "logsumexp", "softmax", "log_softmax"])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_triton_nan_and_infinities(name: str) -> None:
    x = torch.tensor([1, NAN, 2, INF, 3, -INF, -INF, NAN, NAN, -INF, 5])
    offsets = torch.tensor([0, 3, 5, 7, 9, 11])
    place = (x.to(TRITON), offsets.to(TRITON), None, 0, None)
    if "softmax" in name:
        ours = segments_cuda.softmax(*place, name == "log_softmax")
        want = rowwise(getattr(torch, name), x, offsets, None, 0)
    else:
        ours = segments_cuda.reduce(*place, name)
        want = per_segment(getattr(torch, name), x, offsets, None, 0)
    torch.testing.assert_close(ours.cpu(), want, equal_nan=True)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"])
@pytest.mark.parametrize("batch", ["usual", "gaps"])
def test_triton_scan(batch: str, name: str, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles a segment, with ties and nan, against the scan by doubling."""
    monkeypatch.setattr(segments_triton_scan, "_TILE", 8)
    chosen = TRITON_BATCHES[batch]
    x = chosen.values(torch.float32, 1, ties)
    x = torch.where(torch.rand(x.shape) < 0.1, torch.nan, x)
    place = [None if v is None else v.to(TRITON) for v in chosen.place().values()]
    ours = segments_triton_scan.scan(x.to(TRITON), *place, 1, name, reverse)
    want = segments_torch.scan(x, *chosen.place().values(), None, 1, None, name, reverse)
    torch.testing.assert_close(ours.cpu(), want, equal_nan=True)


@pytest.mark.parametrize("reverse", [False, True])
def test_triton_recurrence(reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments_triton_scan, "_TILE", 8)
    chosen = TRITON_BATCHES["gaps"]
    x, decay = (chosen.values(torch.float32, 0) for _ in range(2))
    place = [None if v is None else v.to(TRITON) for v in chosen.place().values()]
    ours = segments_triton_scan.scan(
        x.to(TRITON), *place, 0, "recurrence", reverse, decay=decay.to(TRITON)
    )
    want = segments_torch.recurrence(x, decay, *chosen.place().values(), None, 0, None, reverse)
    torch.testing.assert_close(ours.cpu(), want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("batch", ["usual", "gaps", "long"])
@pytest.mark.parametrize("name", CASES)
def test_cuda_equals_cpu_without_a_sync(name: str, batch: str) -> None:
    case, chosen = CASES[name], BATCHES[batch]
    x = chosen.values(torch.float64, 1, case.draw).requires_grad_()
    y = x.detach().cuda().requires_grad_()
    place = chosen.place()
    on_cuda = {k: None if v is None else v.cuda() for k, v in place.items()}
    want = case.ours(x, dim=1, **place)
    cotangent = torch.randn_like(want)
    there = cotangent.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = case.ours(y, dim=1, **on_cuda)
        (got,) = torch.autograd.grad(ours, y, there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(ours.cpu(), want, equal_nan=True)
    (wanted,) = torch.autograd.grad(want, x, cotangent)
    torch.testing.assert_close(got.cpu(), wanted, equal_nan=True)
