"""Indexing and assignment against the same on every component."""

from __future__ import annotations

import pytest
import torch

import njt
from tests.reference import Case, PerComponent, grid, run_case
from tests.samples import BY_NAME, STRUCTURES, components, sample

LONG = [s for s in STRUCTURES if min(s.lengths, default=1) > 0 and s.ragged_dim == 1 and s.lengths]
DIM_1 = [s for s in STRUCTURES if s.ragged_dim == 1]
NEW = {"new_structure": True}


def index_like(x: torch.Tensor, high: int, last: int) -> torch.Tensor:
    """A nested index of the structure of `x` into a dim of size `high`."""
    return torch.randint_like(
        x[..., :1].expand(*[-1] * (x.dim() - 1), last), high, dtype=torch.int64
    )


FEATURES = [
    Case("last number", lambda x: x[..., 1]),
    Case("last slice", lambda x: x[..., 1:3]),
    Case("last slice from the end", lambda x: x[..., -2:]),
    Case("last step", lambda x: x[..., ::2]),
    Case("all", lambda x: x[:]),
    Case("ellipsis", lambda x: x[...]),
    Case("new dim", lambda x: x[..., None]),
    Case("list", lambda x: x[..., [0, 2, 2]]),
    Case("tensor of two dims", lambda x: x[..., torch.tensor([[0, 1], [2, 3]])]),
    Case("index_select", lambda x: x.index_select(-1, torch.tensor([3, 0]))),
    Case("gather", lambda x, i: x.gather(-1, i), lambda x: (index_like(x, 4, 2),)),
    Case("take_along_dim", lambda x, i: torch.take_along_dim(x, i, -1), lambda x: (index_like(x, 4, 2),)),
    Case("scatter", lambda x, i, s: x.scatter(-1, i, s), lambda x: (index_like(x, 4, 1), x[..., :1] * 2)),
    Case("scatter a number", lambda x, i: x.scatter(-1, i, 1.5), lambda x: (index_like(x, 4, 2),)),
    Case("scatter_add", lambda x, i, s: x.scatter_add(-1, i, s), lambda x: (index_like(x, 4, 2), x[..., :2] * 2)),
    Case("index_fill", lambda x: x.index_fill(-1, torch.tensor([1]), 0.5)),
    Case("masked_fill", lambda x, m: x.masked_fill(m, 0.5), lambda x: (x > 0,)),
    Case("where", lambda x, m: torch.where(m, x, 0.5), lambda x: (x > 0,)),
    Case("select_scatter", lambda x, s: torch.select_scatter(x, s, -1, 1), lambda x: (x[..., 0] * 2,)),
]  # fmt: skip
ROWS = [
    Case("row", lambda x: x[:, 0]),
    Case("last row", lambda x: x[:, -1]),
    Case("select row", lambda x: x.select(1, -1)),
    Case("element of a row", lambda x: x[:, 0, 1:]),
    Case("rows by list", lambda x: x[:, [0, -1]]),
]
ROW_SLICES = [
    Case("first rows", lambda x: x[:, :2], options=NEW),
    Case("without first", lambda x: x[:, 1:], options=NEW),
    Case("middle", lambda x: x[:, 1:3, 1:], options=NEW),
    Case("without last", lambda x: x[:, :-1], options=NEW),
    Case("last two", lambda x: x[:, -2:], options=NEW),
    Case("every second", lambda x: x[:, 1::2], options=NEW),
    Case("masked_select", lambda x, m: x.masked_select(m).view(1, -1), lambda x: (x > 0,), options=NEW),
]  # fmt: skip


def inside(found: torch.Tensor) -> torch.Tensor:
    """Positions as we give them: inside the component, so without those of the batch dim."""
    return found if found.is_nested else found[:, 1:].unsqueeze(0)


def all_inside(found: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return found if found[0].is_nested else tuple(f.unsqueeze(0) for f in found[1:])


WHERE_TRUE = [
    Case("argwhere", lambda x: inside(torch.argwhere(x > 0)), options=NEW),
    Case("nonzero", lambda x: inside((x * (x > 0)).nonzero()), options=NEW),
    Case("nonzero of bool", lambda x: inside(torch.nonzero(x)), dtype=torch.bool, options=NEW),
    Case("nonzero as tuple", lambda x: all_inside((x > 0).nonzero(as_tuple=True)), options=NEW),
    Case("where", lambda x: all_inside(torch.where(x > 0)), options=NEW),
    Case("where by name", lambda x: torch.where(condition=x > 0, input=x, other=0.5)),
]


@grid(WHERE_TRUE)
def test_where_true(case: Case, layout: object) -> None:
    run_case(case, layout)


@grid(FEATURES)
def test_features(case: Case, layout: object) -> None:
    run_case(case, layout)


@grid(ROWS, LONG)
def test_row(case: Case, layout: object) -> None:
    run_case(case, layout)


@grid(ROW_SLICES[:-1], DIM_1)
def test_rows(case: Case, layout: object) -> None:
    run_case(case, layout)


@pytest.mark.parametrize("name", ["usual", "gaps"])
@pytest.mark.parametrize("case", FEATURES[:-1], ids=str)
def test_compiled(case: Case, name: str) -> None:
    run_case(case, BY_NAME[name], compiled=True)


@pytest.mark.parametrize("case", WHERE_TRUE, ids=str)
def test_where_true_compiled(case: Case) -> None:
    run_case(case, compiled=True, grad=False)


@pytest.mark.parametrize("case", ROW_SLICES[:-1], ids=str)
def test_rows_compiled(case: Case) -> None:
    run_case(case, compiled=True, grad=False)


def same(got: torch.Tensor, wanted: list[torch.Tensor]) -> None:
    assert got.is_nested
    assert len(got) == len(wanted)
    for g, w in zip(components(got), wanted):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("layout", STRUCTURES, ids=str)
def test_components(layout: object) -> None:
    """b027, b029"""
    x = sample(layout)  # type: ignore[arg-type]
    parts, n = components(x), len(x)
    same(x[1:3], parts[1:3])
    same(x[-2:], parts[-2:])
    same(x[::2], parts[::2])
    same(x[:0], [])
    for i in range(n):
        torch.testing.assert_close(x[i], parts[i])
        torch.testing.assert_close(x[i - n], parts[i])
        assert x[i].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    order = list(reversed(range(n))) + list(range(n))
    same(x[order], [parts[i] for i in order])
    same(x[torch.tensor(order, dtype=torch.int64)], [parts[i] for i in order])
    mask = torch.arange(n) % 2 == 0
    same(x[mask], parts[::2])
    same(x.index_select(0, torch.tensor(order, dtype=torch.int64)), [parts[i] for i in order])
    with pytest.raises(IndexError):
        x[n]


@pytest.mark.parametrize("name", ["usual", "gaps", "ragged dim 2"])
def test_gradient_of_components(name: str) -> None:
    x = sample(BY_NAME[name], requires_grad=True)
    x.retain_grad()
    (x[0].sum() + (x[1:] * 2).sum() + (x[[0, 0]] * 3).sum()).backward()
    assert x.grad.is_nested
    assert x.grad.shape == x.shape
    for i, g in enumerate(components(x.grad)):
        torch.testing.assert_close(g, torch.full_like(g, 7.0 if i == 0 else 2.0))


def test_pairs() -> None:
    x = sample()
    parts = components(x)
    got = x[[0, 2, 2], [1, 0, -1]]
    torch.testing.assert_close(got, torch.stack([parts[0][1], parts[2][0], parts[2][-1]]))
    with pytest.raises(IndexError):
        x[[1], [1]]
    with pytest.raises(IndexError):
        x[:, 1]


@pytest.mark.parametrize(
    "layout", [s for s in STRUCTURES if s.ragged_dim == 1 and len(s.lengths) > 2], ids=str
)
@pytest.mark.parametrize(
    "write",
    [
        lambda x, v: x.__setitem__(0, v[0]),
        lambda x, v: x.__setitem__((0, slice(1, None)), 2.0),
        lambda x, v: x[2].mul_(3),
        lambda x, v: x.__setitem__((2, 0), 5.0) if x[2].shape[0] else None,
    ],
)
def test_assign_component(write: object, layout: object) -> None:
    """b075"""
    x = sample(layout)  # type: ignore[arg-type]
    before = x.values().clone()
    parts = components(x)
    value = [p * 2 for p in parts]
    write(x, value)  # type: ignore[operator]
    wanted = [p.clone() for p in components(sample(layout))]  # type: ignore[arg-type]
    assert len(wanted) == len(parts)
    if layout.gaps:  # type: ignore[attr-defined]
        unused = torch.ones(len(before), dtype=torch.bool)
        unused[x.structure.row_index()] = False
        assert before[unused].isnan().all()
        assert x.values()[unused].isnan().all()


ASSIGNMENTS = {
    "number everywhere": (slice(None), 1.5),
    "feature": ((slice(None), slice(None), 1), 1.5),
    "features by slice": ((slice(None), slice(None), slice(1, 3)), 1.5),
    "features by list": ((slice(None), slice(None), [0, 3]), 1.5),
    "rows": ((slice(None), slice(1, 3)), 1.5),
    "every second row": ((slice(None), slice(None, None, 2)), 1.5),
    "row of features": (slice(None), torch.arange(4.0)),
    "rows and features": ((slice(None), slice(0, 2), slice(1, 3)), torch.tensor([1.0, 2.0])),
}


@pytest.mark.parametrize(
    "name", ["usual", "gaps", "empty components", "strided values", "int32 offsets"]
)
@pytest.mark.parametrize("case", list(ASSIGNMENTS))
def test_assign(case: str, name: str) -> None:
    index, value = ASSIGNMENTS[case]
    x = sample(BY_NAME[name])
    unused = torch.ones(x.values().shape[0], dtype=torch.bool)
    unused[x.structure.row_index()] = False
    kept = x.values()[unused].clone()
    parts = components(x)
    x[index] = value
    for p in parts:
        p.unsqueeze(0)[index] = value
    same(x, parts)
    torch.testing.assert_close(x.values()[unused], kept, equal_nan=True)


def test_assign_by_mask_and_list() -> None:
    x = sample()
    parts = components(x)
    x[x > 0] = -1.0
    for p in parts:
        p[p > 0] = -1.0
    same(x, parts)
    x[[0, 2]] = 4.0
    parts[0].fill_(4)
    parts[2].fill_(4)
    same(x, parts)
    x[:, 0] = torch.arange(12.0).view(3, 4)
    for p, row in zip(parts, torch.arange(12.0).view(3, 4)):
        p[0] = row
    same(x, parts)
    x[torch.tensor([True, False, False])] = njt.nested_tensor([torch.ones(3, 4)])
    parts[0].fill_(1)
    same(x, parts)
    flags = sample() > 0
    x[flags] = torch.zeros(int(flags.sum()))
    for p, f in zip(parts, components(flags)):
        p[f] = 0
    same(x, parts)


def test_assign_is_differentiable() -> None:
    leaf = torch.ones(8, 4, requires_grad=True)
    row = torch.full((4,), 2.0, requires_grad=True)
    x = njt.nested_tensor_from_jagged(leaf, torch.tensor([0, 3, 4, 8])) * 3
    x[1] = row
    x[:, 0, 0] = 0.0
    x.sum().backward()
    wanted = torch.full((8, 4), 3.0)
    wanted[3] = 0
    wanted[[0, 3, 4], 0] = 0
    torch.testing.assert_close(leaf.grad, wanted)
    torch.testing.assert_close(row.grad, torch.tensor([0.0, 1, 1, 1]))


def test_masks_give_nested() -> None:
    """b095"""
    for name in ("usual", "gaps", "ragged dim 2", "empty components"):
        x = sample(BY_NAME[name])
        for got in (x[x > 0], torch.masked_select(x, x > 0)):
            same(got, [p[p > 0] for p in components(x)])


def test_gather_over_rows() -> None:
    x = sample(requires_grad=True)
    index = njt.nested_tensor(
        [torch.tensor([[2] * 4, [0] * 4]), torch.zeros(1, 4).long(), torch.tensor([[3] * 4])]
    )
    got = x.gather(1, index)
    same(got.detach(), [p.gather(0, i) for p, i in zip(components(x), components(index))])
    with pytest.raises(IndexError):
        x.gather(1, index + 2)
    assert PerComponent is not None


def test_len_iter_unpack() -> None:
    """b093"""
    x = sample()
    assert len(x) == 3
    a, _, c = x
    assert a.shape == (3, 4)
    torch.testing.assert_close(c, components(x)[2])
    assert [tuple(p.shape) for p in x] == [(3, 4), (1, 4), (4, 4)]
    assert x.numel() == 32


ROW_LISTS = {
    "a list": [0, -1],
    "a table": torch.tensor([[0, 1], [1, 0]]),
    "one number in a list": torch.tensor([-1]),
    "nothing": [],
}
FEATURE_LISTS = {
    "all": (),
    "one": (-1,),
    "some": (slice(1, 3),),
    "read together": ([1, 3],),
    "a table": (torch.tensor([[0, 2], [3, 1]]),),
}


@pytest.mark.parametrize("rows", ROW_LISTS)
@pytest.mark.parametrize("features", FEATURE_LISTS)
@pytest.mark.parametrize("gaps", [False, True], ids=["packed", "gaps"])
def test_lists_of_rows(rows, features, gaps) -> None:
    """A list names the same rows of every component, and is read together with a list of features, as in dense."""
    index = (slice(None), ROW_LISTS[rows], *FEATURE_LISTS[features])
    if rows == "nothing" and features in ("read together", "a table"):
        pytest.skip("two and no numbers do not meet")
    values = torch.arange(40.0).view(10, 4).requires_grad_()
    offsets, lengths = torch.tensor([1, 4, 8]), torch.tensor([3, 2])
    if not gaps:
        offsets, lengths, values = (
            torch.tensor([0, 3, 5]),
            None,
            values[:5].detach().requires_grad_(),
        )
    x = njt.nested_tensor_from_jagged(values, offsets, lengths)
    picked = x[index]
    wanted = torch.cat([c.unsqueeze(0)[index] for c in x.unbind()])
    assert torch.equal(picked, wanted)
    cotangent = torch.randn_like(wanted)
    got, loop = (torch.autograd.grad(y, values, cotangent)[0] for y in (picked, wanted))
    assert torch.equal(got, loop)
    # the same places are written
    for value in (7.0, torch.randn_like(wanted)):
        mine, theirs = x.detach().clone(), [c.detach().clone() for c in x.unbind()]
        mine[index] = value
        for i, c in enumerate(theirs):
            c.unsqueeze(0)[index] = value if isinstance(value, float) else value[i : i + 1]
        assert all(torch.equal(a, b) for a, b in zip(mine.unbind(), theirs, strict=True))


def test_dense_masks_over_rows() -> None:
    """As long as every component, or refused; never read as numbers."""
    alike = njt.nested_tensor([torch.randn(3, 2), torch.randn(3, 2)])
    mask = torch.tensor([True, False, True])
    wanted = torch.stack([c[mask] for c in alike.unbind()])
    assert torch.equal(alike[:, mask], wanted)
    assert torch.equal(alike[:, mask.tolist()], wanted)
    alike[:, mask] = 5.0
    assert alike.values()[:, 0].eq(5).tolist() == mask.repeat(2).tolist()
    other = njt.nested_tensor([torch.randn(3, 2), torch.randn(2, 2)])
    for index in ((slice(None), mask), ([0, 1], mask), (torch.tensor([True]), torch.tensor([0]))):
        with pytest.raises(IndexError, match="The shape of the mask"):
            other[index]
    with pytest.raises(IndexError, match="The shape of the mask"):
        other[:, mask] = 1.0


@pytest.mark.parametrize("index", [(slice(None), True), (torch.tensor(False),), True], ids=str)
def test_truth_values_are_no_index(index) -> None:
    """Dense torch makes a dim of them."""
    x = njt.nested_tensor([torch.randn(3, 2), torch.randn(2, 2)])
    with pytest.raises(NotImplementedError, match="a single truth value"):
        x[index]


def test_floats_are_no_index() -> None:
    x = njt.nested_tensor([torch.randn(3, 2), torch.randn(2, 2)])
    for item in (torch.tensor(1.5), torch.tensor([0.0, 1.0])):
        for index in ((item,), (slice(None), item), (slice(None), slice(None), item)):
            with pytest.raises(IndexError):
                x[index]


def test_assignment_with_a_new_dim() -> None:
    values = torch.zeros(5, 2)
    x = njt.nested_tensor_from_jagged(values, torch.tensor([0, 3, 5]))
    x[:, None] = 3.0
    assert values.eq(3).all()


def test_assignment_to_no_rows() -> None:
    values = torch.zeros(5, 2)
    x = njt.nested_tensor_from_jagged(values, torch.tensor([0, 3, 5]))
    x[[1, 0], 5:9] = torch.ones(2, 0, 2)
    assert not values.any()
