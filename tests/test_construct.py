"""The ways in and out: what they make, what they share, what they refuse and in which words."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

import njt
from tests.samples import (
    STRUCTURES,
    components,
    features_strategy,
    layouts,
    lengths_strategy,
    sample,
)


def parts(lengths=(2, 1, 3), *tail: int, dtype=torch.float32):
    return [torch.arange(n * 3.0).view(n, 3).to(dtype) + 10 * i for i, n in enumerate(lengths)]


# ---- lists ----


@given(lengths_strategy.filter(bool), features_strategy, st.integers(0, 2))
def test_list_round_trip(lengths, features, at) -> None:
    """Whatever dim varies, unbind gives the list back, and nothing of it is shared."""
    at = min(at, len(features))
    shape = [*features[:at], 0, *features[at:]]
    given_parts = [torch.randn([n if d == at else s for d, s in enumerate(shape)]) for n in lengths]
    x = njt.nested_tensor(given_parts)
    for got, part in zip(x.unbind(), given_parts, strict=True):
        assert torch.equal(got, part)
    if len(set(lengths)) > 1:
        assert x.ragged_dim == at + 1
    assert x.max_seqlen == max(c.shape[x.ragged_dim - 1] for c in given_parts)


def test_nested_tensor_is_a_detached_leaf() -> None:
    tracked = [p.requires_grad_() for p in parts()]
    with pytest.warns(UserWarning, match="as_nested_tensor"):
        x = njt.nested_tensor(tracked)
    assert not x.requires_grad
    y = njt.nested_tensor(parts(), requires_grad=True)
    assert y.is_leaf
    y.sum().backward()
    assert torch.equal(y.grad.values(), torch.ones(6, 3))
    assert y.grad.structure is y.structure


def test_as_nested_tensor_keeps_the_graph() -> None:
    tracked = [p.requires_grad_() for p in parts()]
    (njt.as_nested_tensor(tracked) ** 2).sum().backward()
    for p in tracked:
        assert torch.equal(p.grad, 2 * p.detach())


def test_as_nested_tensor_of_dense_is_a_view() -> None:
    dense = torch.randn(2, 3, 4, requires_grad=True)
    x = njt.as_nested_tensor(dense)
    assert x.untyped_storage().data_ptr() == dense.untyped_storage().data_ptr()
    assert x.structure.host_lengths() == (3, 3)
    x.mul(2).sum().backward()
    assert torch.equal(dense.grad, torch.full((2, 3, 4), 2.0))
    assert njt.as_nested_tensor(x) is x


def test_numbers_and_conversions() -> None:
    x = njt.nested_tensor([[1, 2], [3]], dtype=torch.float64)
    assert x.dtype is torch.float64
    assert x.values().tolist() == [1, 2, 3]
    assert njt.as_nested_tensor(parts(), dtype=torch.int32).dtype is torch.int32


def test_lists_have_one_dtype() -> None:
    """As torch.tensor of them all; an empty list has neither dtype nor features of its own."""
    for listed, wanted in (
        ([[1, 2], []], torch.tensor([1, 2])),
        ([[], [1, 2]], torch.tensor([1, 2])),
        ([[1, 2], [0.5]], torch.tensor([1, 2, 0.5])),
        ([[[1, 2]], [], [[3, 4]]], torch.tensor([[1, 2], [3, 4]])),
        ([torch.ones(2, dtype=torch.float64), []], torch.ones(2, dtype=torch.float64)),
        ([[], []], torch.tensor([])),
    ):
        x = njt.nested_tensor(listed)
        assert x.values().dtype is wanted.dtype
        assert torch.equal(x.values(), wanted)
        assert x.seqlens.tolist() == [len(part) for part in listed]
    assert njt.nested_tensor([[1], []], dtype=torch.float16).dtype is torch.float16


# ---- packed values ----


def test_values_are_viewed_not_copied() -> None:
    values = torch.zeros(5)
    x = njt.nested_tensor_from_jagged(values, torch.tensor([0, 2, 5]))
    values[2] = 7.0
    assert x[1].tolist() == [7.0, 0, 0]
    x.add_(1)
    assert values.tolist() == [1, 1, 8, 1, 1]
    assert x._is_view()
    assert x.values().untyped_storage().data_ptr() == values.untyped_storage().data_ptr()


def test_same_offsets_are_the_same_structure() -> None:
    offsets = torch.tensor([0, 2, 5])
    x = njt.nested_tensor_from_jagged(torch.zeros(5), offsets)
    y = njt.nested_tensor_from_jagged(torch.zeros(5, 2), offsets)
    assert x.structure is y.structure
    assert x.shape[1] == y.shape[1]


def test_lengths_alone() -> None:
    x = njt.nested_tensor_from_jagged(torch.arange(5.0), lengths=torch.tensor([2, 3]))
    assert [c.tolist() for c in x.unbind()] == [[0, 1], [2, 3, 4]]
    assert x.lengths() is None


@pytest.mark.parametrize("layout", STRUCTURES, ids=str)
def test_bounds(layout) -> None:
    """T6, M6: true bounds however it was built, computed when they were not given."""
    x = sample(layout)
    assert x.max_seqlen == max(layout.lengths, default=0)
    assert x.min_seqlen == min(layout.lengths, default=0)
    assert x.seqlens.tolist() == list(layout.lengths)
    assert x._max_seqlen == x._get_max_seqlen() == x.max_seqlen
    assert x._metadata_cache == {"max_seqlen": x.max_seqlen, "min_seqlen": x.min_seqlen}


def test_bounds_can_be_set() -> None:
    """M6: on a device a bound is believed; a larger one is allowed."""
    x = sample()
    x.max_seqlen = 9
    assert x.to_padded_tensor(0.0).shape[1] == 9
    x._max_seqlen = 4
    assert x.max_seqlen == 4


# ---- padded ----


@given(layouts(gaps=False), features_strategy, st.sampled_from(["left", "right"]))
def test_round_trip(layout, features, side) -> None:
    """C3, C4: exact for any rank, ragged dim, zero lengths and either side."""
    x = sample(layout, features)
    padded = njt.to_padded_tensor(x, float("nan"), padding_side=side)
    y = njt.from_padded(padded, offsets=x.offsets(), ragged_dim=x.ragged_dim, padding_side=side)
    assert torch.equal(y.values(), x.values())
    assert y.structure is x.structure
    again = njt.to_padded_tensor(y, float("nan"), padding_side=side)
    assert torch.equal(again.nan_to_num(7), padded.nan_to_num(7))


@pytest.mark.parametrize("layout", STRUCTURES, ids=str)
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_equals_the_loop(layout, side) -> None:
    """T2, C7: any trailing dims, ragged dim anywhere, gaps, both sides; T6: as wide as the longest."""
    x = sample(layout)
    d, width = x.ragged_dim - 1, max(layout.lengths, default=0)
    rows = []
    for c in components(x):
        row = torch.full([width if k == d else n for k, n in enumerate(c.shape)], 4.2)
        start = width - c.shape[d] if side == "left" else 0
        row.narrow(d, start, c.shape[d]).copy_(c)
        rows.append(row)
    got = njt.to_padded_tensor(x, 4.2, padding_side=side)
    if rows:
        assert torch.equal(got, torch.stack(rows))
    else:
        assert got.shape[0] == 0
    assert torch.equal(torch.nested.to_padded_tensor(x, 4.2), x.to_padded_tensor(4.2))


def test_from_padded_by_lengths_list_tensor_and_mask() -> None:
    """C1, C6: three ways to say the same; a mask may have holes."""
    padded = torch.arange(12.0).view(2, 3, 2)
    wanted = [[[0.0, 1.0], [2.0, 3.0]], [[6.0, 7.0]]]
    mask = torch.tensor([[True, True, False], [True, False, False]])
    for how in ({"lengths": [2, 1]}, {"lengths": torch.tensor([2, 1])}, {"mask": mask}):
        x = njt.from_padded(padded, **how)
        assert [c.tolist() for c in x.unbind()] == wanted
        assert x.max_seqlen == 2
    holes = torch.tensor([[True, False, True], [False, False, True]])
    x = njt.from_padded(padded, mask=holes)
    assert [c.tolist() for c in x.unbind()] == [[[0, 1], [4, 5]], [[10, 11]]]


def test_integers_of_all_kinds() -> None:
    """Lengths, bounds and totals may be numbers, NumPy's numbers or tensors of one."""
    padded = torch.arange(6.0).view(2, 3)
    kinds = [torch.tensor(1), torch.tensor(2, dtype=torch.int32)], np.array([1, 2]), (1, 2)
    for lengths in (*kinds, torch.tensor([1, 2], dtype=torch.uint8)):
        x = njt.from_padded(padded, lengths, total_length=np.int64(3), max_seqlen=torch.tensor(2))
        assert x.values().tolist() == [0, 3, 4]
    assert (
        njt.narrow(padded, -1, [0, 1], torch.tensor(2)).values().tolist()
        == padded.view(-1).tolist()
    )


def test_from_padded_shares_structure() -> None:
    """C2: with the offsets of x the result adds to x; with equal lengths as well."""
    x = sample()
    padded = x.to_padded_tensor(0.0)
    for how in ({"offsets": x.offsets()}, {"lengths": x.seqlens}):
        assert torch.equal((x + njt.from_padded(padded, **how)).values(), 2 * x.values())


def test_gradient_of_padding_is_zero() -> None:
    """C5, T5."""
    padded = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)

    def f(p):
        return (njt.from_padded(p, lengths=[2, 1]) ** 3).values()

    f(padded).sum().backward()
    assert torch.equal(padded.grad[0, 2:], torch.zeros(1, 2, dtype=torch.float64))
    assert torch.equal(padded.grad[1, 1:], torch.zeros(2, 2, dtype=torch.float64))
    assert torch.autograd.gradcheck(f, padded)
    assert torch.autograd.gradgradcheck(f, padded)


def test_gradient_of_to_padded() -> None:
    """T5: one gather, twice differentiable."""
    values = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, 2, 2, 6])

    def f(v):
        x = njt.nested_tensor_from_jagged(v, offsets)
        return x.to_padded_tensor(1.5) ** 2

    assert torch.autograd.gradcheck(f, values)
    assert torch.autograd.gradgradcheck(f, values)


def test_output_size_cuts_with_zero_gradient() -> None:
    """T9: a smaller ragged entry truncates, and its backward gives 0 for cut rows; -1 keeps the own size."""
    values = torch.randn(6, 2, requires_grad=True)
    x = njt.nested_tensor_from_jagged(values, torch.tensor([0, 2, 6]))
    cut = njt.to_padded_tensor(x, 0.0, (2, 3, 2))
    assert cut.shape == (2, 3, 2)
    cut.sum().backward()
    assert values.grad[:, 0].tolist() == [1, 1, 1, 1, 1, 0]
    assert njt.to_padded_tensor(x, 0.0, (-1, -1, 2)).shape == (2, 4, 2)
    assert njt.to_padded_tensor(x, 0.0, (2, 6, -1)).shape == (2, 6, 2)


@pytest.mark.parametrize(
    ("dtype", "padding", "wanted"),
    [
        (torch.bool, True, True),
        (torch.int64, 2**53 + 1, 2**53 + 1),
        (torch.int32, -1, -1),
        (torch.float16, 4.2, torch.tensor(4.2, dtype=torch.float16).item()),
        (torch.complex64, 1.5, 1.5),
    ],
    ids=str,
)
def test_padding_value_and_exact_copy(dtype, padding, wanted) -> None:
    """T3, T4: bits are copied, the filler is converted once."""
    values = torch.tensor([2**53 + 1, 0, 3]).to(dtype)
    x = njt.nested_tensor_from_jagged(values, torch.tensor([0, 1, 3]))
    padded = x.to_padded_tensor(padding)
    assert padded.dtype is dtype
    assert padded[0, 1].item() == wanted
    assert torch.equal(padded[1], values[1:])


# ---- pieces of dense tensors ----


def test_narrow_is_a_view_with_gaps() -> None:
    dense = torch.randn(3, 5, 2, requires_grad=True)
    start, length = torch.tensor([0, 2, 4]), torch.tensor([5, 0, 1])
    x = njt.narrow(dense, 1, start, length)
    for got, row, s, n in zip(x.unbind(), dense, start.tolist(), length.tolist()):
        assert torch.equal(got, row[s : s + n])
    assert x.untyped_storage().data_ptr() == dense.untyped_storage().data_ptr()
    (x * 3).sum().backward()
    wanted = torch.zeros(3, 5, 2)
    wanted[0], wanted[2, 4] = 3, 3
    assert torch.equal(dense.grad, wanted)


def test_narrow_by_numbers_and_masked_select() -> None:
    dense = torch.arange(12).view(2, 6)
    assert [c.tolist() for c in njt.narrow(dense, 1, 1, 2).unbind()] == [[1, 2], [7, 8]]
    x = njt.masked_select(dense, dense % 5 == 0)
    assert [c.tolist() for c in x.unbind()] == [[0, 5], [10]]


# ---- what is refused ----

V = torch.zeros(5, 2)
REFUSED = {
    "offsets past the rows": (
        lambda: njt.nested_tensor_from_jagged(V, torch.tensor([0, 3, 9])),
        RuntimeError,
    ),
    "offsets short of the rows": (
        lambda: njt.nested_tensor_from_jagged(V, torch.tensor([0, 3])),
        RuntimeError,
    ),
    "falling offsets": (
        lambda: njt.nested_tensor_from_jagged(V, torch.tensor([0, 4, 2, 5])),
        RuntimeError,
    ),
    "offsets not from 0": (
        lambda: njt.nested_tensor_from_jagged(V, torch.tensor([1, 5])),
        RuntimeError,
    ),
    "negative offsets": (
        lambda: njt.nested_tensor_from_jagged(V, torch.tensor([-2, 1, 5])),
        RuntimeError,
    ),
    "lengths past the rows": (
        lambda: njt.nested_tensor_from_jagged(V, torch.tensor([0, 3, 5]), torch.tensor([3, 3])),
        RuntimeError,
    ),
    "floating offsets": (
        lambda: njt.nested_tensor_from_jagged(V, torch.tensor([0.0, 5.0])),
        RuntimeError,
    ),
    "offsets of two dims": (
        lambda: njt.nested_tensor_from_jagged(V, torch.zeros(1, 2).long()),
        RuntimeError,
    ),
    "no offsets": (lambda: njt.nested_tensor_from_jagged(V), RuntimeError),
    "empty offsets": (
        lambda: njt.nested_tensor_from_jagged(V, torch.zeros(0).long()),
        RuntimeError,
    ),
    "too many lengths": (
        lambda: njt.nested_tensor_from_jagged(V, torch.tensor([0, 5]), torch.tensor([2, 3])),
        RuntimeError,
    ),
    "another device": (
        lambda: njt.nested_tensor_from_jagged(V, torch.zeros(2, device="meta", dtype=torch.int64)),
        RuntimeError,
    ),
    "jagged_dim": (
        lambda: njt.nested_tensor_from_jagged(V, torch.tensor([0, 5]), jagged_dim=4),
        ValueError,
    ),
    "max_seqlen too small": (
        lambda: njt.nested_tensor_from_jagged(V, torch.tensor([0, 1, 5]), max_seqlen=3),
        ValueError,
    ),
    "min_seqlen too large": (
        lambda: njt.nested_tensor_from_jagged(V, torch.tensor([0, 1, 5]), min_seqlen=3),
        ValueError,
    ),
    "values nested": (
        lambda: njt.nested_tensor_from_jagged(njt.nested_tensor([V]), torch.tensor([0, 5])),
        TypeError,
    ),
    "empty list": (lambda: njt.nested_tensor([]), RuntimeError),
    "mixed dtypes": (lambda: njt.nested_tensor([V, V.double()]), RuntimeError),
    "other feature sizes": (lambda: njt.nested_tensor([V, torch.zeros(3, 4)]), RuntimeError),
    "mixed ranks": (lambda: njt.nested_tensor([V, torch.zeros(3)]), RuntimeError),
    "scalars": (lambda: njt.nested_tensor([torch.tensor(1.0)]), RuntimeError),
    "another layout": (lambda: njt.nested_tensor([V], layout=torch.strided), ValueError),
    "not tensors": (lambda: njt.as_nested_tensor([V, 3]), TypeError),
    "from_padded without how": (lambda: njt.from_padded(V), ValueError),
    "from_padded too long": (lambda: njt.from_padded(V, lengths=[1, 1, 1, 1, 3]), RuntimeError),
    "from_padded batch": (lambda: njt.from_padded(V, lengths=[1]), RuntimeError),
    "from_padded side": (
        lambda: njt.from_padded(V, lengths=[1] * 5, padding_side="up"),
        ValueError,
    ),
    "from_padded mask": (lambda: njt.from_padded(V, mask=torch.ones(5, 2)), RuntimeError),
    "from_padded total": (
        lambda: njt.from_padded(V, offsets=torch.arange(6), total_length=9),
        RuntimeError,
    ),
    "output_size rank": (
        lambda: njt.to_padded_tensor(njt.nested_tensor([V]), 0.0, (1, 5)),
        RuntimeError,
    ),
    "output_size features": (
        lambda: njt.to_padded_tensor(njt.nested_tensor([V]), 0.0, (1, 5, 3)),
        RuntimeError,
    ),
    "narrow past the row": (lambda: njt.narrow(V, 1, 1, 2), RuntimeError),
    "narrow dim": (lambda: njt.narrow(V, 0, 0, 1), RuntimeError),
    "overlap": (
        lambda: njt.nested_tensor_from_jagged(V, torch.tensor([0, 2, 5]), torch.tensor([3, 3])),
        RuntimeError,
    ),
    "overlap with room behind": (
        lambda: njt.nested_tensor_from_jagged(V, torch.tensor([0, 1, 3]), torch.tensor([2, 1])),
        RuntimeError,
    ),
    "components in another order": (
        lambda: njt.nested_tensor_from_jagged(V, torch.tensor([2, 0, 5]), torch.tensor([3, 2])),
        RuntimeError,
    ),
    "negative lengths and offsets": (
        lambda: njt.nested_tensor_from_jagged(V, torch.tensor([0, 3, 5]), torch.tensor([3, -1])),
        RuntimeError,
    ),
    "max_seqlen that is no integer": (
        lambda: njt.nested_tensor_from_jagged(V, torch.tensor([0, 5]), max_seqlen=5.0),
        TypeError,
    ),
    "max_seqlen set too small": (
        lambda: setattr(njt.nested_tensor([V, V[:1]]), "max_seqlen", 4),
        ValueError,
    ),
    "negative min_seqlen": (
        lambda: njt.nested_tensor_from_jagged(V, torch.tensor([0, 5]), min_seqlen=-1),
        ValueError,
    ),
    "sparse values": (
        lambda: njt.nested_tensor_from_jagged(V.to_sparse(), torch.tensor([0, 5])),
        TypeError,
    ),
    "values in a list": (
        lambda: njt.nested_tensor_from_jagged([1, 2], torch.tensor([0, 2])),
        TypeError,
    ),
    "jagged_dim that is no integer": (
        lambda: njt.nested_tensor_from_jagged(V, torch.tensor([0, 5]), jagged_dim=1.5),
        TypeError,
    ),
    "nested in a list": (lambda: njt.nested_tensor([njt.nested_tensor([V])]), TypeError),
    "nested twice in a list": (
        lambda: njt.as_nested_tensor([njt.nested_tensor([V, V[:1]])] * 2),
        TypeError,
    ),
    "sparse in a list": (lambda: njt.nested_tensor([V.to_sparse()]), TypeError),
    "None in a list": (lambda: njt.nested_tensor([V, None]), TypeError),
    "text in a list": (lambda: njt.nested_tensor(["ab", "c"]), TypeError),
    "no list": (lambda: njt.nested_tensor(None), TypeError),
    "numbers": (lambda: njt.nested_tensor([1, 2, 3]), RuntimeError),
    "no rectangle": (lambda: njt.nested_tensor([[[1, 2], [3]]]), ValueError),
    "one number": (lambda: njt.nested_tensor(torch.tensor(1.0)), RuntimeError),
    "as_nested_tensor of nothing": (lambda: njt.as_nested_tensor(None), TypeError),
    "as_nested_tensor of torch's": (
        lambda: njt.as_nested_tensor(torch.nested.nested_tensor([V], layout=torch.jagged)),
        TypeError,
    ),
    "from_padded of a list": (lambda: njt.from_padded([[1, 2]], [1]), TypeError),
    "from_padded negative": (lambda: njt.from_padded(V, [1, 1, 1, -1, 1]), RuntimeError),
    "from_padded floats": (lambda: njt.from_padded(V, [1.0] * 5), TypeError),
    "from_padded floating tensor": (lambda: njt.from_padded(V, torch.ones(5)), RuntimeError),
    "from_padded bools": (lambda: njt.from_padded(V, [True] * 5), TypeError),
    "from_padded bool tensor": (
        lambda: njt.from_padded(V, torch.ones(5, dtype=torch.bool)),
        RuntimeError,
    ),
    "from_padded one length": (lambda: njt.from_padded(V, 3), TypeError),
    "from_padded empty offsets": (
        lambda: njt.from_padded(V, offsets=torch.zeros(0, dtype=torch.int64)),
        RuntimeError,
    ),
    "from_padded two totals": (
        lambda: njt.from_padded(V, [1] * 5, total_length=5, sum_S=6),
        ValueError,
    ),
    "from_padded total that is no integer": (
        lambda: njt.from_padded(V, [1] * 5, total_length=5.0),
        TypeError,
    ),
    "from_padded mask and total": (
        lambda: njt.from_padded(V, mask=V == 0, total_length=9),
        RuntimeError,
    ),
    "from_padded mask and bound": (
        lambda: njt.from_padded(V, mask=V == 0, max_seqlen=1),
        ValueError,
    ),
    "from_padded mask in a list": (lambda: njt.from_padded(V, mask=[[True] * 2] * 5), TypeError),
    "output_size below -1": (
        lambda: njt.to_padded_tensor(njt.nested_tensor([V]), 0.0, (1, -2, 2)),
        RuntimeError,
    ),
    "output_size that is no integer": (
        lambda: njt.to_padded_tensor(njt.nested_tensor([V]), 0.0, (1, 5.0, 2)),
        TypeError,
    ),
    "output_size of one number": (
        lambda: njt.to_padded_tensor(njt.nested_tensor([V]), 0.0, 5),
        TypeError,
    ),
    "padding a list": (lambda: njt.to_padded_tensor([V], 0.0), TypeError),
    "padding torch's": (
        lambda: njt.to_padded_tensor(torch.nested.nested_tensor([V], layout=torch.jagged), 0.0),
        TypeError,
    ),
    "filler": (lambda: njt.to_padded_tensor(njt.nested_tensor([V.long()]), 0.5), RuntimeError),
    "narrow by floats": (
        lambda: njt.narrow(V, 1, torch.zeros(5), torch.ones(5).long()),
        RuntimeError,
    ),
    "narrow by bools": (lambda: njt.narrow(V, 1, torch.zeros(5) > 0, 1), RuntimeError),
    "narrow by a float": (lambda: njt.narrow(V, 1, 0, 1.5), TypeError),
    "narrow by nothing": (lambda: njt.narrow(V, 1, 0, None), TypeError),
    "narrow a nested": (lambda: njt.narrow(njt.nested_tensor([V]), 1, 0, 1), TypeError),
    "masked_select of one dim": (lambda: njt.masked_select(V[0], V[0] == 0), RuntimeError),
    "masked_select with another mask": (
        lambda: njt.masked_select(V, torch.ones(3, dtype=torch.bool)),
        RuntimeError,
    ),
    "check_structure of a dense": (lambda: njt.check_structure(V), TypeError),
    "the class itself": (lambda: njt.NestedTensor(V, torch.tensor([0, 5])), TypeError),
    "Structure of negative lengths": (lambda: njt.Structure.from_lengths([1, -1]), RuntimeError),
    "Structure of floats": (lambda: njt.Structure.find(torch.tensor([0.0, 1.0])), TypeError),
    "different lengths": (
        lambda: njt.nested_tensor([V, V[:1]]) + njt.nested_tensor([V, V[:2]]),
        RuntimeError,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_class_of_dense_torch(name) -> None:
    """C1, T9, T10, K6: what came, what was expected, what to do; nothing was written."""
    call, kind = REFUSED[name]
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert not V.any()


def test_texts() -> None:
    """Every message, word for word."""
    lines = []
    for name, (call, kind) in REFUSED.items():
        with pytest.raises(kind) as caught:
            call()
        lines.append(f"{name}: {caught.value}")
    text = re.sub(r"\bj\d+", "j", "\n".join(lines))  # ragged sizes are numbered by who came first
    assert_expected_inline(
        text,
        """\
offsets past the rows: nested_tensor_from_jagged(): got offsets ending at 9 for 5 rows of values. Expected offsets that end at the number of rows. Cut the values to the rows in use, or pass lengths= to leave gaps.
offsets short of the rows: nested_tensor_from_jagged(): got offsets ending at 3 for 5 rows of values. Expected offsets that end at the number of rows. Cut the values to the rows in use, or pass lengths= to leave gaps.
falling offsets: nested_tensor_from_jagged(): got falling offsets [0, 4, 2, 5]. Expected offsets that start at 0 and never fall. Build them from lengths: F.pad(lengths.cumsum(0), (1, 0)).
offsets not from 0: nested_tensor_from_jagged(): got offsets starting at 1. Expected offsets that start at 0 and never fall. Build them from lengths: F.pad(lengths.cumsum(0), (1, 0)).
negative offsets: nested_tensor_from_jagged(): got offsets starting at -2. Expected offsets that start at 0 and never fall. Build them from lengths: F.pad(lengths.cumsum(0), (1, 0)).
lengths past the rows: nested_tensor_from_jagged(): got offsets and lengths reaching row 6 of 5. Expected components inside the values. Check that offsets[b] + lengths[b] stays within values.
floating offsets: nested_tensor_from_jagged(): got offsets (2,) of torch.float32. Expected offsets of one dim and dtype int32 or int64. Pass offsets.flatten().long().
offsets of two dims: nested_tensor_from_jagged(): got offsets (1, 2) of torch.int64. Expected offsets of one dim and dtype int32 or int64. Pass offsets.flatten().long().
no offsets: nested_tensor_from_jagged(): got neither offsets nor lengths. Expected one of them. Pass offsets=.
empty offsets: nested_tensor_from_jagged(): got empty offsets. Expected (B + 1,) offsets. Pass torch.tensor([0]) for an empty batch.
too many lengths: nested_tensor_from_jagged(): got 2 lengths and 2 offsets. Expected one offset more than lengths. Offsets hold the start of each component and one end.
another device: nested_tensor_from_jagged(): got values on cpu and offsets on meta. Expected one device. Move it: offsets.to(values.device).
jagged_dim: nested_tensor_from_jagged(): got jagged_dim=4 for values (5, 2). Expected a dim in 1..2. Count the batch dim as 0.
max_seqlen too small: nested_tensor_from_jagged(): got max_seqlen=3 with a component of length 4. Expected at least 4. Leave it out, or pass int(lengths.max()).
min_seqlen too large: nested_tensor_from_jagged(): got min_seqlen=3 with a component of length 1. Expected a number in 0..1. Leave it out, or pass int(lengths.min()).
values nested: nested_tensor_from_jagged(): got nested (1, j, 2). Expected a dense tensor as values. Pass x.values().
empty list: nested_tensor(): got an empty list. Expected at least one tensor. Make an empty batch with njt.nested_tensor_from_jagged(values, torch.tensor([0])).
mixed dtypes: nested_tensor(): got dtype torch.float32 at position 0 and torch.float64 at position 1. Expected one dtype. Pass dtype= to convert them.
other feature sizes: nested_tensor(): got shapes (5, 2) at position 0 and (3, 4) at position 1. Expected tensors that differ in one dim only. Pad or cut the other dims to one size.
mixed ranks: nested_tensor(): got shapes (5, 2) at position 0 and (3,) at position 1. Expected tensors of one rank. Reshape them to (length, *features).
scalars: nested_tensor(): got a single number at position 0. Expected tensors of at least one dim. Put numbers into lists or vectors: [[1, 2], [3]].
another layout: nested_tensor(): got layout=torch.strided. Expected layout=torch.jagged. Leave it out: njt makes no other.
not tensors: as_nested_tensor(): got 3 at position 1. Expected tensors. Use nested_tensor for data.
from_padded without how: from_padded(): got 0 of lengths, offsets and mask. Expected exactly one. Pass lengths= of the sequences.
from_padded too long: from_padded(): got a length of 3 in a padded dim of size 2. Expected lengths within the padded dim. Cut the lengths: lengths.clamp(max=width).
from_padded batch: from_padded(): got padded (5, 2) and 1 lengths. Expected one length per row of the batch. Check the batch dims.
from_padded side: from_padded(): got padding_side='up'. Expected "left" or "right". Name the side that padding is on.
from_padded mask: from_padded(): got mask (5, 2) of torch.float32 for padded (5, 2). Expected a bool mask (5, 2). Compare lengths: torch.arange(S) < lengths[:, None].
from_padded total: from_padded(): got offsets ending at 5 for 9 rows of values. Expected offsets that end at the number of rows. Cut the values to the rows in use, or pass lengths= to leave gaps.
output_size rank: to_padded_tensor(): got output_size (1, 5) for nested (1, j, 2). Expected 3 entries. Use -1 to keep a size.
output_size features: to_padded_tensor(): got output_size (1, 5, 3) for nested (1, j, 2). Expected size 2 in dim 2. Only the ragged dim can be padded; use F.pad for others.
narrow past the row: narrow(): got start [1, 1, 1, 1, 1] and length [2, 2, 2, 2, 2] in rows of 2. Expected pieces inside their rows. Cut the lengths: length.clamp(max=S - start).
narrow dim: narrow(): got dim=0 for dense (5, 2). Expected dim=1 of a dense (B, S, *). Transpose the dim to narrow to position 1.
overlap: nested_tensor_from_jagged(): got offsets [0, 2, 5] with lengths [3, 3]. Expected components one behind the other, none of them beginning in another. Cut the lengths: torch.minimum(lengths, offsets.diff()).
overlap with room behind: nested_tensor_from_jagged(): got offsets [0, 1, 3] with lengths [2, 1]. Expected components one behind the other, none of them beginning in another. Cut the lengths: torch.minimum(lengths, offsets.diff()).
components in another order: nested_tensor_from_jagged(): got offsets [2, 0, 5] with lengths [3, 2]. Expected components one behind the other, none of them beginning in another. Cut the lengths: torch.minimum(lengths, offsets.diff()).
negative lengths and offsets: nested_tensor_from_jagged(): got negative offsets [0, 3, 5] with lengths [3, -1]. Expected offsets and lengths of 0 or more. Check how they were counted.
max_seqlen that is no integer: nested_tensor_from_jagged(): got max_seqlen=5.0. Expected an integer. Pass a number: int(x).
max_seqlen set too small: set_bounds(): got max_seqlen=4 with a component of length 5. Expected at least 5. Leave it out, or pass int(lengths.max()).
negative min_seqlen: nested_tensor_from_jagged(): got min_seqlen=-1 with a component of length 5. Expected a number in 0..5. Leave it out, or pass int(lengths.min()).
sparse values: nested_tensor_from_jagged(): got values of layout torch.sparse_coo. Expected a dense tensor as values. Use x.to_dense().
values in a list: nested_tensor_from_jagged(): got values of type list. Expected a dense tensor. Make one: torch.tensor(x).
jagged_dim that is no integer: nested_tensor_from_jagged(): got jagged_dim=1.5. Expected an integer. Pass a number: int(x).
nested in a list: nested_tensor(): got nested (1, j, 2) at position 0. Expected dense tensors. Take its components: x.unbind().
nested twice in a list: as_nested_tensor(): got nested (2, j, 2) at position 0. Expected dense tensors. Take its components: x.unbind().
sparse in a list: nested_tensor(): got a tensor of layout torch.sparse_coo at position 0. Expected dense tensors. Use x.to_dense().
None in a list: nested_tensor(): got None at position 1. Expected tensors, or lists that torch.tensor takes. Give each row of a list the same length, and numbers only.
text in a list: nested_tensor(): got 'ab' at position 0. Expected tensors, or lists that torch.tensor takes. Give each row of a list the same length, and numbers only.
no list: nested_tensor(): got None. Expected a list of tensors. Put it in a list: [x].
numbers: nested_tensor(): got a single number at position 0. Expected tensors of at least one dim. Put numbers into lists or vectors: [[1, 2], [3]].
no rectangle: nested_tensor(): got [[1, 2], [3]] at position 0. Expected tensors, or lists that torch.tensor takes. Give each row of a list the same length, and numbers only.
one number: nested_tensor(): got dense (). Expected a list, or at least one dim. Add dims: x.view(1, 1).
as_nested_tensor of nothing: as_nested_tensor(): got None. Expected a list of tensors. Put it in a list: [x].
as_nested_tensor of torch's: as_nested_tensor(): got a nested tensor of torch's own class. Expected a dense tensor as ts. Of its parts: njt.nested_tensor_from_jagged(x.values(), x.offsets()).
from_padded of a list: from_padded(): got padded of type list. Expected a dense tensor. Make one: torch.tensor(x).
from_padded negative: from_padded(): got lengths [1, 1, 1, -1, 1]. Expected lengths of 0 or more. Check how they were counted.
from_padded floats: from_padded(): got lengths[0]=1.0. Expected an integer. Pass a number: int(x).
from_padded floating tensor: from_padded(): got lengths (5,) of torch.float32. Expected lengths of one dim and dtype int32 or int64. Pass lengths.flatten().long().
from_padded bools: from_padded(): got lengths[0]=True. Expected an integer. Pass a number: int(x).
from_padded bool tensor: from_padded(): got lengths (5,) of torch.bool. Expected lengths of one dim and dtype int32 or int64. Pass lengths.flatten().long().
from_padded one length: from_padded(): got lengths of type int. Expected a list of integers. Pass one for each component, or dim.
from_padded empty offsets: from_padded(): got empty offsets. Expected (B + 1,) offsets. Pass x.offsets().
from_padded two totals: from_padded(): got total_length=5 and sum_S=6. Expected one total. Leave one out: they are two names of the same.
from_padded total that is no integer: from_padded(): got total_length=5.0. Expected an integer. Pass a number: int(x).
from_padded mask and total: from_padded(): got offsets ending at 10 for 9 rows of values. Expected offsets that end at the number of rows. Cut the values to the rows in use, or pass lengths= to leave gaps.
from_padded mask and bound: from_padded(): got max_seqlen=1 with a component of length 2. Expected at least 2. Leave it out, or pass int(lengths.max()).
from_padded mask in a list: from_padded(): got mask of type list. Expected a bool tensor. Wrap it: torch.tensor(mask).
output_size below -1: to_padded_tensor(): got output_size (1, -2, 2). Expected sizes of 0 or more. Use -1 to keep a size.
output_size that is no integer: to_padded_tensor(): got output_size[1]=5.0. Expected an integer. Pass a number: int(x).
output_size of one number: to_padded_tensor(): got output_size of type int. Expected a list of integers. Pass one for each component, or dim.
padding a list: to_padded_tensor(): got an object of type list. Expected a nested tensor of njt. A list becomes one with njt.nested_tensor(x).
padding torch's: to_padded_tensor(): got a nested tensor of torch's own class. Expected a nested tensor of njt. A list becomes one with njt.nested_tensor(x).
filler: to_padded_tensor(): got padding 0.5 for torch.int64. Expected an integer in -9223372036854775808..9223372036854775807. Pass one, or convert the tensor: x.to(torch.float32).
narrow by floats: narrow(): got start (5,) of torch.float32. Expected integers (5,), one for each row. Pass start.long() of that shape, or one number for all rows.
narrow by bools: narrow(): got start (5,) of torch.bool. Expected integers (5,), one for each row. Pass start.long() of that shape, or one number for all rows.
narrow by a float: narrow(): got length=1.5. Expected an integer. Pass a number: int(x).
narrow by nothing: narrow(): got length=None. Expected an integer. Pass a number: int(x).
narrow a nested: narrow(): got nested (1, j, 2). Expected a dense tensor as tensor. Use x.unbind().
masked_select of one dim: masked_select(): got dense (2). Expected a dense (B, S). Add a dim: x.unsqueeze(0).
masked_select with another mask: masked_select(): got mask (3,) of torch.bool for padded (5, 2). Expected a bool mask (5, 2). Compare lengths: torch.arange(S) < lengths[:, None].
check_structure of a dense: check_structure(): got dense (5, 2). Expected a nested tensor. Make one with njt first.
the class itself: NestedTensor(): got structure=dense (2). Expected a Structure. Call njt.nested_tensor_from_jagged(values, offsets).
Structure of negative lengths: Structure.from_lengths(): got lengths [1, -1]. Expected lengths of 0 or more. Check how they were counted.
Structure of floats: Structure.find(): got dense (2) of torch.float32. Expected offsets and lengths of one dim and an integer dtype. Use Structure.from_lengths for a list of lengths.
different lengths: add(): got nested (2, j, 2) with lengths [5, 1] and nested (2, j, 2) with lengths [5, 2]. Expected equal lengths, component by component. Build the second from the first's offsets, or pad both: njt.to_padded_tensor(x, 0.0).""",
    )
