"""The class itself: what it answers, prints, pickles, and that nothing of torch's class shows through."""

from __future__ import annotations

import copy
import io
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

import njt
from njt import _compat
from tests.samples import STRUCTURES, sample


def test_overrides_all_of_torchs_class() -> None:
    """The base class is there for `isinstance` only: each of its attributes is answered by ours."""
    inherited = {
        name
        for name in vars(_compat.BASE)
        if getattr(njt.NestedTensor, name, None) is getattr(_compat.BASE, name, None)
    }
    assert inherited <= {"__doc__", "__module__", "__dict__", "__weakref__", "__annotations__"}


@pytest.mark.parametrize("layout", STRUCTURES, ids=str)
def test_what_users_read(layout) -> None:
    x = sample(layout)
    assert isinstance(x, torch.Tensor)
    assert x.is_nested
    assert x.layout is torch.jagged
    assert len(x) == x.shape[0] == x.size(0) == len(layout.lengths)
    assert x.dim() == x.ndim == x.values().dim() + 1
    assert x.ragged_dim == x._ragged_idx == layout.ragged_dim
    assert x.shape[-1] == x.size(-1)
    assert isinstance(x.shape[x.ragged_dim], torch.SymInt)
    assert x.offsets() is x._offsets is x.structure.offsets
    assert x.lengths() is x._lengths
    assert (x.lengths() is not None) == layout.gaps
    assert x.dtype is x.values().dtype
    assert x.device == x.values().device
    assert x.is_contiguous() == (not layout.gaps and x.values().is_contiguous())


def test_shape_tells_structures_apart() -> None:
    x, y = sample(), sample()
    assert x.shape == (x + 1).shape
    assert x.shape[1] == F.gelu(x).shape[1]
    assert x.shape[1] != y.shape[1]
    assert x.shape[1] != 3


def test_ragged_idx_can_be_assigned() -> None:
    """Programs set it after unpickling tensors that had lost it."""
    values, offsets = torch.randn(4, 5, 2), torch.tensor([0, 2, 5])
    x = njt.nested_tensor_from_jagged(values[:, 0], torch.tensor([0, 1, 4]))
    same = x
    x = njt.nested_tensor_from_jagged(values.transpose(0, 1), offsets)
    x._ragged_idx = 1
    y = njt.nested_tensor_from_jagged(torch.randn(5, 5), offsets)
    y._ragged_idx = 2
    assert y.ragged_dim == 2
    assert y.shape[1] == 5
    assert isinstance(y.shape[2], torch.SymInt)
    assert [tuple(c.shape) for c in y.unbind()] == [(5, 2), (5, 3)]
    assert torch.equal((y + 1).values(), y.values() + 1)
    with pytest.raises(ValueError, match="ragged dim 3"):
        y._ragged_idx = 3
    assert same.ragged_dim == 1


def test_metadata_cache_can_be_assigned() -> None:
    x = sample()
    x._metadata_cache = {"max_seqlen": 8, "min_seqlen": 1}
    assert x._metadata_cache == {"max_seqlen": 8, "min_seqlen": 1}
    assert x._maybe_max_seqlen == 8


@pytest.mark.parametrize("layout", STRUCTURES, ids=str)
@pytest.mark.parametrize(
    "twin_of",
    [
        lambda x: pickle.loads(pickle.dumps(x)),
        copy.deepcopy,
        copy.copy,
        lambda x: _saved(x),
    ],
    ids=["pickle", "deepcopy", "copy", "torch.save"],
)
def test_copies(layout, twin_of) -> None:
    """M3: values, ragged dim, gaps and bounds survive."""
    x = sample(layout).detach()
    y = twin_of(x)
    assert type(y) is njt.NestedTensor
    assert y.ragged_dim == x.ragged_dim
    assert y.structure.host_lengths() == x.structure.host_lengths()
    assert (y.lengths() is None) == (x.lengths() is None)
    assert y._metadata_cache == x._metadata_cache
    for a, b in zip(y.unbind(), x.unbind(), strict=True):
        assert torch.equal(a, b)


def _saved(x):
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_requires_grad_survives_copies() -> None:
    x = sample().detach().requires_grad_()
    for y in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x)):
        assert y.requires_grad
        assert y.is_leaf
    with pytest.raises(RuntimeError, match="Expected a leaf"):
        copy.deepcopy(x * 2)


@pytest.mark.parametrize("layout", STRUCTURES, ids=str)
def test_cache_survives_operators(layout) -> None:
    """M3: views, detach, clone, casts, chunk and gradients keep the structure, and with it the bounds."""
    x = sample(layout, requires_grad=True)
    results = [
        x.detach(),
        x.clone(),
        x.to(torch.float64),
        x.transpose(-1, -2),
        x.unsqueeze(-1),
        x.chunk(2, -1)[0],
        x[..., :2],
        F.linear(x, torch.randn(3, 4)),
        F.layer_norm(x, (4,)),
    ]
    for y in results:
        assert y.structure is x.structure
    leaf = sample(layout).detach().requires_grad_()
    (leaf * leaf).sum().backward()
    assert leaf.grad.structure is leaf.structure


def test_repr() -> None:
    x = njt.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)])
    lines = [
        repr(x),
        repr(x.double()),
        repr(x.detach().requires_grad_()),
        repr(x.detach().requires_grad_() * 2),
        repr(njt.nested_tensor([torch.zeros(n) for n in range(20)])),
    ]
    assert_expected_inline(
        re.sub(r"\bj\d+", "j", "\n".join(lines)),
        """\
NestedTensor(size=(2, j, 3), lengths=[2, 1])
NestedTensor(size=(2, j, 3), lengths=[2, 1], dtype=torch.float64)
NestedTensor(size=(2, j, 3), lengths=[2, 1], requires_grad=True)
NestedTensor(size=(2, j, 3), lengths=[2, 1], grad_fn=<MulBackward0>)
NestedTensor(size=(20, j), lengths=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...])""",
    )


def test_unknown_operator_names_the_way_in() -> None:
    """In a graph what is not declared is refused, with the family, the file and the rules."""
    x = sample()
    disabled = torch._C.DisableTorchFunctionSubclass()
    with disabled, pytest.raises(NotImplementedError) as caught:
        torch.ops.aten._cdist_forward.default(x, x, 2.0, None)
    assert_expected_inline(
        str(caught.value),
        """_cdist_forward(): no rule for nested tensors. Expected one of the operators that `python -m njt.ops` lists. Declare '_cdist_forward' in a family file of njt/ops with a rule of njt/rules, or call it on the components: [f(c) for c in x.unbind()].""",
    )
