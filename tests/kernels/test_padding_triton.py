"""What only the Triton copies have: words put together from two, tiles of several runs, direct launches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from njt.kernels import launch, padding_triton, reference
from tests.kernels.test_padding import CUDA, bits, check_both, noise

DEVICE = "cuda" if CUDA else "cpu"


@pytest.fixture
def tiny(monkeypatch):
    """Runs of any length count as long, and tiles are so small that a run takes several."""

    def tile(words: int, runs: int) -> tuple[int, int, int]:
        return 2, 4, 2

    monkeypatch.setattr(padding_triton, "_NARROW_FROM", 0)
    monkeypatch.setattr(padding_triton, "_pad_tile", lambda words, runs: (2, 4, -(-words // 4) + 1))
    monkeypatch.setattr(padding_triton, "_unpad_tile", tile)


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("gaps", [False, True], ids=["packed", "gaps"])
@pytest.mark.parametrize("shape", [((), ()), ((), (3,)), ((2,), (5,))], ids=str)
def test_tiles(tiny, left, dtype, gaps, shape) -> None:
    """T4, T6: rows of any width, runs that end anywhere in a word, planes that share one."""
    pre, post = shape
    offsets = torch.tensor([0, 5, 5, 16, 17, 40])
    lengths = torch.tensor([3, 0, 11, 1, 20]) if gaps else None
    values = noise((*pre, 43 if gaps else 40, *post), dtype)
    for width in (23, 13, 1):
        check_both(padding_triton, DEVICE, values, offsets, lengths, width, 3, len(pre), left)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=5),
    st.integers(1, 90),
    st.sampled_from([1, 2, 3, 5, 7]),
    st.booleans(),
)
def test_bytes(sizes, width, row, left) -> None:
    """T4: byte rows, whatever their ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padding_triton, "_NARROW_FROM", 0)
        offsets = torch.tensor([0, *sizes]).cumsum(0)
        values = noise((sum(sizes), row), torch.uint8)
        check_both(padding_triton, DEVICE, values, offsets, None, width, 9, 0, left)


def test_long_narrow_runs_are_moved_by_words() -> None:
    """Bytes of long runs go the way of words without any switch, last bytes of the memory included."""
    offsets = torch.tensor([0, 600, 1203])
    values = noise((1203,), torch.uint8)
    check_both(padding_triton, DEVICE, values, offsets, None, 701, 9, 0, False)
    memory = noise((1203 + 16,), torch.uint8, DEVICE)
    for skipped in (8, 3):  # a base that is whole words, and one that is not
        part = memory[skipped : skipped + 1203]
        got = padding_triton.packed_to_padded(part, offsets.to(DEVICE), None, 701, 9, 0, False)
        wanted = reference.packed_to_padded(part.cpu(), offsets, None, 701, 9, 0, False)
        assert torch.equal(bits(got), bits(wanted))


def test_offsets_that_lie_touch_nothing_outside() -> None:
    """K6: on a GPU offsets are not read by the host; whatever they say, memory around stays as it is."""
    for numbers in ([0, 700, 5000], [-40, 300, 600], [0, 900, 300]):
        offsets = torch.tensor(numbers, device=DEVICE)
        memory = torch.full((8 + 640 + 8,), 7, dtype=torch.uint8, device=DEVICE)
        padded = torch.full((2, 650), 1, dtype=torch.uint8, device=DEVICE)
        padding_triton.padded_to_packed(padded, offsets, None, 640, 0, False, out=memory[8:648])
        assert set(memory[:8].tolist()) | set(memory[648:].tolist()) == {7}
        memory = torch.full((8 + 640 + 8,), 7, dtype=torch.uint8, device=DEVICE)
        memory[8:648] = 1
        out = padding_triton.packed_to_padded(memory[8:648], offsets, None, 650, 5, 0, False)
        assert set(out.unique().tolist()) <= {1, 5}


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_a_second_launch_goes_straight_to_the_kernel() -> None:
    """The kernel found again is the one that Triton would find, and is launched on the current stream."""
    assert launch._DIRECT
    values, offsets = torch.randn(40, 3, device="cuda"), torch.tensor([0, 15, 40], device="cuda")
    kept = padding_triton._move._compiled
    kept.clear()
    first = padding_triton.packed_to_padded(values, offsets, None, 30, 0.0, 0, False)
    assert len(kept) == 1
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        again = padding_triton.packed_to_padded(values[1:], offsets - 1, None, 30, 0.0, 0, False)
        again = padding_triton.packed_to_padded(values, offsets, None, 30, 0.0, 0, False)
    side.synchronize()
    assert len(kept) == 1
    assert torch.equal(first, again)
