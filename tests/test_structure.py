"""Structure: one object per offsets, bounds and caches computed once, equality proved once."""

from __future__ import annotations

import copy
import gc
import pickle
from collections import Counter

import pytest
import torch
from hypothesis import given
from torch.utils._python_dispatch import TorchDispatchMode

import njt
from njt.structure import Structure
from tests.samples import lengths_strategy


class Counting(TorchDispatchMode):
    """Which operators ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def offsets_of(*lengths: int, dtype=torch.int64) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def test_one_object_per_offsets_tensor() -> None:
    offsets, lengths = offsets_of(2, 3), torch.tensor([1, 2])
    s = Structure.find(offsets)
    assert Structure.find(offsets) is s
    assert Structure.find(offsets, lengths) is not s
    assert Structure.find(offsets.clone()) is not s


def test_the_table_holds_nothing_alive() -> None:
    from njt.structure import _TABLE

    before = len(_TABLE)
    s = Structure.find(offsets_of(2, 3))
    assert len(_TABLE) == before + 1
    del s
    gc.collect()
    assert len(_TABLE) <= before


@given(lengths_strategy)
def test_derived_facts(lengths) -> None:
    s = Structure.find(offsets_of(*lengths))
    assert s.batch_size == len(lengths)
    assert s.seqlens.tolist() == list(lengths)
    assert (s.min_seqlen, s.max_seqlen) == (min(lengths, default=0), max(lengths, default=0))
    assert s.total_length == sum(lengths)
    assert s.host_lengths() == lengths
    assert s.row_index().tolist() == list(range(sum(lengths)))
    assert s.compact() is s


def test_gaps() -> None:
    s = Structure.find(torch.tensor([1, 4, 6, 9]), torch.tensor([2, 0, 1]))
    assert s.has_gaps
    assert s.row_index().tolist() == [1, 2, 6]
    assert s.row_mask(9).nonzero().flatten().tolist() == [1, 2, 6]
    assert s.compact().host_lengths() == (2, 0, 1)
    assert s.compact() is s.compact()
    assert s.same_lengths(s.compact())
    assert not s.same_layout(s.compact())


def test_bounds_from_the_host_need_no_operator() -> None:
    """T7, C3: lengths that came from the host answer every question without the device."""
    s = Structure.from_lengths([2, 0, 5])
    other = Structure.from_lengths([2, 0, 5])
    with Counting() as mode:
        assert (s.min_seqlen, s.max_seqlen, s.total_length) == (0, 5, 7)
        assert s.same_lengths(other)
        assert s.known_max_seqlen == 5
    assert not mode.seen


def test_equality_is_proved_once() -> None:
    a, b, c = (Structure.find(offsets_of(2, 3)) for _ in range(3))
    with Counting() as mode:
        assert a.same_lengths(b)
        assert b.same_lengths(c)
    assert mode.seen
    with Counting() as mode:
        assert a.same_lengths(b)
        assert a.same_lengths(c)  # follows from the other two
    assert not mode.seen
    assert not a.same_lengths(Structure.find(offsets_of(3, 2)))
    assert not a.same_lengths(Structure.find(offsets_of(2, 3, 0)))


def test_bounds_pass_between_equal_structures() -> None:
    a, b = Structure.find(offsets_of(2, 3)), Structure.find(offsets_of(2, 3))
    assert a.max_seqlen == 3
    assert b.known_max_seqlen is None
    assert a.same_lengths(b)
    assert b.known_max_seqlen == 3


def test_written_offsets_are_read_again() -> None:
    """A cache of lengths that grow in place (a key-value cache) never answers with old bounds."""
    offsets, lengths = torch.tensor([0, 4, 8]), torch.tensor([1, 2])
    s = Structure.find(offsets, lengths)
    other = Structure.find(offsets.clone(), lengths.clone())
    assert s.max_seqlen == 2
    assert s.same_lengths(other)
    lengths += 1
    assert s.max_seqlen == 3
    assert s.host_lengths() == (2, 3)
    assert not s.same_lengths(other)


def test_extent_carries_bounds() -> None:
    """M1: the form in which bounds travel through graphs."""
    s = Structure.from_lengths([2, 0, 5])
    assert s.extent is not None
    assert s.extent.shape == (7, 2, 0)
    t = Structure.find(offsets_of(2, 0, 5), extent=s.extent)
    assert (t.known_max_seqlen, t.known_min_seqlen) == (5, 0)
    unknown = Structure.find(offsets_of(1, 1))
    assert unknown.extent is None
    unknown.set_bounds(max_seqlen=1)
    assert unknown.extent is not None
    assert unknown.extent.shape == (3, 1, 0)


def test_moved_once_and_back_known() -> None:
    s = Structure.from_lengths([2, 3])
    meta = torch.device("meta")
    assert s.to(torch.device("cpu")) is s
    assert s.to(meta) is s.to(meta) or s.to(meta).is_traced


def test_copies() -> None:
    """M3: pickle and deepcopy keep bounds and sharing."""
    x = njt.nested_tensor([torch.zeros(2, 1), torch.zeros(3, 1)])
    pair = [x, x * 2]
    for twin in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        assert twin[0].structure is twin[1].structure
        assert twin[0].structure is not x.structure
        assert twin[0].structure.known_max_seqlen == 3
        assert twin[0].structure.host_lengths() == (2, 3)


def test_validation_leaves_no_trace_of_wrong_offsets() -> None:
    offsets = torch.tensor([0, 4, 2])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="falling offsets"):
            njt.nested_tensor_from_jagged(torch.zeros(2), offsets)


def test_lengths_that_were_read_are_checked_all_the_same() -> None:
    """Who looked at offsets before made no check."""
    offsets = torch.tensor([1, 3, 5])
    assert Structure.find(offsets).host_lengths() == (2, 2)
    with pytest.raises(RuntimeError, match="offsets starting at 1"):
        njt.nested_tensor_from_jagged(torch.zeros(4), offsets)


def test_repr() -> None:
    assert repr(Structure.from_lengths([2, 3])) == "Structure(lengths=[2, 3])"
