"""Reductions: every combination of batch, ragged and feature dims, every call form, torch.masked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import njt
from tests.reference import Case, check_against_components, grid, run_case
from tests.samples import BY_NAME, STRUCTURES, Layout, components, sample

# dense var says so of components of one row
pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")

EMPTY = [str(layout) for layout in STRUCTURES if layout.lengths and min(layout.lengths) == 0]
INF = float("inf")


def ragged(x: Tensor) -> int:
    """The dim that is ragged; the loop's components have it where their size differs from the others'."""
    return x.ragged_dim if x.is_nested else RAGGED[0]


# the loop's side sees dense components, which don't know their ragged dim
RAGGED = [1]


def over(f: Callable[..., Any], *where: str, **options: Any) -> Callable[[Tensor], Any]:
    """`f` over the ragged dim ("r"), the last dim ("f") or both; one of them alone as an int."""

    def call(x: Tensor) -> Any:
        dims = [ragged(x) if w == "r" else x.dim() - 1 for w in where]
        return f(x, dim=dims[0] if len(dims) == 1 else tuple(dims), **options)

    return call


TWICE = {"gradgrad": True}
NO_GRAD = {"grad": False}
EXACT = {"raises": IndexError, "grad": True}

RAGGED_DIM = [
    Case("sum", over(torch.sum, "r"), options=TWICE),
    Case("sum kept", over(torch.sum, "r", keepdim=True)),
    Case("sum int", over(torch.sum, "r"), dtype=torch.int32),
    Case("sum bool", over(torch.sum, "r"), dtype=torch.bool),
    Case("sum to double", over(torch.sum, "r", dtype=torch.float64)),
    Case("sum half", over(torch.sum, "r"), dtype=torch.bfloat16),
    Case("sum complex", over(torch.sum, "r"), dtype=torch.complex64),
    Case("nansum", over(torch.nansum, "r")),
    Case("mean", over(torch.mean, "r"), options=TWICE),
    Case("mean kept", over(torch.mean, "r", keepdim=True)),
    Case("mean of int to float", over(torch.mean, "r", dtype=torch.float32), dtype=torch.int64),
    Case("nanmean", over(torch.nanmean, "r")),
    Case("prod", over(torch.prod, "r"), options=TWICE),
    Case("prod kept", over(torch.prod, "r", keepdim=True)),
    Case("prod int", over(torch.prod, "r"), dtype=torch.int64),
    Case("amax", over(torch.amax, "r"), options={"raises": IndexError, "gradgrad": True}),
    Case("amax kept", over(torch.amax, "r", keepdim=True), options=EXACT),
    Case("amax int", over(torch.amax, "r"), dtype=torch.int32, options=EXACT),
    Case("amin", over(torch.amin, "r"), options=EXACT),
    Case("amin bool", over(torch.amin, "r"), dtype=torch.bool, options=EXACT),
    Case("any", over(torch.any, "r"), dtype=torch.bool),
    Case("any of floats", over(torch.any, "r"), options=NO_GRAD),
    Case("all kept", over(torch.all, "r", keepdim=True), dtype=torch.bool),
    Case("logsumexp", over(torch.logsumexp, "r"), options=TWICE),
    Case("logsumexp kept", over(torch.logsumexp, "r", keepdim=True)),
    Case("logsumexp complex", over(torch.logsumexp, "r"), dtype=torch.complex128, without=EMPTY),
    Case("argmax", over(torch.argmax, "r"), options=EXACT),
    Case("argmin kept", over(torch.argmin, "r", keepdim=True), options=EXACT),
    Case("count_nonzero", over(torch.count_nonzero, "r"), dtype=torch.int64),
    Case("var", over(torch.var, "r"), without=EMPTY, options=TWICE),
    Case("var kept", over(torch.var, "r", correction=0, keepdim=True), without=EMPTY),
    Case("var biased", over(torch.var, "r", unbiased=False), without=EMPTY),
    Case("std biased", over(torch.std, "r", correction=0), without=EMPTY, features=(3,)),
    Case("var_mean", over(torch.var_mean, "r"), without=EMPTY),
    Case("std_mean", over(torch.std_mean, "r", correction=0), without=EMPTY),
    Case("max", over(torch.max, "r"), options=EXACT),
    Case("min kept", over(torch.min, "r", keepdim=True), options=EXACT),
    Case("max int", over(torch.max, "r"), dtype=torch.int32, options=EXACT),
    Case("median", over(torch.median, "r"), options=EXACT),
    Case("nanmedian kept", over(torch.nanmedian, "r", keepdim=True), options=EXACT),
    Case("mode", over(torch.mode, "r"), dtype=torch.int64, options=EXACT),
    Case("mode bool", over(torch.mode, "r"), dtype=torch.bool, options=EXACT),
    Case("kthvalue", over(torch.kthvalue, "r", k=1), options=EXACT),
    Case("aminmax", over(torch.aminmax, "r"), options=EXACT),
    Case("norm", over(torch.norm, "r"), without=EMPTY),
    Case("norm 1 kept", over(torch.norm, "r", p=1, keepdim=True)),
    Case("vector_norm 3", over(torch.linalg.vector_norm, "r", ord=3), without=EMPTY, options=TWICE),
    Case("vector_norm 0", over(torch.linalg.vector_norm, "r", ord=0), options=NO_GRAD),
    Case("vector_norm inf", over(torch.linalg.vector_norm, "r", ord=INF), without=EMPTY),
    Case("vector_norm -inf", over(torch.linalg.vector_norm, "r", ord=-INF), without=EMPTY),
    Case("linalg.norm", over(torch.linalg.norm, "r")),
]
BOTH = [
    Case("sum", over(torch.sum, "f", "r"), options=TWICE),
    Case("sum kept", over(torch.sum, "r", "f", keepdim=True)),
    Case("mean", over(torch.mean, "r", "f")),
    Case("amax", over(torch.amax, "r", "f"), options=EXACT),
    Case("amin kept", over(torch.amin, "f", "r", keepdim=True), options=EXACT),
    Case("any", over(torch.any, "r", "f"), dtype=torch.bool),
    Case("all kept", over(torch.all, "r", "f", keepdim=True), dtype=torch.bool),
    Case("logsumexp", over(torch.logsumexp, "r", "f")),
    Case("count_nonzero", over(torch.count_nonzero, "r", "f"), options=NO_GRAD),
    Case("var", over(torch.var, "r", "f"), without=EMPTY),
    Case("nansum", over(torch.nansum, "r", "f")),
    Case("vector_norm", over(torch.linalg.vector_norm, "r", "f"), without=EMPTY),
    Case("matrix_norm fro", over(torch.linalg.matrix_norm, "r", "f"), without=EMPTY),
    Case("matrix_norm 1", over(torch.linalg.matrix_norm, "r", "f", ord=1), without=EMPTY),
    Case(
        "matrix_norm inf",
        over(torch.linalg.matrix_norm, "r", "f", ord=INF, keepdim=True),
        without=EMPTY,
    ),
    Case("linalg.norm -1", over(torch.linalg.norm, "r", "f", ord=-1), without=EMPTY),
]
FEATURES = [
    Case("sum", over(torch.sum, "f"), options=TWICE),
    Case("sum kept", over(torch.sum, "f", keepdim=True)),
    Case("nansum", over(torch.nansum, "f")),
    Case("mean", over(torch.mean, "f")),
    Case("nanmean", over(torch.nanmean, "f")),
    Case("prod", over(torch.prod, "f")),
    Case("amax", over(torch.amax, "f"), options=TWICE),
    Case("amin kept", over(torch.amin, "f", keepdim=True)),
    Case("any", over(torch.any, "f"), dtype=torch.bool),
    Case("all", over(torch.all, "f"), options=NO_GRAD),
    Case("logsumexp", over(torch.logsumexp, "f")),
    Case("argmax", over(torch.argmax, "f")),
    Case("argmin kept", over(torch.argmin, "f", keepdim=True)),
    Case("count_nonzero", over(torch.count_nonzero, "f"), options=NO_GRAD),
    Case("var", over(torch.var, "f")),
    Case("std kept", over(torch.std, "f", keepdim=True)),
    Case("var_mean", over(torch.var_mean, "f")),
    Case("max", over(torch.max, "f")),
    Case("min kept", over(torch.min, "f", keepdim=True)),
    Case("median", over(torch.median, "f")),
    Case("mode", over(torch.mode, "f"), dtype=torch.int64),
    Case("kthvalue", over(torch.kthvalue, "f", k=3)),
    Case("aminmax", over(torch.aminmax, "f")),
    Case("norm", over(torch.norm, "f")),
    Case("vector_norm 1", over(torch.linalg.vector_norm, "f", ord=1)),
    Case("positional", lambda x: x.sum(-1, True)),
    Case("positional var", lambda x: x.var(-1, False, True)),
    Case("axis", lambda x: torch.sum(x, axis=-1, keepdims=True)),
    Case("by name", lambda x: torch.mean(input=x, dim=-1)),
]


def run(case: Case, layout: Layout, **options: Any) -> None:
    RAGGED[0] = layout.ragged_dim
    run_case(case, layout, **options)


@grid(RAGGED_DIM)
def test_ragged(case: Case, layout: Layout) -> None:
    run(case, layout)


@grid(BOTH)
def test_ragged_and_features(case: Case, layout: Layout) -> None:
    run(case, layout)


@grid(FEATURES)
def test_features(case: Case, layout: Layout) -> None:
    run(case, layout)


# ---- the batch goes too ---------------------------------------------------------------------------------------------
WITH_BATCH: dict[str, Callable[..., Any]] = {
    "sum": torch.sum, "mean": torch.mean, "amax": torch.amax, "amin": torch.amin,
    "logsumexp": torch.logsumexp, "var": torch.var, "std": torch.std, "any": torch.any,
    "nansum": torch.nansum, "count_nonzero": torch.count_nonzero, "var_mean": torch.var_mean,
    "vector_norm": lambda x, dim, **o: torch.linalg.vector_norm(x, dim=dim, **o),
}  # fmt: skip
FILLED = [layout for layout in STRUCTURES if sum(layout.lengths) > 1]


def compare(
    got: Any, wanted: Any, leaf: Tensor, packed: Tensor, cut: Callable[[Tensor], Tensor]
) -> None:
    """Values, and gradients of `leaf` where rows are in use, with a random cotangent."""
    pairs = [(got, wanted)] if isinstance(got, Tensor) else list(zip(got, wanted))
    total, their_total = leaf.new_zeros(()), leaf.new_zeros(())
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)
        if theirs.requires_grad:
            weight = torch.randn_like(theirs)
            total, their_total = (
                total + (ours * weight).sum(),
                their_total + (theirs * weight).sum(),
            )
    if total.requires_grad:
        (grad,) = torch.autograd.grad(total, leaf)
        (their_grad,) = torch.autograd.grad(their_total, packed)
        torch.testing.assert_close(cut(grad), their_grad)


def packed_twin(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """`x` over a leaf, the rows in use as one dense leaf, and how to cut the first to the second."""
    d = layout.ragged_dim - 1
    values = x.values().detach().clone().requires_grad_()
    nested = njt.nested_tensor_from_jagged(
        values, x.offsets(), x.lengths(), jagged_dim=x.ragged_dim
    )
    used = [s + t for s, n in zip(x.offsets().tolist(), layout.lengths) for t in range(n)]
    index = torch.tensor(used)
    packed = values.detach().index_select(d, index).requires_grad_()
    return nested, packed, lambda g: g.index_select(d, index)


@pytest.mark.parametrize("layout", FILLED, ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("name", WITH_BATCH)
def test_batch_and_ragged(name: str, features: bool, keepdim: bool, layout: Layout) -> None:
    if name == "count_nonzero" and keepdim:
        pytest.skip("torch.count_nonzero has no keepdim")
    kept = {"keepdim": True} if keepdim else {}
    f, x = WITH_BATCH[name], sample(layout)
    nested, packed, cut = packed_twin(x, layout)
    theirs = [layout.ragged_dim - 1] + [x.dim() - 2] * features
    got = f(nested, [0, layout.ragged_dim] + [x.dim() - 1] * features, **kept)
    wanted = f(packed, theirs, **kept)
    if keepdim:
        wanted = (
            [w.unsqueeze(0) for w in wanted] if isinstance(wanted, tuple) else wanted.unsqueeze(0)
        )
    compare(got, wanted, _leaf(nested), packed, cut)


def _leaf(nested: Tensor) -> Tensor:
    """The values that `packed_twin` made: what the view `nested` differentiates to."""
    return nested._base if nested._base is not None else nested


EVERYTHING: dict[str, Callable[..., Any]] = {
    "sum": torch.sum, "mean": torch.mean, "prod": torch.prod, "amax": torch.amax, "max": torch.max,
    "min": torch.min, "median": torch.median, "nanmedian": torch.nanmedian, "std": torch.std,
    "var": torch.var, "var unbiased": lambda x: torch.var(x, False), "any": torch.any, "all": torch.all,
    "argmin": torch.argmin, "norm": torch.norm, "norm 1": lambda x: x.norm(1), "aminmax": torch.aminmax,
    "count_nonzero": torch.count_nonzero, "linalg.norm": torch.linalg.norm, "nansum": torch.nansum,
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 3), "sum to double": lambda x: x.sum(dtype=torch.float64),
    "var_mean": torch.var_mean, "hash": torch.hash_tensor, "quantile": lambda x: torch.quantile(x, 0.3),
    "quantiles": lambda x: torch.quantile(x, torch.tensor([0.1, 0.5])),
}  # fmt: skip


@pytest.mark.parametrize("layout", FILLED, ids=str)
@pytest.mark.parametrize("name", EVERYTHING)
def test_everything(name: str, layout: Layout) -> None:
    f = EVERYTHING[name]
    nested, packed, cut = packed_twin(sample(layout), layout)
    compare(f(nested), f(packed), _leaf(nested), packed, cut)


@pytest.mark.parametrize("layout", STRUCTURES, ids=str)
@pytest.mark.parametrize("name", ["sum", "amax", "max", "any", "var"])
def test_batch_alone_is_refused(name: str, layout: Layout) -> None:
    with pytest.raises(RuntimeError, match="Expected another dim than the batch dim"):
        getattr(torch, name)(sample(layout), dim=0)


# ---- forms ----------------------------------------------------------------------------------------------------------
def test_named_tuples() -> None:
    x = sample()
    for name in ("max", "min", "median", "mode", "aminmax", "kthvalue"):
        own = {"k": 1} if name == "kthvalue" else {}
        for dim in (1, 2):
            out = getattr(torch, name)(x, dim=dim, **own)
            assert type(out) is getattr(torch.return_types, name)


def test_max_of_two() -> None:
    x = sample()
    y = njt.nested_tensor_from_jagged(torch.randn_like(x.values()), x.offsets())
    check_against_components(torch.max, x, y)
    check_against_components(lambda a, b: torch.min(a, other=b), x, y)
    check_against_components(lambda a, b: a.max(b), x, torch.randn(4))


@pytest.mark.parametrize("name", ["usual", "gaps", "transposed"])
def test_dist_and_allclose(name: str) -> None:
    x = sample(BY_NAME[name])
    assert torch.allclose(x, x * (1 + 1e-7))
    assert not torch.allclose(x, x + 1, atol=0.5)
    rows = torch.cat([c.flatten() for c in components(x)])
    for p in (1, 2, INF):
        torch.testing.assert_close(torch.dist(x, x * 3, p), (rows * 2).norm(p))


def test_out() -> None:
    x, out = sample(), torch.empty(0)
    assert torch.sum(x, 1, out=out) is out
    torch.testing.assert_close(out, x.sum(1))
    values, indices = torch.empty(0), torch.empty(0, dtype=torch.int64)
    torch.max(x, 1, out=(values, indices))
    torch.testing.assert_close(values, x.amax(1))


def test_nan_in_a_row_shows_and_in_a_gap_does_not() -> None:
    x = sample(BY_NAME["gaps"])
    assert x.values().isnan().any()
    assert not x.sum().isnan()
    assert not x.amax((0, 1)).isnan().any()
    full = sample()
    full.values()[0, 0] = torch.nan
    assert full.amax(1)[0, 0].isnan()
    assert full.argmax(1)[0, 0] == 0
    torch.testing.assert_close(full.nansum(1)[0], components(full)[0].nansum(0))


def test_empty_component_of_unknown_length_is_found_on_the_host() -> None:
    x = njt.nested_tensor_from_jagged(torch.randn(3, 2), torch.tensor([0, 3, 3]))
    with pytest.raises(IndexError, match=r"amax\(\): got nested .* with a component of 0 rows"):
        x.amax(1)


def test_weighted_mean() -> None:
    """Issue b005."""
    x = sample()
    w = njt.nested_tensor_from_jagged(torch.rand(x.values().shape[0], 1), x.offsets())
    check_against_components(lambda a, b: (a * b).sum(1) / b.sum(1), x, w)


# ---- torch.masked ---------------------------------------------------------------------------------------------------
def masks(x: Tensor) -> list[Tensor]:
    mask = torch.rand(x.values().shape) > 0.3
    mask.narrow(-1, 0, 1).fill_(True)
    return [njt.nested_tensor_from_jagged(mask, x.offsets(), x.lengths(), jagged_dim=x.ragged_dim)]


def masked(name: str, *where: str, **options: Any) -> Callable[..., Any]:
    function = getattr(torch.masked, name)

    def call(x: Tensor, mask: Tensor | None = None) -> Any:
        return over(function, *where, mask=mask, **options)(x)

    return call


MASKED = [
    *(Case(f"{name} over {w}", masked(name, *w), others=masks, without=EMPTY)
      for name in ("sum", "prod", "amax", "amin", "mean", "norm", "logsumexp")
      for w in (("r",), ("f",))),
    Case("sum over both", masked("sum", "r", "f"), others=masks),
    Case("sum kept", masked("sum", "r", keepdim=True), others=masks),
    Case("sum, no mask", masked("sum", "r")),
    Case("mean, no mask", masked("mean", "f")),
    Case("var", masked("var", "r", unbiased=False), others=masks, without=EMPTY),
    Case("var, no mask", masked("var", "f")),
    Case("std kept", masked("std", "f", keepdim=True), options=NO_GRAD),
    Case("argmax", masked("argmax", "r"), others=masks, without=EMPTY, options=NO_GRAD),
    Case("argmin", masked("argmin", "f"), others=masks, options=NO_GRAD),
    Case("median", masked("median", "f"), others=masks),
    Case("softmax", masked("softmax", "f"), others=masks, options={"grad": False}),
    Case("log_softmax, no mask", masked("log_softmax", "r")),
    Case("softmin, no mask", masked("softmin", "r")),
    Case("cumsum", masked("cumsum", "r"), others=masks),
    Case("cumprod", masked("cumprod", "f"), others=masks),
    Case("normalize", masked("normalize", "f", ord=2.0), others=masks),
]  # fmt: skip


@grid(MASKED)
def test_masked(case: Case, layout: Layout) -> None:
    run(case, layout)


def test_masked_of_dense_is_torchs() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    mask = torch.tensor([[True, False], [True, True]])
    torch.testing.assert_close(torch.masked.sum(x, 1, mask=mask), torch.tensor([1.0, 7.0]))
    torch.testing.assert_close(torch.masked.mean(input=x, dim=0), torch.tensor([2.0, 3.0]))


# ---- below autograd and compiled ------------------------------------------------------------------------------------
def test_below_autograd() -> None:
    """What functions in C++ call: overloads, without the function layer."""
    x = sample()
    with torch._C.DisableTorchFunctionSubclass():
        torch.testing.assert_close(torch.ops.aten.sum.dim_IntList(x, [1]), x.sum(1))
        torch.testing.assert_close(
            torch.ops.aten.amax.default(x, [-1]).values(), x.amax(-1).values()
        )
        torch.testing.assert_close(torch.ops.aten.max.dim(x, 1)[0], x.amax(1))
        torch.testing.assert_close(torch.ops.aten.mean.default(x), x.values().mean())


COMPILED = [
    *RAGGED_DIM[:2], *(c for c in RAGGED_DIM if c.name in ("amax", "max", "logsumexp", "var", "prod", "mode")),
    *BOTH[:1], *FEATURES[:2], *(c for c in FEATURES if c.name in ("var_mean", "max")),
    *(c for c in MASKED if c.name in ("sum over both", "var")),
    Case("full sum", lambda x: x.sum().expand(1), options={"join": lambda parts: torch.cat(parts).sum(0, True)}),
]  # fmt: skip


@pytest.mark.parametrize("case", COMPILED, ids=str)
@pytest.mark.parametrize("name", ["usual", "gaps", "transposed"])
def test_compiled(case: Case, name: str) -> None:
    if name == "gaps" and (
        name in case.without or "gaps" in case.without or "raises" in case.options
    ):
        pytest.skip("a graph does not look at lengths: no dense error for an empty component")
    run(case, BY_NAME[name], compiled=True)


def test_new_lengths_are_no_new_graph() -> None:
    def f(x: Tensor) -> Tensor:
        return F.softmax(x, 1).sum(1) + x.amax(1) + x.mean((0, 1))

    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    g = torch.compile(f, fullgraph=True, backend=backend)
    for lengths in ((3, 1, 4), (2, 5), (7, 1, 1, 6), (4, 4, 9)):
        x = njt.nested_tensor([torch.randn(n, 4) for n in lengths])
        torch.testing.assert_close(g(x), f(x))
    assert len(graphs) <= 2


UNFIT = {
    "var int": (over(torch.var, "r"), torch.int64),
    "std bool": (over(torch.std, "r"), torch.bool),
    "norm int": (over(torch.norm, "r"), torch.int32),
    "vector_norm int": (over(torch.linalg.vector_norm, "r"), torch.int64),
    "mean int": (over(torch.mean, "r"), torch.int64),
    "nanmean int": (over(torch.nanmean, "r"), torch.int64),
    "softmax int": (over(torch.softmax, "r"), torch.int64),
    "log_softmax complex": (over(torch.log_softmax, "r"), torch.complex64),
    "amax complex": (over(torch.amax, "r"), torch.complex64),
    "amin complex": (over(torch.amin, "r"), torch.complex64),
    "aminmax complex": (over(torch.aminmax, "r"), torch.complex64),
    "max complex": (over(torch.max, "r"), torch.complex64),
}


@pytest.mark.parametrize("name", UNFIT)
def test_dtypes_that_dense_refuses(name: str) -> None:
    """What would be cut to an integer, or has no order, is refused with the class of dense."""
    f, dtype = UNFIT[name]
    x = sample(BY_NAME["usual"], dtype=dtype)
    with pytest.raises(Exception) as dense:
        f(components(x)[0].unsqueeze(0))
    with pytest.raises(type(dense.value), match=f"got values of {dtype}"):
        f(x)


def test_second_derivative_of_a_norm_at_zero() -> None:
    """Of entries that are 0 in a component that is not."""
    values = torch.randn(5, 3, dtype=torch.float64)
    values[4, 1] = values[0, 0] = 0
    values.requires_grad_()
    offsets = torch.tensor([0, 2, 5])

    def f(v: Tensor) -> Tensor:
        return torch.linalg.vector_norm(njt.nested_tensor_from_jagged(v, offsets), dim=1)

    assert torch.autograd.gradgradcheck(f, values)
