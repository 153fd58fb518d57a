"""Who shares memory with whom, and what writes do."""

from __future__ import annotations

import io
import pickle

import pytest
import torch

import njt
from tests.samples import BY_NAME, sample

NAMES = ["usual", "gaps", "ragged dim 2", "strided values"]


def storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", NAMES)
def test_views_share_storage(name: str) -> None:
    """A2: views alias the storage of their input, and of its values."""
    x = sample(BY_NAME[name])
    last = x.dim() - 1
    views = [
        x.detach(), x.transpose(1, last), *x.chunk(2, -1), *x.split(1, -1), x.select(-1, 0), x.narrow(-1, 0, 2),
        *x.unbind(), x.values(), x[:2], x.view(x.shape), x.unsqueeze(-1),
    ]  # fmt: skip
    assert {storage(v) for v in views} == {storage(x)}


@pytest.mark.parametrize("name", NAMES)
def test_in_place_returns_itself(name: str) -> None:
    """A3: in-place and out= operators return the object they wrote."""
    x = sample(BY_NAME[name], positive=True)
    held = x._values
    for op in (
        lambda: x.add_(1), lambda: x.mul_(x), lambda: x.zero_(), lambda: x.fill_(2), lambda: x.normal_(),
        lambda: x.uniform_(), lambda: x.bernoulli_(0.5), lambda: x.copy_(x * 2), lambda: x.clamp_(0, 1),
        lambda: x.masked_fill_(x > 0, 1.0), lambda: torch.add(x, 1, out=x), lambda: torch.dropout_(x, 0.5, True),
    ):  # fmt: skip
        assert op() is x
        assert x._values is held


def test_gap_rows_are_never_written() -> None:
    """A narrowed view of somebody's buffer leaves the rest of the buffer alone."""
    x = sample(BY_NAME["gaps"])
    unused = torch.ones(x.values().shape[0], dtype=torch.bool)
    unused[x.structure.row_index()] = False
    for op in (
        lambda: x.add_(1), lambda: x.zero_(), lambda: x.normal_(), lambda: x.copy_(torch.ones(4)),
        lambda: x.copy_(x.double()), lambda: torch.exp(x, out=x), lambda: torch._foreach_mul_([x], 2.0),
        lambda: torch.dropout_(x, 0.5, True),
    ):  # fmt: skip
        op()
        assert x.values()[unused].isnan().all()
        assert not torch.cat(x.unbind()).isnan().any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.select(-1, 0).mul_(3),
        lambda x: x.transpose(1, -1).mul_(3),
        lambda x: x[0].mul_(3),
        lambda x: x.values().mul_(3),
        lambda x: x[1:].mul_(3),
    ],
)
def test_write_through_view(write: object, name: str) -> None:
    """A4: a write through a view is seen by the base and by autograd, b077."""
    leaf = sample(BY_NAME[name]).detach().requires_grad_()
    x = leaf * 2
    twin = [p.detach().clone() for p in x.unbind()]
    write(x)  # type: ignore[operator]
    changed = [(a != b) for a, b in zip(x.detach().unbind(), twin)]
    x.sum().backward()
    for g, c in zip(leaf.grad.unbind(), changed):
        torch.testing.assert_close(g, torch.where(c, 6.0, 2.0))


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x[0].add_(1),
        lambda x: x[..., 0].add_(1),
        lambda x: x.values().add_(1),
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_version_counter(write: object, grad: bool) -> None:
    """A4: what was saved for backward and then written raises."""
    x = sample() * 1
    w = torch.ones(4, requires_grad=True)
    if grad:
        x = x.requires_grad_() * 1
    y = x * w
    write(x)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_compiled_mutation() -> None:
    """A5: a compiled function that writes into its input."""

    def f(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        x[..., 0].add_(1)
        return x + 1

    x, y = sample(), sample()
    x.copy_(y)
    wanted = f(y)
    got = torch.compile(f, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(x.values(), y.values())
    torch.testing.assert_close(got.values(), wanted.values())


def test_memory_questions() -> None:
    """A6: questions about memory are answered by the values."""
    x = sample()
    values = x.values()
    assert x.data_ptr() == values.data_ptr()
    assert x.untyped_storage().nbytes() == values.untyped_storage().nbytes()
    assert x.nbytes == values.nbytes
    assert x.numel() == values.numel()
    assert not x.is_shared()
    assert x.share_memory_() is x
    assert x.is_shared()
    assert x.values().is_shared()
    assert not x.is_pinned()


def test_bounds_survive() -> None:
    """M3: known bounds stay known through views, copies and gradients."""
    x = sample().requires_grad_()
    (x * 2).sum().backward()
    copies = [
        x.view(x.shape), x.detach(), x.clone(), x.to(torch.float64), pickle.loads(pickle.dumps(x)),
        x.transpose(1, 2), *x.chunk(2, -1), x.grad, x.unsqueeze(-1),
    ]  # fmt: skip
    for y in copies:
        assert y.structure.known_max_seqlen == 4
        assert y.structure.known_min_seqlen == 1
    a, b = x.chunk(2)
    assert (a.max_seqlen, b.max_seqlen) == (3, 4)


def test_from_padded_joins_its_source() -> None:
    """C2: a tensor made with the offsets of another has its structure."""
    x = sample()
    y = njt.from_padded(x.to_padded_tensor(0.0), offsets=x.offsets())
    assert y.structure is x.structure
    torch.testing.assert_close((x + y).values(), 2 * x.values())
    z = njt.from_padded(x.to_padded_tensor(0.0), lengths=[3, 1, 4])
    torch.testing.assert_close((x + z).values(), 2 * x.values())


def test_load_weights_only() -> None:
    x = sample(BY_NAME["gaps"])
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    y = torch.load(file, weights_only=True)["x"]
    for a, b in zip(x.unbind(), y.unbind(), strict=True):
        torch.testing.assert_close(a, b)
