"""Norms and dropout: per token, per component, over the batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import njt
from tests.reference import Case, grid, run_case
from tests.samples import BY_NAME, STRUCTURES, USUAL, components, sample

RAGGED_2 = [s for s in STRUCTURES if s.ragged_dim > 1]


def weights(*shape: int) -> Tensor:
    return torch.rand(shape) + 0.5


PER_TOKEN = [
    Case("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), lambda x: (weights(4), weights(4))),
    Case("layer_norm over two dims", lambda x, w: F.layer_norm(x, (3, 4), w), lambda x: (weights(3, 4),),
         features=(3, 4)),
    Case("layer_norm without weights", lambda x: F.layer_norm(x, (4,))),
    Case("rms_norm", lambda x, w: F.rms_norm(x, (4,), w, 1e-6), lambda x: (weights(4),)),
    Case("rms_norm by name", lambda x: F.rms_norm(x, normalized_shape=(4,))),
    Case("normalize features", lambda x: F.normalize(x, dim=-1)),
    Case("normalize features, p=1", lambda x: F.normalize(x, 1.0, -1)),
    Case("normalize components", lambda x: F.normalize(x, dim=tuple(range(1, x.dim())))),
    Case("normalize two dims", lambda x: F.normalize(x, dim=(-2, -1)), features=(2, 3)),
    Case("dropout in eval", lambda x: F.dropout(x, 0.5, training=False)),
    Case("alpha_dropout in eval", lambda x: F.alpha_dropout(x, 0.5, training=False)),
]  # fmt: skip
CHANNELS = [
    Case("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), lambda x: (weights(2), weights(2)),
         without=["empty components", "all empty"]),
    Case("group_norm, one group", lambda x: F.group_norm(x, 1)),
    Case("instance_norm", lambda x: F.instance_norm(x), features=(4, 3)),
    Case("local_response_norm", lambda x: F.local_response_norm(x, 2)),
]  # fmt: skip


@grid(PER_TOKEN)
def test_per_token(case: Case, layout: object) -> None:
    # torch's second derivative of layer_norm views its operand as (rows, features)
    run_case(case, layout, gradgrad="layer_norm" not in case.name)


@grid(CHANNELS, RAGGED_2)
def test_channels_first(case: Case, layout: object) -> None:
    run_case(case, layout, tolerance=(1e-4, 1e-4))


@pytest.mark.parametrize("name", ["usual", "gaps", "ragged dim 2"])
@pytest.mark.parametrize("case", PER_TOKEN, ids=str)
def test_compiled(case: Case, name: str) -> None:
    run_case(case, BY_NAME[name], compiled=True)


@pytest.mark.parametrize("name", ["ragged dim 2", "ragged dim 2 with gaps", "transposed"])
@pytest.mark.parametrize("case", CHANNELS, ids=str)
def test_channels_first_compiled(case: Case, name: str) -> None:
    run_case(case, BY_NAME[name], compiled=True, tolerance=(1e-4, 1e-4))


def _batch_norms(channels: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    ours, theirs = torch.nn.BatchNorm1d(channels), torch.nn.BatchNorm1d(channels)
    return ours, theirs


@pytest.mark.parametrize("name", ["usual", "gaps", "int32 offsets"])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_tokens(name: str, training: bool) -> None:
    """Statistics over all real tokens, b009."""
    x = sample(BY_NAME[name])
    tokens = torch.cat(components(x))
    for channels_first in (False, True):
        ours, theirs = (m.train(training) for m in _batch_norms(4))
        out = ours(x.transpose(1, 2)).transpose(1, 2) if channels_first else ours(x)
        wanted = theirs(tokens)
        torch.testing.assert_close(torch.cat(out.unbind()), wanted)
        torch.testing.assert_close(ours.running_mean, theirs.running_mean)
        torch.testing.assert_close(ours.running_var, theirs.running_var)
        torch.cat(out.unbind()).square().sum().backward()
        wanted.square().sum().backward()
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_batch_norm_compiled() -> None:
    x = sample(USUAL)
    ours, theirs = _batch_norms(4)
    out = torch.compile(ours, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(out.values(), theirs(x.values()))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)


@pytest.mark.parametrize(
    "fn", [F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d]
)
def test_dropout_scales_what_it_keeps(fn: object) -> None:
    x = njt.nested_tensor([torch.ones(3, 2000), torch.ones(2, 2000)])
    torch.manual_seed(0)
    out = fn(x, 0.25, training=True)
    assert out.offsets() is x.offsets()
    assert 0.1 < (out.values() <= 0).float().mean() < 0.9 or fn in (F.dropout1d, F.dropout2d)


def test_channel_dropout_draws_for_each_component() -> None:
    x = njt.nested_tensor([torch.ones(3, 64), torch.ones(4, 64)]).transpose(1, 2)  # (B, 64, j1)
    for fn in (F.dropout1d, F.dropout2d):
        out = fn(x, 0.5, training=True)
        for c in components(out):
            kept = c[:, 0]
            assert set(kept.tolist()) == {0.0, 2.0}
            assert torch.equal(c, kept[:, None].expand_as(c)), "a channel goes as a whole"
        first, second = components(out)
        assert not torch.equal(first[:, 0], second[:, 0])


def test_rms_norm_runs_one_operator() -> None:
    """No more compute operators than the dense call, b025."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if all(t in (Tensor, torch.nn.Parameter) for t in types):
                self.names.append(func._overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    x = sample(USUAL)
    with Count() as ours:
        F.rms_norm(x, (4,))
    with Count() as dense:
        F.rms_norm(x.values(), (4,))
    assert ours.names == dense.names


def test_a_ragged_feature_dim_is_refused() -> None:
    x = sample(USUAL).transpose(1, 2)
    with pytest.raises(RuntimeError, match="the ragged dim"):
        F.layer_norm(x, (4,))
    with pytest.raises(RuntimeError, match="the ragged dim"):
        F.rms_norm(x, (4,))
