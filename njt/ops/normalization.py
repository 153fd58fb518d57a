"""Norms and dropout: over the features of each token, over each component's rows, over all rows of the batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from njt import bridge, dims, errors
from njt.kernels import segments
from njt.registry import declare, declare_named
from njt.rules.per_token import AsOne, OverFeatures, PerToken, zeroed
from njt.rules.reduction import kept_for_backward
from njt.tensor import NestedTensor

aten = torch.ops.aten

declare(aten.native_layer_norm.default, PerToken("normalized_shape", per_token=(True, True, True)))
declare(
    aten.native_layer_norm_backward.default,
    PerToken("normalized_shape", per_token=(True, False, False), sums=True),
)
declare_named("rms_norm", OverFeatures(torch.rms_norm, listed="normalized_shape"))
declare(aten.native_dropout.default, PerToken(per_token=(True, True)))
declare(aten.native_dropout_backward.default, PerToken())


def _norm_over_rows(x: NestedTensor, p: float, dim: Any, eps: float, out: None = None) -> Any:
    norm = torch.linalg.vector_norm(x, p, dim, keepdim=True)
    return x / norm.clamp_min(eps)


_NORMALIZE = AsOne(
    F.normalize, ("p", "dim", "eps", "out"), dim="dim", default=1, ragged=_norm_over_rows
)


def normalize(
    input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Tensor | None = None
) -> Any:
    """`F.normalize` of each component, over one dim or several; none of them the batch dim."""
    if isinstance(dim, int):
        return _NORMALIZE(input, p, dim, eps, out=out)
    over = dims.canonical_all(dim, input.dim())
    if 0 in over:
        raise errors.no_batch_dim("normalize", input, 0)
    scaled = _norm_over_rows(input, p, over, eps)
    return scaled if out is None else out.copy_(scaled)


declare_named("normalize", normalize, aten=())
declare_named(
    "local_response_norm",
    AsOne(F.local_response_norm, ("size", "alpha", "beta", "k"), channels=True),
)


class DropoutOf:
    """Dropout of single elements: any dim, gaps computed and ignored."""

    def __init__(self, dense: Any, default: float = 0.5) -> None:
        self.dense = dense
        self.default = default

    def __call__(
        self, x: Any, p: float | None = None, training: bool | None = None, **named: Any
    ) -> Any:
        train = named.pop("train", training)
        # torch.dropout takes no default for `training`; the module's function trains unless told otherwise
        p, train = self.default if p is None else p, True if train is None else train
        inplace = named.pop("inplace", False)
        if not isinstance(x, NestedTensor):
            return self.dense(x, p, train)
        out = self.dense(bridge.values(kept_for_backward(x) if inplace else x), p, train)
        nested = bridge.wrap(out, x._structure, x._ragged_dim, x)
        return x.copy_(nested) if inplace else nested


declare_named("alpha_dropout", DropoutOf(torch.alpha_dropout), aten=())


class ChannelDropout:
    """Dropout of whole channels, dim 1, of each component (feature_dropout; dropout1d to 3d).

    Batch dim: every component draws its own channels. Ragged dim: where it is dim 1, each token is a channel.
    Gaps: computed and ignored.
    """

    def __init__(self, name: str, alpha: float | None = None) -> None:
        self.name = name
        self.alpha = alpha  # minus what dropped channels saturate to; None: 0

    def __call__(
        self, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False, **named: Any
    ) -> Any:
        training = named.pop("train", training)
        if not 0.0 <= p <= 1.0:
            raise errors.bad_value(self.name, f"p={p}", "a probability in [0, 1]", "Check p.")
        if not training or p == 0.0:
            return x
        packed = bridge.values(kept_for_backward(x) if inplace else x)
        kept = self._kept(x, packed, p)
        if self.alpha is None:
            out = packed * (kept / (1 - p) if p < 1.0 else kept)
        else:  # keeps zero mean and unit variance: Klambauer et al. 2017, equation (11)
            a = ((1 - p) * (1 + p * self.alpha**2)) ** -0.5 if p < 1.0 else 0.0
            out = packed * (kept * a) + (kept - 1 + p) * (self.alpha * a)
        nested = bridge.wrap(out, x._structure, x._ragged_dim, x)
        return x.copy_(nested) if inplace else nested

    def _kept(self, x: NestedTensor, packed: Tensor, p: float) -> Tensor:
        """1 for channels that stay, 0 for those that go, of a shape that broadcasts to the values."""
        structure, r = x._structure, x._ragged_dim
        rows = packed.shape[r - 1]
        if r == 1:
            return packed.new_empty((rows, *[1] * (packed.dim() - 1))).bernoulli_(1 - p)
        each = packed.new_empty((structure.batch_size, packed.shape[0], *[1] * (packed.dim() - 2)))
        return segments.broadcast(
            each.bernoulli_(1 - p), structure.offsets, rows, lengths=structure.lengths, dim=r - 1
        )


_SELU_LIMIT = 1.7580993408473766  # scale times alpha of SELU, which saturates at minus this
declare_named(
    "feature_alpha_dropout", ChannelDropout("feature_alpha_dropout", _SELU_LIMIT), aten=()
)
declare_named("feature_dropout", ChannelDropout("feature_dropout"), aten=())
for _name in ("dropout1d", "dropout2d", "dropout3d"):
    declare_named(_name, ChannelDropout(_name), aten=())


def batch_norm(
    input: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool | None = None,
) -> Any:
    """Batch norm with statistics over all real tokens of the batch.

    Args:
        input: nested (B, C, *) with channels in dim 1 as in dense torch; where dim 1 is the ragged one, tokens take
            the place of the batch, (B, j1, C, *), as they do for a dense (j1, C, *).
    Returns:
        nested, of the structure of `input`; running statistics are updated in place.
    """
    x = input
    r = x._ragged_dim
    # rows of gaps would count in the statistics, so here they go
    rows = bridge.compact_values(x)
    # the batch as one long sequence (1, C, .., T, ..), or as T tokens (T, C, *)
    one = rows if r == 1 else rows.unsqueeze(0)
    if r == 1 and one.dim() < 2:
        raise errors.bad_shape("batch_norm", errors.describe(x), "a channel dim", "Unsqueeze it.")
    out = torch.nn.functional.batch_norm(
        one, running_mean, running_var, weight, bias, training, momentum, eps
    )
    out = out if r == 1 else out.squeeze(0)
    return _spread(out, x)


def _spread(rows: Tensor, x: NestedTensor) -> NestedTensor:
    d = x._ragged_dim - 1
    return bridge.wrap(
        bridge.spread(rows, x._structure, x._values.shape[d], d), x._structure, d + 1, x
    )


declare_named("batch_norm", batch_norm, aten=())


def instance_norm(
    input: Any,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool | None = None,
) -> Any:
    """Normalizes every channel of every component over its own rows (and further dims).

    Args:
        input: nested (B, C, *) with channels in dim 1 and the ragged dim behind; or (B, j1, C, *), where each token is
            an instance, as it is for a dense (j1, C, *).
    """
    x = input
    r = x._ragged_dim
    if r == 1:
        tokens = zeroed(x)
        out = F.instance_norm(
            tokens, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
        )
        return bridge.wrap(out, x._structure, r, x)
    if running_mean is not None or not use_input_stats:
        raise errors.unsupported(
            "instance_norm", "running statistics", "statistics of each component alone",
            "Build the module with track_running_stats=False.",
        )  # fmt: skip
    return _group_norm_over_rows("instance_norm", x, x._values.shape[0], weight, bias, eps)


def group_norm(
    input: Any,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool | None = None,
) -> Any:
    """Normalizes groups of channels: of each component over its rows, or of each token.

    Args:
        input: nested (B, C, *) with channels in dim 1 and the ragged dim behind; or (B, j1, C, *), where the tokens
            take the place of the batch, as they do for a dense (j1, C, *).
    """
    x = input
    if x._ragged_dim > 1:
        return _group_norm_over_rows("group_norm", x, num_groups, weight, bias, eps)
    out = F.group_norm(zeroed(x), num_groups, weight, bias, eps)
    return bridge.wrap(out, x._structure, 1, x)


def _group_norm_over_rows(
    op: str, x: NestedTensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> NestedTensor:
    """Channels in dim 1, statistics of each component over its rows, the group's channels and further dims."""
    channels = x._values.shape[0]
    if channels % groups:
        raise errors.bad_shape(
            op,
            f"{channels} channels in {groups} groups",
            "channels that divide by groups",
            "Check num_groups.",
        )
    structure, d = x._structure, x._ragged_dim - 1
    packed = zeroed(x)
    rows = packed.shape[d]
    # (G, C / G, T, rest): everything but the group and the ragged dim in one dim each
    wide = packed.unflatten(0, (groups, channels // groups)).movedim(d + 1, 2)
    wide = wide.unsqueeze(-1).flatten(3)
    acc = wide.float() if wide.dtype in (torch.float16, torch.bfloat16) else wide
    where: dict[str, Any] = {"lengths": structure.lengths, "dim": 1}
    per_row = channels // groups * wide.shape[3]
    counts = structure.seqlens.to(acc.dtype).unsqueeze(1) * per_row
    mean = segments.sum(acc.sum((1, 3)), structure.offsets, **where) / counts  # (B, G)
    centred = acc - _rows(mean, structure, rows)
    square = segments.sum(centred.square().sum((1, 3)), structure.offsets, **where) / counts
    scale = (square + eps).rsqrt()
    out = (centred * _rows(scale, structure, rows)).to(packed.dtype)
    shape = [*packed.shape[1:d], *packed.shape[d + 1 :]]
    out = out.unflatten(3, shape) if shape else out.squeeze(3)
    out = out.movedim(2, d + 1).flatten(0, 1)
    tail = (slice(None), *(None,) * (out.dim() - 1))
    if weight is not None:
        out = out * weight[tail]
    if bias is not None:
        out = out + bias[tail]
    return bridge.wrap(out, structure, d + 1, x)


def _rows(each: Tensor, structure: Any, rows: Any) -> Tensor:
    """(B, G) to (G, 1, T, 1)."""
    spread = segments.broadcast(each, structure.offsets, rows, lengths=structure.lengths, dim=1)
    return spread[:, None, :, None]


declare_named("instance_norm", instance_norm, aten=())
declare_named("group_norm", group_norm, aten=())
