"""Padded and packed copies: every implementation against plain loops, byte for byte."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.optests import opcheck

from njt.kernels import (
    padding,
    padding_cpu,
    padding_inductor,
    padding_levels,
    padding_ops,
    padding_triton,
    reference,
)

CUDA = torch.cuda.is_available()
IMPLEMENTATIONS = [
    pytest.param(padding_cpu, "cpu", id="cpu"),
    pytest.param(padding_inductor, "cpu", id="inductor"),
    # without a GPU the kernels run through Triton's interpreter, on CPU tensors
    pytest.param(padding_triton, "cuda" if CUDA else "cpu", id="triton"),
]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
]
SHAPES = {
    "(T,)": ((), ()),
    "(T, 3)": ((), (3,)),
    "(T, 16)": ((), (16,)),
    "(T, 5, 2)": ((), (5, 2)),
    "(2, T, 4)": ((2,), (4,)),
    "(3, 2, T)": ((3, 2), ()),
}
OFFSETS = torch.tensor([0, 2, 2, 6])
GAPS = torch.tensor([1, 0, 3])


def noise(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Random bytes as a tensor: NaN payloads, -0.0 and all (bool: zeros and ones)."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8, device=device).view(torch.bool)
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, size), dtype=torch.uint8, device=device)
    return raw.view(dtype).squeeze(-1)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.uint8) if x.dtype is not torch.bool else x.cpu()


def check_both(module, device, values, offsets, lengths, width, padding_value, d, left) -> None:
    """Both copies of a module against the reference."""
    values, offsets = values.to(device), offsets.to(device)
    lengths = None if lengths is None else lengths.to(device)
    rest = (width, padding_value, d, left)
    padded = module.packed_to_padded(values, offsets, lengths, *rest)
    wanted = reference.packed_to_padded(values, offsets, lengths, *rest)
    assert padded.shape == wanted.shape
    assert padded.is_contiguous()
    assert torch.equal(bits(padded), bits(wanted))
    full = noise(tuple(padded.shape), values.dtype, device)  # padding holds noise, never to be seen
    rows = values.shape[d]
    packed = module.padded_to_packed(full, offsets, lengths, rows, d, left)
    wanted = reference.padded_to_packed(full, offsets, lengths, rows, d, left)
    assert packed.shape == wanted.shape
    assert torch.equal(bits(packed), bits(wanted))


@pytest.mark.parametrize(("module", "device"), IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bit_for_bit(module, device, dtype) -> None:
    """T3, K4: the copy keeps every bit, and nothing of the padding leaks."""
    if module is padding_inductor and not padding_inductor._generated(dtype):
        args = noise((6,), dtype), OFFSETS, None, 5, 0, False
        assert module.padded_to_packed(*args) is NotImplemented  # the operator itself stays
        return
    for pre, post in ((), (3,)), ((2,), (4,)):
        values = noise((*pre, 6, *post), dtype)
        check_both(module, device, values, OFFSETS, None, 5, 1, len(pre), False)


@pytest.mark.parametrize(("module", "device"), IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", [None, GAPS], ids=["packed", "gaps"])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("width", [4, 2, 7])
def test_shapes(module, device, shape, lengths, left, width) -> None:
    """T2, C7, T9, K3: ragged dim anywhere, gaps, both sides, wider and narrower than the longest: one rule for
    rows past the width, whatever runs."""
    pre, post = SHAPES[shape]
    values = torch.randn(*pre, 6, *post)
    check_both(module, device, values, OFFSETS, lengths, width, 4.2, len(pre), left)


@pytest.mark.parametrize(("module", "device"), IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "offsets",
    [
        torch.tensor([0]),
        torch.tensor([0, 0, 0]),
        torch.tensor([0, 3, 3]),
        torch.tensor([0, 3], dtype=torch.int32),
        torch.tensor([0, 1, 2, 3], dtype=torch.int32),
    ],
    ids=["no segment", "all empty", "last empty", "int32", "single rows"],
)
def test_sizes(module, device, offsets) -> None:
    """T8: int32 and int64, B = 0, all lengths 0, last length 0."""
    rows = int(offsets[-1])
    if module is padding_inductor and rows == 0:
        # the masked load that inductor generates has another eager form; tests/compile compiles this
        pytest.skip("only as generated code")
    for post in (), (2,), (0,):
        check_both(module, device, torch.randn(rows, *post), offsets, None, 3, -1.0, 0, False)


@pytest.mark.parametrize(("module", "device"), IMPLEMENTATIONS)
def test_any_strides_and_storage_offsets(module, device) -> None:
    base = torch.randn(9, 6, 3)
    for values in (
        base[0],
        base[0].t().contiguous().t(),
        base.view(-1)[1:19].view(6, 3),
        base[:, :, 0].t(),
    ):
        check_both(module, device, values, OFFSETS, None, 4, 0.0, 0, False)
    raw = noise((6 * 3 + 1,), torch.uint8)[1:].view(6, 3)  # rows no word is aligned to
    check_both(module, device, raw, OFFSETS, None, 4, 7, 0, True)


@given(
    st.lists(st.integers(0, 5), max_size=5),
    st.integers(0, 6),
    st.booleans(),
    st.integers(0, 3),
)
def test_round_trip(sizes, extra, left, features) -> None:
    """C4: pad and unpad is the identity; unpad and pad masks."""
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    values = torch.randn(sum(sizes), features)
    width = max(sizes, default=0) + extra
    padded = padding.packed_to_padded(values, offsets, width, left=left)
    assert torch.equal(padding.padded_to_packed(padded, offsets, left=left), values)


def test_public_functions_and_total() -> None:
    """K2: the total is optional; a wrong one is refused before anything is written."""
    values = torch.randn(6, 2)
    padded = padding.packed_to_padded(values, OFFSETS, 4, 0.5)
    assert torch.equal(padding.padded_to_packed(padded, OFFSETS), values)
    assert torch.equal(padding.padded_to_packed(padded, OFFSETS, 6), values)
    for wrong in 4, 12:
        with pytest.raises(RuntimeError, match=f"total_length {wrong}"):
            padding.padded_to_packed(padded, OFFSETS, wrong)


def test_operators() -> None:
    """K1: schema, fake and autograd are registered on the operators themselves."""
    values = torch.randn(6, 2, requires_grad=True)
    pad, unpad = torch.ops.njt.packed_to_padded.default, torch.ops.njt.padded_to_packed.default
    for lengths in None, GAPS:
        opcheck(pad, (values, OFFSETS, lengths, 4, 1.5, 0, False))
        opcheck(unpad, (torch.randn(3, 4, 2, requires_grad=True), OFFSETS, lengths, 6, 0, True))


@pytest.mark.parametrize("lengths", [None, GAPS], ids=["packed", "gaps"])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("width", [5, 2])
def test_gradients(lengths, left, width) -> None:
    """T5, C5, T9: each copy is the other's gradient, twice; cut rows and padding get 0."""
    values = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    padded = torch.randn(3, width, 2, dtype=torch.float64, requires_grad=True)

    def pad(v):
        return padding.packed_to_padded(v, OFFSETS, width, 3.0, lengths=lengths, left=left) ** 2

    def unpad(p):
        return padding.padded_to_packed(p, OFFSETS, 6, lengths=lengths, left=left) ** 2

    for f, x in (pad, values), (unpad, padded):
        assert torch.autograd.gradcheck(f, x)
        assert torch.autograd.gradgradcheck(f, x)


def test_several_ragged_dims() -> None:
    """K5: a list of offsets, outermost first, with gradients."""
    levels = [torch.tensor([0, 2, 3]), torch.tensor([0, 1, 4, 6])]
    values = torch.arange(12.0, requires_grad=True).view(6, 2)
    padded = padding_levels.nested_to_padded(values, levels, [2, 3], -1.0)
    assert padded.shape == (2, 2, 3, 2)
    assert padded[0, 1, :, 0].tolist() == [2, 4, 6]
    assert padded[1, 1].unique().tolist() == [-1]
    assert torch.equal(padding_levels.padded_to_nested(padded, levels), values)
    (grad,) = torch.autograd.grad(padded.sum(), values)
    assert torch.equal(grad, torch.ones(6, 2))


@pytest.mark.parametrize(("module", "device"), IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "filler"), [(torch.float16, 4.2), (torch.bool, True), (torch.int32, -1)], ids=str
)
def test_padding_value_is_converted_once(module, device, dtype, filler) -> None:
    """T4."""
    values = torch.zeros(1, dtype=dtype, device=device)
    offsets = torch.tensor([0, 0, 1], device=device)
    out = module.packed_to_padded(values, offsets, None, 2, filler, 0, False)
    wanted = torch.full((), filler, dtype=dtype, device=device)
    assert torch.equal(out[0], wanted.expand(2))
    assert torch.equal(out[1, 1], wanted)


KEPT_FILLERS = [
    (torch.int64, 2**62 + 1, 2**62 + 1),
    (torch.int64, -(2**63), -(2**63)),
    (torch.int32, 2.0, 2),
    (torch.uint8, 255, 255),
    (torch.bool, 3, True),
    (torch.float16, 65504, 65504.0),
    (torch.float32, -math.inf, -math.inf),
    (torch.float64, 10**300, 1e300),
    (torch.float8_e4m3fn, 448, 448.0),
    (torch.float8_e5m2, math.inf, math.inf),
    (torch.complex64, 1 + 2j, 1 + 2j),
    (torch.float32, torch.tensor(1.5), 1.5),
]


@pytest.fixture(params=["cpu", "triton"])
def ways(request, monkeypatch):
    """Calls of the public functions on CPU tensors go to the one or the other."""
    if request.param == "triton":
        if CUDA:
            pytest.skip("on a GPU the kernels take no CPU tensors")
        pair = padding_triton.packed_to_padded, padding_triton.padded_to_packed
        monkeypatch.setitem(padding_ops.IMPLEMENTATIONS, "cpu", pair)


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize(("dtype", "given", "wanted"), KEPT_FILLERS, ids=str)
@pytest.mark.parametrize("batch", [2, 20])
@pytest.mark.parametrize("features", [(), (3,), (2, 2)], ids=str)
def test_filler_is_exact(dtype, given, wanted, batch, features) -> None:
    """T4: what the dtype holds arrives unchanged, whichever way the rows go."""
    values = torch.zeros(batch, *features).to(dtype)
    offsets = torch.arange(batch + 1)
    for _ in range(2):  # the second call goes the way that the first prepared
        out = padding.packed_to_padded(values, offsets, 3, given)
        assert out.dtype is dtype
        assert out[:, 1:].flatten()[-1].item() == wanted
        assert torch.equal(bits(out[:, 1:]), bits(out[:1, 1:2].expand_as(out[:, 1:])))


REFUSED_FILLERS = [
    (torch.int64, 1.5),
    (torch.int64, 2**63),
    (torch.int64, math.inf),
    (torch.int32, math.nan),
    (torch.uint8, -1),
    (torch.float16, 1e5),
    (torch.float32, 1e39),
    (torch.float32, 1j),
    (torch.float8_e4m3fn, math.inf),
    (torch.complex64, 1e39j),
]


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("rows", [0, 3])
def test_filler_that_the_dtype_does_not_hold(rows) -> None:
    """T4: refused alike whichever way the rows go, and for an empty rectangle."""
    lines = []
    offsets = torch.tensor([0, min(rows, 1), rows])
    for dtype, filler in REFUSED_FILLERS:
        with pytest.raises(RuntimeError) as caught:
            padding.packed_to_padded(torch.zeros(rows, 2).to(dtype), offsets, 3, filler)
        lines.append(str(caught.value))
    for filler in (None, "0", [0], torch.zeros(1), torch.tensor(1.0, requires_grad=True)):
        with pytest.raises(TypeError) as caught:
            padding.packed_to_padded(torch.zeros(rows, 2), offsets, 3, filler)
        lines.append(str(caught.value))
    assert_expected_inline(
        "\n".join(lines),
        """\
packed_to_padded(): got padding 1.5 for torch.int64. Expected an integer in -9223372036854775808..9223372036854775807. Pass one, or convert the tensor: x.to(torch.float32).
packed_to_padded(): got padding 9223372036854775808 for torch.int64. Expected an integer in -9223372036854775808..9223372036854775807. Pass one, or convert the tensor: x.to(torch.float32).
packed_to_padded(): got padding inf for torch.int64. Expected an integer in -9223372036854775808..9223372036854775807. Pass one, or convert the tensor: x.to(torch.float32).
packed_to_padded(): got padding nan for torch.int32. Expected an integer in -2147483648..2147483647. Pass one, or convert the tensor: x.to(torch.float32).
packed_to_padded(): got padding -1 for torch.uint8. Expected an integer in 0..255. Pass one, or convert the tensor: x.to(torch.float32).
packed_to_padded(): got padding 100000.0 for torch.float16. Expected at most 65504.0 in size. Pass a smaller one, or convert the tensor to a wider dtype.
packed_to_padded(): got padding 1e+39 for torch.float32. Expected at most 3.4028234663852886e+38 in size. Pass a smaller one, or convert the tensor to a wider dtype.
packed_to_padded(): got padding 1j for torch.float32. Expected a real number. Pass padding.real, or make the tensor complex.
packed_to_padded(): got padding inf for torch.float8_e4m3fn. Expected at most 448.0 in size. Pass a smaller one, or convert the tensor to a wider dtype.
packed_to_padded(): got padding 1e+39j for torch.complex64. Expected at most 3.4028234663852886e+38 in size. Pass a smaller one, or convert the tensor to a wider dtype.
packed_to_padded(): got padding of type NoneType. Expected a number. Pass a filler such as 0.0.
packed_to_padded(): got padding of type str. Expected a number. Pass a filler such as 0.0.
packed_to_padded(): got padding of type list. Expected a number. Pass a filler such as 0.0.
packed_to_padded(): got padding of type Tensor. Expected a number. Pass a filler such as 0.0.
packed_to_padded(): got padding that requires grad. Expected a number. Filler has no gradient: padding.item().""",
    )


def test_direct_calls_of_the_operator_check_the_filler() -> None:
    args = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1, 2]), None, 2
    for mode in contextlib.nullcontext(), FakeTensorMode(allow_non_fake_inputs=True):
        with mode, pytest.raises(RuntimeError, match=r"got padding 0.5 for torch.int64"):
            torch.ops.njt.packed_to_padded(*args, 0.5, 0, False)


def test_many_segments() -> None:
    """T8: more segments than a grid dimension of 65,535."""
    count = 70_000
    offsets = torch.arange(count + 1)
    values = torch.randn(count, 1)
    assert torch.equal(padding.packed_to_padded(values, offsets, 1)[:, 0], values)


@pytest.mark.parametrize("features", [1, 2, 70_000], ids=["narrow", "words", "blocks"])
def test_bad_offsets_are_refused_alike(features) -> None:
    """K6: on CPU for free, whichever way the rows would have gone, before anything is written."""
    values, padded = torch.zeros(4, features), torch.zeros(2, 7, features)
    bad = {
        "offsets reaching row 9": (torch.tensor([0, 2, 9]), None),
        r"falling offsets \[0, 3, 2\]": (torch.tensor([0, 3, 2]), None),
        "offsets starting at 1": (torch.tensor([1, 3, 4]), None),
        r"a segment of rows \(2, 7\)": (torch.tensor([0, 2, 4]), torch.tensor([1, 5])),
        r"a segment of rows \(-1, 0\)": (torch.tensor([-1, 2, 4]), torch.tensor([1, 1])),
    }
    for fault, (offsets, lengths) in bad.items():
        with pytest.raises(RuntimeError, match=f"packed_to_padded.*{fault} for 4 rows"):
            padding.packed_to_padded(values, offsets, 7, lengths=lengths)
        with pytest.raises(RuntimeError, match=f"check_offsets.*{fault} for 4 rows"):
            padding.check_offsets(offsets, lengths, 4)
        total = 4 if lengths is not None else int(offsets[-1])
        if "reaching" not in fault:  # there the total is the last offset, and right
            with pytest.raises(RuntimeError, match=f"padded_to_packed.*{fault} for {total} rows"):
                padding.padded_to_packed(padded, offsets, total, lengths=lengths)


@pytest.mark.parametrize(("module", "device"), IMPLEMENTATIONS)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_rows_behind_the_last_offset(module, device, left) -> None:
    """K6: the last offset may lie before the end of the rows."""
    values, offsets = torch.randn(6, 2), torch.tensor([0, 2, 4])
    rest = (None, 3, 0.5, 0, left)
    out = module.packed_to_padded(values.to(device), offsets.to(device), *rest)
    assert torch.equal(out.cpu(), reference.packed_to_padded(values, offsets, *rest))


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_triton_reads_no_row_outside(left) -> None:
    """K6: offsets past the rows, which a GPU does not check, give filler and nothing of foreign memory."""
    device = "cuda" if CUDA else "cpu"
    memory = torch.full((9, 2), torch.nan, device=device)
    memory[:4] = 1
    offsets = torch.tensor([0, 2, 9], device=device)
    out = padding_triton.packed_to_padded(memory[:4], offsets, None, 7, 5.0, 0, left)
    assert set(out.unique().tolist()) == {1.0, 5.0}


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_past_two_billion_elements() -> None:
    """T8: element offsets beyond 2**31."""
    rows, features = 70_000, 40_000
    values = torch.zeros(rows, features, dtype=torch.uint8, device="cuda")
    values[-1] = 7
    offsets = torch.tensor([0, 1, rows], device="cuda")
    padded = padding.packed_to_padded(values, offsets, rows - 1)
    assert int(padded[1, -1].sum()) == 7 * features
    assert torch.equal(padding.padded_to_packed(padded, offsets, rows), values)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_wait_for_the_device() -> None:
    """T7, K2: with a width and a total given nothing is read back."""
    values, offsets = torch.randn(6, 2, device="cuda", requires_grad=True), OFFSETS.cuda()
    padded = padding.packed_to_padded(values, offsets, 4)
    torch.cuda.set_sync_debug_mode("error")
    try:
        padded = padding.packed_to_padded(values, offsets, 4)
        padding.padded_to_packed(padded, offsets, 6).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_refusals() -> None:
    """K6 and bad input: the numbers, before any write, alike on every device."""
    values, padded = torch.zeros(6, 2), torch.zeros(3, 4, 2)
    calls = {
        "floating offsets": lambda: padding.packed_to_padded(values, OFFSETS.float(), 4),
        "two-dim offsets": lambda: padding.packed_to_padded(values, OFFSETS[None], 4),
        "devices": lambda: padding.packed_to_padded(values, OFFSETS.to("meta"), 4),
        "width": lambda: padding.packed_to_padded(values, OFFSETS, -1),
        "values_dim": lambda: padding.packed_to_padded(values, OFFSETS, 4, values_dim=2),
        "lengths": lambda: padding.packed_to_padded(values, OFFSETS, 4, lengths=GAPS[:2]),
        "batch": lambda: padding.padded_to_packed(padded[:2], OFFSETS),
        "total": lambda: padding.padded_to_packed(padded, OFFSETS, 5),
        "levels": lambda: padding_levels.nested_to_padded(values, [OFFSETS], [1, 2]),
        "falling": lambda: padding.check_offsets(torch.tensor([0, 4, 2]), None, 4),
        "start": lambda: padding.check_offsets(torch.tensor([1, 4]), None, 4),
        "past": lambda: padding.check_offsets(torch.tensor([0, 9]), None, 4),
        "gap past": lambda: padding.check_offsets(torch.tensor([0, 3, 4]), torch.tensor([1, 2]), 4),
    }
    lines = []
    for name, call in calls.items():
        with pytest.raises(RuntimeError) as caught:
            call()
        lines.append(f"{name}: {caught.value}")
    assert_expected_inline(
        "\n".join(lines),
        """\
floating offsets: packed_to_padded(): got offsets (4,) of torch.float32. Expected one dim of int32 or int64. Pass offsets.flatten().long().
two-dim offsets: packed_to_padded(): got offsets (1, 4) of torch.int64. Expected one dim of int32 or int64. Pass offsets.flatten().long().
devices: packed_to_padded(): got rows on cpu and offsets on meta. Expected one device. Move it: offsets.to('cpu').
width: packed_to_padded(): got width -1. Expected 0 or more. Pass the longest length.
values_dim: packed_to_padded(): got values_dim 2 for a tensor (6, 2). Expected a dim in 0..1. Count the dims of the values, without the batch.
lengths: packed_to_padded(): got 4 offsets and 2 lengths. Expected one offset more than lengths. Offsets hold the start of each segment and one end.
batch: padded_to_packed(): got padded (2, 4, 2) and 4 offsets. Expected one offset more than the batch size. Check the batch dims.
total: padded_to_packed(): got total_length 5 for offsets ending at 6. Expected the last offset. Leave it out, or pass the sum of the lengths.
levels: nested_to_padded(): got 1 offsets tensors and 2 widths. Expected one width per offsets tensor, outermost first. Check the lists.
falling: check_offsets(): got falling offsets [0, 4, 2] for 4 rows. Expected offsets that start at 0, never fall and stay within the rows. Build them from lengths: F.pad(lengths.cumsum(0), (1, 0)).
start: check_offsets(): got offsets starting at 1 for 4 rows. Expected offsets that start at 0, never fall and stay within the rows. Build them from lengths: F.pad(lengths.cumsum(0), (1, 0)).
past: check_offsets(): got offsets reaching row 9 for 4 rows. Expected offsets that start at 0, never fall and stay within the rows. Build them from lengths: F.pad(lengths.cumsum(0), (1, 0)).
gap past: check_offsets(): got a segment of rows (3, 5) for 4 rows. Expected offsets that start at 0, never fall and stay within the rows. Build them from lengths: F.pad(lengths.cumsum(0), (1, 0)).""",
    )


def test_past_the_dispatcher_as_through_it() -> None:
    """T1: modes, transforms, tangents and the profiler meet the operators; plain calls take a shorter way."""
    values = torch.randn(6, 2)
    plain = padding.packed_to_padded(values, OFFSETS, 4)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        seen = padding.packed_to_padded(values, OFFSETS, 4)
    assert torch.equal(seen, plain)
    assert "njt::packed_to_padded" in {event.name for event in profile.events()}
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(padding.packed_to_padded(values, OFFSETS, 4), FakeTensor)
    grad = torch.func.grad(lambda v: padding.packed_to_padded(v, OFFSETS, 4).square().sum())(values)
    assert torch.equal(grad, 2 * values)
    many = torch.randn(6, 3, 2)
    both = torch.func.vmap(lambda v: padding.packed_to_padded(v, OFFSETS, 4), 1, 2)(many)
    assert torch.equal(both, padding.packed_to_padded(many, OFFSETS, 4))
    back = torch.func.vmap(lambda p: padding.padded_to_packed(p, OFFSETS, 6), 2, 1)(both)
    assert torch.equal(back, many)
    cuts = torch.stack([OFFSETS, OFFSETS.new_tensor([0, *[6] * (len(OFFSETS) - 1)])])
    for copy in (
        lambda o: padding.packed_to_padded(values, o, 6),
        lambda o: padding.padded_to_packed(padding.packed_to_padded(values, o, 6), o, 6),
        lambda o: torch.func.grad(lambda v: padding.packed_to_padded(v, o, 3).pow(3).sum())(values),
    ):
        assert torch.equal(torch.func.vmap(copy)(cuts), torch.stack([copy(o) for o in cuts]))
    lazy = torch.randn(6, 2, dtype=torch.complex64).conj()
    assert torch.equal(
        padding.padded_to_packed(padding.packed_to_padded(lazy, OFFSETS, 4), OFFSETS), lazy
    )
    nodes = [
        padding.packed_to_padded(values.requires_grad_(), OFFSETS, 4),
        padding.padded_to_packed(plain.requires_grad_(), OFFSETS),
    ]
    assert all(node.grad_fn is not None for node in nodes)
    with torch.no_grad():
        assert padding.packed_to_padded(values, OFFSETS, 4).grad_fn is None
