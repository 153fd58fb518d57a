"""Padding inside inductor's graphs: packed-only kernels, no rectangle, one row index."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

import njt
from njt import _compat
from njt.kernels import padding

OFFSETS = torch.tensor([0, 3, 8, 10])


def pad_op_unpad(values, offsets, d=0):
    rows = values.shape[d]
    padded = padding.packed_to_padded(values.sin(), offsets, 5, 0.0, values_dim=d)
    return padding.padded_to_packed(F.gelu(padded) * 2, offsets, rows, values_dim=d) + 1


def generated(fn, *args):
    """Result and generated code, forward and backward."""
    torch.compiler.reset()
    result, codes = run_and_get_code(torch.compile(fn, fullgraph=True, dynamic=True), *args)
    return result, "\n".join(codes)


@pytest.mark.parametrize(
    ("shape", "d"), [((10, 8), 0), ((10, 2, 4), 0), ((2, 10, 4), 1)], ids=["2-D", "3-D", "dim 1"]
)
def test_no_rectangle(shape, d) -> None:
    """I1, I2, I3: on CPU and for any rank: no call, no (B, S, D) buffer, the row index once."""
    values = torch.randn(shape)
    out, code = generated(lambda v, o: pad_op_unpad(v, o, d), values, OFFSETS)
    torch.testing.assert_close(out, pad_op_unpad(values, OFFSETS, d))
    assert "torch.ops.njt." not in code
    buffers = re.findall(r"empty_strided_cpu\(\((.*?)\)", code)
    assert max(b.count(",") for b in buffers) <= len(shape) - (len(shape) == 2) + 1
    # the segment of each row, and the result; torch 2.11 copies one whose ragged dim is not the first
    assert len(buffers) == 2 + (
        d > 0 and torch.torch_version.TorchVersion(torch.__version__) < "2.12"
    )


def test_no_rectangle_backward() -> None:
    """I1: the gradient as well."""
    values = torch.randn(10, 8, requires_grad=True)

    def step(v):
        out = torch.compile(pad_op_unpad, fullgraph=True, dynamic=True)(v, OFFSETS)
        return torch.autograd.grad(out.square().sum(), v)[0]

    torch.compiler.reset()
    grad, codes = run_and_get_code(step, values)
    code = "\n".join(codes)
    (wanted,) = torch.autograd.grad(pad_op_unpad(values, OFFSETS).square().sum(), values)
    torch.testing.assert_close(grad, wanted)
    assert "torch.ops.njt." not in code
    assert not [b for b in re.findall(r"empty_strided_cpu\(\((.*?)\)", code) if b.count(", ") > 1]


def test_one_graph_for_all_sizes() -> None:
    """I4, I5: batch, width, total and features vary; a total of 0 is no special case of the operator."""
    counter = CompileCounterWithBackend("inductor")
    run = torch.compile(pad_op_unpad, fullgraph=True, dynamic=True, backend=counter)
    for lengths, features in ((3, 5, 2), 8), ((4, 4), 3), ((1, 2, 3, 4, 5), 6):
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        values = torch.randn(sum(lengths), features)
        torch.testing.assert_close(run(values, offsets), pad_op_unpad(values, offsets))
    assert counter.frame_count == 1
    empty = torch.randn(0, 8), torch.zeros(3, dtype=torch.int64)
    assert run(*empty).shape == (0, 8)
    width = torch.compile(lambda v, o: padding.packed_to_padded(v, o, 3, 7.0), fullgraph=True)
    assert torch.equal(width(*empty), torch.full((2, 3, 8), 7.0))


def test_unknown_inductor_keeps_the_operator(monkeypatch) -> None:
    """I6: without its table of decompositions inductor calls the operator, and the numbers stay."""
    from torch._inductor import decomposition

    for name in "packed_to_padded", "padded_to_packed":
        monkeypatch.delitem(
            decomposition.decompositions, getattr(torch.ops.njt, name).default, raising=False
        )
    decomposition.fast_random_decomps.cache_clear()
    values = torch.randn(10, 8)
    out, code = generated(pad_op_unpad, values, OFFSETS)
    torch.testing.assert_close(out, pad_op_unpad(values, OFFSETS))
    assert "torch.ops.njt." in code
    monkeypatch.undo()
    decomposition.fast_random_decomps.cache_clear()
    assert _compat.register_inductor_decomposition(
        torch.ops.njt.packed_to_padded.default,
        decomposition.decompositions.get(torch.ops.njt.packed_to_padded.default),
    )


def test_through_the_class() -> None:
    """I1 for users: `to_padded_tensor`, an operator, `from_padded`."""
    x = njt.nested_tensor([torch.randn(n, 4) for n in (3, 5, 2)])

    def f(x):
        padded = F.gelu(x.to_padded_tensor(0.0))
        rows = x.values().shape[0]
        return njt.from_padded(padded, offsets=x.offsets(), total_length=rows)

    out, code = generated(f, x)
    torch.testing.assert_close(out.values(), F.gelu(x.values()))
    assert "torch.ops.njt." not in code


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn], ids=str)
def test_dtypes_that_inductor_has_no_code_for(dtype) -> None:
    """There the operators stay calls."""
    x = njt.nested_tensor([torch.ones(n, 2).to(dtype) for n in (2, 1)])

    def both_ways(x):
        padded = njt.to_padded_tensor(x, 2.0)
        return padded, njt.from_padded(padded, offsets=x.offsets(), total_length=3).values()

    (padded, packed), code = generated(both_ways, x)
    assert "torch.ops.njt." in code
    assert torch.equal(padded.to(torch.complex64), x.to_padded_tensor(2.0).to(torch.complex64))
    assert torch.equal(packed.to(torch.complex64), x.values().to(torch.complex64))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_fillers(backend) -> None:
    """T4 in a graph: exact, with a number that varies as well, and refused where the dtype does not hold it."""
    x = njt.nested_tensor([torch.ones(2, dtype=torch.int64), torch.ones(1, dtype=torch.int64)])
    run = torch.compile(
        lambda x, filler: njt.to_padded_tensor(x, filler), fullgraph=True, backend=backend
    )
    for filler in (0, 7, 2**62 + 1, -(2**63)):
        assert run(x, filler)[1].tolist() == [1, filler]
    for filler in (0.5, math.inf):
        torch.compiler.reset()
        with pytest.raises(Exception, match=f"got padding {filler} for torch.int64"):
            run(x, filler)
