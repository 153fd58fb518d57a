"""Attention over packed rows against a loop of dense attention over the sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
import torch.utils.flop_counter
from torch import Tensor, func
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from njt.attention import varlen_backends, varlen_cpu
from njt.attention.varlen import varlen_attention

TOLERANCE = {
    torch.float64: {"atol": 1e-10, "rtol": 1e-10},
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.bfloat16: {"atol": 4e-2, "rtol": 4e-2},
}


@dataclass(frozen=True)
class Batch:
    """Lengths of queries and keys, with `gap` rows of NaN after each sequence."""

    q: tuple[int, ...]
    k: tuple[int, ...] | None = None  # None: self attention, with one offsets tensor
    gap: int = 0
    index: torch.dtype = torch.int64

    def side(
        self, lengths: tuple[int, ...], device: torch.device | str
    ) -> tuple[Tensor, Tensor | None]:
        widths = torch.tensor([0, *(n + self.gap for n in lengths)], dtype=self.index)
        return (
            widths.cumsum(0, dtype=self.index).to(device),
            torch.tensor(lengths, dtype=self.index, device=device) if self.gap else None,
        )

    def arguments(
        self, device: torch.device | str = "cpu"
    ) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        q_offsets, q_lengths = self.side(self.q, device)
        keys = self.q if self.k is None else self.k
        k_offsets, k_lengths = q_offsets, q_lengths
        if self.k is not None:
            k_offsets, k_lengths = self.side(keys, device)
        return (q_offsets, k_offsets), {
            "q_lengths": q_lengths,
            "k_lengths": k_lengths,
            "max_q": max(self.q, default=0),
            "max_k": max(keys, default=0),
        }

    def values(self, lengths: tuple[int, ...], *tail: int, dtype: torch.dtype) -> Tensor:
        """Packed rows with NaN in the gaps."""
        parts = []
        for n in lengths:
            parts += [torch.randn(n, *tail, dtype=dtype)]
            parts += [torch.full((self.gap, *tail), torch.nan, dtype=dtype)]
        return torch.cat(parts) if parts else torch.randn(0, *tail, dtype=dtype)


BATCHES = {
    "usual": Batch((5, 3, 8, 3, 7, 1)),
    "one": Batch((6,)),
    "equal": Batch((4, 4, 4)),
    "equal with gaps": Batch((4, 4, 4), gap=2),
    "evenly spaced pairs": Batch((2, 5, 2, 5, 2, 5)),
    "empty ones": Batch((0, 3, 0, 0, 4, 3, 0)),
    "all empty": Batch((0, 0)),
    "no sequence": Batch(()),
    "gaps": Batch((5, 3, 8, 3), gap=3),
    "int32": Batch((5, 3, 8, 3), index=torch.int32),
    "cross": Batch((5, 3, 8, 3), (2, 9, 1, 9)),
    "cross, equal": Batch((5, 3, 8, 3), (5, 3, 8, 3)),
    "cross with gaps": Batch((5, 3, 8, 3), (2, 9, 1, 9), gap=2),
    "queries without keys": Batch((5, 3, 2), (0, 4, 0)),
    "keys without queries": Batch((0, 3, 0), (2, 4, 1)),
    "no key at all": Batch((2, 3), (0, 0)),
}


def inputs(
    batch: Batch,
    heads: int = 4,
    heads_k: int = 4,
    width: int = 8,
    width_v: int = 8,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    keys = batch.q if batch.k is None else batch.k
    return [
        batch.values(batch.q, heads, width, dtype=dtype).requires_grad_(),
        batch.values(keys, heads_k, width, dtype=dtype).requires_grad_(),
        batch.values(keys, heads_k, width_v, dtype=dtype).requires_grad_(),
    ]


def loop(batch: Batch, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
    """The definition: dense attention a sequence, 0 in the gaps."""
    keys = batch.q if batch.k is None else batch.k
    out, q_start, k_start = [query.new_zeros(0, query.shape[1], value.shape[2])], 0, 0
    for n, m in zip(batch.q, keys, strict=True):
        parts = query[q_start : q_start + n], key[k_start:][:m], value[k_start:][:m]
        if n and m:
            dense = F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in parts), **kwargs
            )
            out.append(dense[0].transpose(0, 1))
        else:
            out.append(query.new_zeros(n, query.shape[1], value.shape[2]))
        out.append(query.new_zeros(batch.gap, query.shape[1], value.shape[2]))
        q_start, k_start = q_start + n + batch.gap, k_start + m + batch.gap
    return torch.cat(out)


def gradients(out: Tensor, inputs: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    if not out.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(out, inputs, cotangent, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def check(
    run: Callable[..., Tensor], batch: Batch, x: list[Tensor], gqa: bool = False, **kwargs: Any
) -> None:
    """Values and gradients of `run` and of the loop, for one random cotangent."""
    offsets, more = batch.arguments(x[0].device)
    out = run(*x, *offsets, **more, **kwargs, enable_gqa=gqa)
    wanted = loop(batch, *x, **kwargs, enable_gqa=gqa)
    tolerance = TOLERANCE[x[0].dtype]
    assert out.dtype == x[0].dtype
    torch.testing.assert_close(out, wanted, **tolerance)
    # what flows into the rows of no sequence must not matter
    cotangent = torch.randn_like(out)
    for mine, theirs in zip(
        gradients(out, x, cotangent), gradients(wanted, x, cotangent), strict=True
    ):
        torch.testing.assert_close(mine, theirs, **tolerance)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("backend", ["flash_cpu", "math"])
@pytest.mark.parametrize("name", BATCHES)
def test_equals_loop(name: str, backend: str, causal: bool) -> None:
    with varlen_backends.force(backend):
        check(varlen_attention, BATCHES[name], inputs(BATCHES[name]), is_causal=causal)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["usual", "cross with gaps"])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    for causal in (False, True):
        x = inputs(BATCHES[name], dtype=dtype)
        check(varlen_attention, BATCHES[name], x, is_causal=causal)


@pytest.mark.parametrize("backend", ["flash_cpu", "math"])
@pytest.mark.parametrize("name", ["usual", "equal", "cross with gaps"])
def test_fewer_heads_of_keys(name: str, backend: str) -> None:
    with varlen_backends.force(backend):
        x = inputs(BATCHES[name], heads=6, heads_k=2)
        check(varlen_attention, BATCHES[name], x, gqa=True)


@pytest.mark.parametrize("backend", ["flash_cpu", "math"])
@pytest.mark.parametrize("width_v", [3, 12])
def test_other_head_size_of_values(width_v: int, backend: str) -> None:
    with varlen_backends.force(backend):
        check(varlen_attention, BATCHES["usual"], inputs(BATCHES["usual"], width_v=width_v))


def test_scale() -> None:
    for scale in (0.3, 0.0, -1.0):
        check(varlen_attention, BATCHES["cross"], inputs(BATCHES["cross"]), scale=scale)


@pytest.mark.parametrize("name", ["usual", "equal", "gaps", "one"])
def test_chunks_of_one_projection(name: str) -> None:
    """Heads of a transposed view, and values whose rows are three times as wide, are read in place."""
    batch = BATCHES[name]
    whole = batch.values(batch.q, 3 * 4 * 8, dtype=torch.float64).requires_grad_()
    x = [c.unflatten(-1, (4, 8)) for c in whole.chunk(3, -1)]
    check(varlen_attention, batch, x)
    # (H, rows, D) in memory, and features that are not adjacent
    x = [
        c.unflatten(-1, (4, 8)).transpose(0, 1).contiguous().transpose(0, 1)
        for c in whole.chunk(3, -1)
    ]
    check(varlen_attention, batch, x)
    x = [c.unflatten(-1, (8, 4)).transpose(1, 2) for c in whole.chunk(3, -1)]
    check(varlen_attention, batch, x)


def test_long_and_short_sequences_together() -> None:
    """Blocks of one sequence, blocks split to stay in cache, and gathered ones agree with the loop."""
    lengths = (150, 7, 120, 7, 3, 150, *((3, 5) * 300), 1)
    batch = Batch(lengths)
    for causal in (False, True):
        x = inputs(batch, heads=2, heads_k=2, dtype=torch.float32)
        check(varlen_attention, batch, x, is_causal=causal)


def test_expanded_cotangent() -> None:
    """The gradient of a sum has strides of 0."""
    for name in ("usual", "equal"):
        batch = BATCHES[name]
        x = inputs(batch)
        offsets, more = batch.arguments()
        mine = torch.autograd.grad(varlen_attention(*x, *offsets, **more).sum(), x)
        theirs = torch.autograd.grad(loop(batch, *x).sum(), x)
        torch.testing.assert_close(mine, theirs)


def test_gradient_of_one_input_only() -> None:
    batch = BATCHES["cross"]
    for wanted in range(3):
        x = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(inputs(batch))]
        offsets, more = batch.arguments()
        out = varlen_attention(*x, *offsets, **more)
        reference = loop(batch, *x)
        cotangent = torch.randn_like(out)
        torch.testing.assert_close(
            torch.autograd.grad(out, x[wanted], cotangent, create_graph=True),
            torch.autograd.grad(reference, x[wanted], cotangent),
        )


@pytest.mark.parametrize("backend", ["flash_cpu", "math"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_second_derivative(causal: bool, backend: str) -> None:
    batch = Batch((2, 0, 3), (1, 2, 2))
    x = inputs(batch, heads=2, heads_k=1, width=2, width_v=2)
    offsets, more = batch.arguments()

    def run(*x: Tensor) -> Tensor:
        return varlen_attention(*x, *offsets, **more, is_causal=causal, enable_gqa=True)

    with varlen_backends.force(backend):
        assert torch.autograd.gradcheck(run, x)
        assert torch.autograd.gradgradcheck(run, x)


def _pushed(f: Callable[..., Tensor], x: tuple[Tensor, ...], t: tuple[Tensor, ...]) -> Any:
    """Forward mode without torch.func."""
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(f(*map(forward_ad.make_dual, x, t))))


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "vjp": lambda f, x, t, c: func.vjp(f, *x)[1](c),
    "jvp": lambda f, x, t, c: func.jvp(f, x, t),
    "jvp by one of three": lambda f, x, t, c: func.jvp(lambda k: f(x[0], k, x[2]), x[1:2], t[1:2]),
    "jvp of vjp": lambda f, x, t, c: func.jvp(lambda *x: func.vjp(f, *x)[1](c), x, t),
    "jvp of jvp": lambda f, x, t, c: func.jvp(lambda *x: func.jvp(f, x, t)[1], x, t),
    "vmap": lambda f, x, t, c: func.vmap(f, (0, None, 1))(torch.stack((x[0], t[0])), x[1], torch.stack((x[2], t[2]), 1)),
    "vmap of grad": lambda f, x, t, c: func.vmap(func.grad(lambda *x: (f(*x) * c).sum(), (0, 1)))(*map(torch.stack, zip(x, t))),
    "jacrev": lambda f, x, t, c: func.jacrev(f, (0, 2))(*x),
    "jacfwd": lambda f, x, t, c: func.jacfwd(f, (0, 2))(*x),
    "forward mode": lambda f, x, t, c: _pushed(f, x, t),
}  # fmt: skip


@pytest.mark.parametrize("way", ["function", "operator"])
@pytest.mark.parametrize("batch", ["usual", "cross with gaps"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, batch: str, way: str) -> None:
    """torch.func and forward mode: by composition for the function, by its derivatives for the operator."""
    at = replace(
        BATCHES[batch], q=BATCHES[batch].q[:3], k=BATCHES[batch].k and BATCHES[batch].k[:3]
    )
    x, t = (tuple(v.detach() for v in inputs(at, 2, 2, 4, 4)) for _ in range(2))
    t = tuple(v.nan_to_num() for v in t)
    offsets, more = at.arguments()

    def ours(*x: Tensor) -> Tensor:
        if way == "function":
            return varlen_attention(*x, *offsets, **more, is_causal=True, scale=0.3)
        call = (*offsets, *more.values(), True, 0.3, 0.0, "flash_cpu")
        return torch.ops.njt.varlen_attention(*x, *call)[0]

    def theirs(*x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the dense flash backend has no tangents
            return loop(at, *x, is_causal=True, scale=0.3)

    transform, cotangent = TRANSFORMS[name], torch.randn_like(t[0])
    torch.testing.assert_close(
        transform(ours, x, t, cotangent), transform(theirs, x, t, cotangent), equal_nan=False
    )


def test_tangents_of_dropout_are_refused() -> None:
    """The operator's seeds are out of reach of a second formula."""
    offsets, more = BATCHES["usual"].arguments()
    x = tuple(t.detach() for t in inputs(BATCHES["usual"]))
    call = (*offsets, *more.values(), False, 0.3, 0.5, "flash_cpu")
    with pytest.raises(NotImplementedError, match=r"tangent .* with dropout_p"):
        func.jvp(lambda *x: torch.ops.njt.varlen_attention(*x, *call)[0], x, x)


def test_dropout_keeps_the_mean() -> None:
    batch = Batch((400, 300))
    x = [torch.ones_like(t) for t in inputs(batch)]
    offsets, more = batch.arguments()
    out = varlen_attention(*x, *offsets, **more, dropout_p=0.5)
    assert out.std() > 0.01
    torch.testing.assert_close(out.mean(), torch.ones((), dtype=out.dtype), atol=0.05, rtol=0)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["usual", "cross with gaps"])
def test_compiled(name: str, backend: str) -> None:
    """One graph, forward and backward, with a new batch of other sizes and no third compilation."""
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def run(*args: Any, **kwargs: Any) -> Tensor:
        return varlen_attention(*args, **kwargs) * 2

    batch = BATCHES[name]
    batches = [
        batch,
        replace(batch, q=(*batch.q, 9), k=batch.k and (*batch.k, 4)),
        replace(batch, q=batch.q[1:], k=batch.k and batch.k[1:]),
    ]
    for each in batches:
        for causal in (False, True):
            check(
                lambda *args, **kwargs: run(*args, **kwargs) / 2,
                each,
                # sizes that no length happens to equal, or the tracer takes them for one symbol
                inputs(each, heads=10, heads_k=10, width=16, width_v=12, dtype=torch.float32),
                is_causal=causal,
            )
    assert counter.frame_count <= 4  # at most two for each meaning of is_causal


@pytest.mark.parametrize("name", ["usual", "equal", "gaps", "cross with gaps", "all empty"])
def test_operator_is_well_formed(name: str) -> None:
    offsets, more = BATCHES[name].arguments()
    x = inputs(BATCHES[name], dtype=torch.float32)
    call = (*offsets, *more.values(), False, 0.3, 0.0, "flash_cpu")
    torch.library.opcheck(torch.ops.njt.varlen_attention, (*x, *call))
    results = torch.ops.njt.varlen_attention(*x, *call)
    torch.library.opcheck(
        torch.ops.njt.varlen_attention_backward,
        (torch.randn_like(x[0]), *(t.detach() for t in (*x, *results)), *call),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_flops_are_those_of_the_sequences() -> None:
    """b087: the counter sees true lengths: 2 matmuls forward, 5 backward, 2 * n * m * D each."""
    batch = Batch((4, 2, 6), (3, 5, 1))
    x = inputs(batch, width_v=8)
    offsets, more = batch.arguments()
    scores = 4 * sum(n * m for n, m in zip(batch.q, batch.k or (), strict=True))
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        out = varlen_attention(*x, *offsets, **more)
    assert counter.get_total_flops() == 2 * 2 * scores * 8
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 5 * 2 * scores * 8


def test_plan_is_kept_while_its_offsets_live() -> None:
    batch = BATCHES["cross"]
    x = inputs(batch)
    offsets, more = batch.arguments()
    before = len(varlen_cpu._memo)
    for _ in range(3):
        varlen_attention(*x, *offsets, **more)
    assert len(varlen_cpu._memo) == before + 1
    offsets[0].copy_(torch.tensor([0, 4, 8, 16, 19]))  # the same memory, another batch
    moved = replace(batch, q=(4, 4, 8, 3))
    torch.testing.assert_close(varlen_attention(*x, *offsets, **more), loop(moved, *x))
    del offsets
    assert len(varlen_cpu._memo) == before


def test_autocast() -> None:
    """b091: query and key come from a linear layer in half precision, values don't."""
    batch = BATCHES["usual"]
    x = inputs(batch, dtype=torch.float32)
    offsets, more = batch.arguments()
    with torch.autocast("cpu", torch.bfloat16):
        out = varlen_attention(x[0].bfloat16(), *x[1:], *offsets, **more)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), loop(batch, *x), atol=0.04, rtol=0.04)
    assert torch.autograd.grad(out.sum(), x[2])[0].dtype == torch.float32


def test_inference_mode() -> None:
    batch = BATCHES["usual"]
    with torch.inference_mode():
        x = [t.detach() for t in inputs(batch)]
        offsets, more = batch.arguments()
        torch.testing.assert_close(varlen_attention(*x, *offsets, **more), loop(batch, *x))


def test_rows_past_the_last_sequence() -> None:
    """Rows that no offset names are not read, and get 0."""
    batch = Batch((5, 3))
    x = [torch.cat([t, torch.full_like(t[:2], torch.nan)]) for t in inputs(batch)]
    offsets, more = batch.arguments()
    out = varlen_attention(*x, *offsets, **more)
    torch.testing.assert_close(out[:-2], loop(batch, *(t[:-2] for t in x)))
    assert not out[-2:].any()


def test_torch_switches_choose_the_backend() -> None:
    query = inputs(BATCHES["usual"])[0]
    request = (query.device, query.dtype, True, False, False)
    assert varlen_backends.choose(*request) == "flash_cpu"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert varlen_backends.choose(*request) == "math"
    cuda = torch.device("cuda")
    with varlen_backends.force("flash"), pytest.raises(RuntimeError, match="Expected on CUDA"):
        varlen_backends.choose(*request)
    assert varlen_backends.choose(cuda, torch.float64, True, False, False) == "math"
    assert varlen_backends.choose(cuda, torch.float32, True, True, False) == "efficient"
    assert varlen_backends.choose(cuda, torch.bfloat16, True, True, False) == "efficient"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda q, k, v: (q, k[..., :4], v), "query and key of one head size"),
        (lambda q, k, v: (q, k[:, :2], v), "key and value of the same rows and heads"),
        (lambda q, k, v: (q, k[:, :2], v[:, :2]), "or enable_gqa=True"),
        (lambda q, k, v: (q[None], k, v), "three packed tensors"),
        (lambda q, k, v: (q, k.float(), v), "Expected one dtype"),
    ],
)
def test_what_does_not_fit_is_refused(change: Callable[..., Any], text: str) -> None:
    offsets, more = BATCHES["usual"].arguments()
    with pytest.raises(RuntimeError, match=text):
        varlen_attention(*change(*inputs(BATCHES["usual"])), *offsets, **more)
