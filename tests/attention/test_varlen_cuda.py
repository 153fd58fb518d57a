"""The CUDA backends of attention over packed rows against the loop; the same batches as on CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from njt.attention import varlen_backends
from njt.attention.varlen import varlen_attention
from tests.attention.test_varlen import BATCHES, Batch, check, inputs, loop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

# backend, dtype, and whether it takes a causal call where lengths differ
BACKENDS = [
    ("flash", torch.bfloat16, False),
    ("efficient", torch.float32, True),
    ("efficient", torch.bfloat16, True),
    ("math", torch.float32, True),
]


def on_gpu(x: list[Tensor]) -> list[Tensor]:
    return [t.detach().cuda().requires_grad_() for t in x]


@pytest.mark.parametrize(("backend", "dtype", "any_causal"), BACKENDS)
@pytest.mark.parametrize("name", BATCHES)
def test_equals_loop(name: str, backend: str, dtype: torch.dtype, any_causal: bool) -> None:
    batch = BATCHES[name]
    for causal in (False, *([True] if any_causal or batch.k is None else [])):
        with varlen_backends.force(backend):
            check(varlen_attention, batch, on_gpu(inputs(batch, dtype=dtype)), is_causal=causal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["usual", "cross with gaps", "equal"])
def test_heads_and_head_sizes(name: str, dtype: torch.dtype) -> None:
    """Fewer heads of keys, and head sizes that the kernels want padded."""
    for sizes in ({"heads": 6, "heads_k": 2}, {"width": 5, "width_v": 12}, {"width": 72}):
        x = on_gpu(inputs(BATCHES[name], dtype=dtype, **sizes))
        check(varlen_attention, BATCHES[name], x, gqa=True)


@pytest.mark.parametrize("name", ["usual", "gaps"])
def test_chunks_and_long_sequences(name: str) -> None:
    """Strided inputs, several tiles a sequence, and a cotangent with strides of 0."""
    batch = Batch((300, 1, 129, 64, 1000), gap=BATCHES[name].gap)
    whole = batch.values(batch.q, 3 * 4 * 64, dtype=torch.bfloat16).cuda().requires_grad_()
    x = [c.unflatten(-1, (4, 64)) for c in whole.chunk(3, -1)]
    for causal in (False, True):
        check(varlen_attention, batch, x, is_causal=causal)
    offsets, more = batch.arguments("cuda")
    mine = torch.autograd.grad(varlen_attention(*x, *offsets, **more).float().sum(), whole)
    theirs = torch.autograd.grad(loop(batch, *x).float().sum(), whole)
    torch.testing.assert_close(mine, theirs, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("name", ["usual", "cross with gaps"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_synchronization(name: str, dtype: torch.dtype) -> None:
    """Nothing of a call reads the device, with bounds given and lengths unknown to the host."""
    batch = BATCHES[name]
    x = on_gpu(inputs(batch, dtype=dtype))
    offsets, more = batch.arguments("cuda")
    varlen_attention(*x, *offsets, **more).sum().backward()
    fresh, more = batch.arguments("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        varlen_attention(*x, *fresh, **more).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["usual", "cross with gaps", "all empty"])
def test_operator_is_well_formed(name: str, dtype: torch.dtype) -> None:
    offsets, more = BATCHES[name].arguments("cuda")
    x = on_gpu(inputs(BATCHES[name], dtype=dtype))
    backend = varlen_backends.choose(x[0].device, dtype, True, False, False)
    call = (*offsets, *more.values(), False, 0.3, 0.0, backend)
    torch.library.opcheck(torch.ops.njt.varlen_attention, (*x, *call))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str) -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, mode=mode)
    def run(*args: Any, **kwargs: Any) -> Tensor:
        return varlen_attention(*args, **kwargs) * 2

    def halved(*args: Any, **kwargs: Any) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return run(*args, **kwargs) / 2

    batch = BATCHES["usual"]
    for _ in range(3):
        x = on_gpu(inputs(batch, dtype=torch.bfloat16))
        check(halved, batch, x, is_causal=True)


def test_host_lengths_tell_of_rows_past_the_end() -> None:
    """Rows that no offset names get 0 in output and gradients, if the host knows the lengths."""
    batch = Batch((5, 3))
    x = [
        torch.cat([t, torch.full_like(t[:2], torch.nan)])
        for t in inputs(batch, dtype=torch.float32)
    ]
    x = on_gpu(x)
    offsets, more = batch.arguments("cuda")
    out = varlen_attention(*x, *offsets, **more, host_q=batch.q, host_k=batch.q)
    torch.testing.assert_close(out[:-2], loop(batch, *(t[:-2] for t in x)), atol=1e-4, rtol=1e-4)
    assert not out[-2:].any()
    for grad in torch.autograd.grad(out.sum(), x):
        assert not grad[-2:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dropout_compiled(dtype: torch.dtype) -> None:
    """The backward of a graph drops what its forward dropped: values of one give weights that tell."""
    torch._dynamo.reset()
    batch = Batch((300, 200))
    q, k, v = on_gpu(inputs(batch, dtype=dtype, width=64, width_v=64))
    offsets, more = batch.arguments("cuda")
    run = torch.compile(varlen_attention, fullgraph=True)
    out = run(q, k, v, *offsets, **more, dropout_p=0.5)
    (grad,) = torch.autograd.grad(out, v, out.detach())
    # out is linear in v, so <out, out> = <grad, v> holds only for the same mask
    torch.testing.assert_close(
        (grad.double() * v).sum(), out.double().pow(2).sum(), atol=0.0, rtol=0.03
    )


def test_dropout_repeats_with_the_seed() -> None:
    batch = BATCHES["usual"]
    x = on_gpu(inputs(batch, dtype=torch.bfloat16))
    offsets, more = batch.arguments("cuda")
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        out = varlen_attention(*x, *offsets, **more, dropout_p=0.5)
        results.append((out, *torch.autograd.grad(out.sum(), x)))
    torch.testing.assert_close(*results, atol=0.05, rtol=0.05)
    assert not torch.allclose(results[0][0], varlen_attention(*x, *offsets, **more))
