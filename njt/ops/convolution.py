"""Convolution, pooling, interpolation and padding: over features of each token, or along each component's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from njt import _compat, bridge, errors
from njt.registry import declare_function, declare_named
from njt.rules.per_component import per_component
from njt.rules.per_token import zeroed
from njt.rules.via_padded import Spaced
from njt.tensor import NestedTensor

Pair = tuple[int, int]


def _each(given: Any, n: int) -> list[int]:
    """An argument that may be one number for all `n` dims."""
    if isinstance(given, int):
        return [given] * n
    found = list(given)
    return found * n if len(found) == 1 else found


def _pads(padding: Any, kernel: Sequence[int], dilation: Sequence[int], n: int) -> list[Pair]:
    """Rows before and behind in each of `n` dims."""
    if padding == "valid":
        return [(0, 0)] * n
    if padding == "same":
        reach = [d * (k - 1) for d, k in zip(dilation, kernel)]
        return [(r // 2, r - r // 2) for r in reach]
    return [(p, p) for p in _each(padding, n)]


class Convolution:
    """`F.conv{n}d`: components are the batch, (B, C, *spatial), or tokens are, (B, j1, C, *spatial).

    Batch dim: stays. Ragged dim: a spatial dim, along which each component is alone and zeros surround it; or dim 1 of
    tokens. Channels may not be ragged. Gaps: not read.
    """

    def __init__(self, dense: Callable[..., Any], n: int) -> None:
        self.dense = dense
        self.n = n
        self.name = f"conv{n}d"

    def __call__(
        self,
        input: Any,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        x, n = input, self.n
        r, rank = x._ragged_dim, x.dim()
        if r == 1 and rank == n + 3:
            out = self.dense(zeroed(x), weight, bias, stride, padding, dilation, groups)
            return bridge.wrap(out, x._structure, 1, x)
        if r == 1 or rank != n + 2:
            raise errors.bad_shape(
                self.name,
                f"{errors.describe(x)}, ragged in dim {r}",
                f"{n} spatial dims behind the channels, one of them ragged, or tokens with {n + 1} dims each",
                "Put channels before the ragged dim: x.transpose(1, 2).",
            )
        kernel = list(weight.shape[2:])
        steps, holes = _each(stride, n), _each(dilation, n)
        pads = _pads(padding, kernel, holes, n)
        k = r - 2  # which spatial dim is ragged
        if not isinstance(padding, str) or padding == "valid" or all(a == b for a, b in pads):
            inner = [a for a, _ in pads]
            outer: list[int] = []
        else:
            inner = [0] * n
            outer = [
                p
                for d, pair in reversed(list(enumerate(pads)))
                for p in (pair if d != k else (0, 0))
            ]
        inner[k] = 0
        spaced = Spaced(self.name, x, kernel[k], steps[k], pads[k], holes[k])
        rows = spaced.rows()
        rows = F.pad(rows, outer) if outer else rows
        out = self.dense(rows.unsqueeze(0), weight, bias, steps, inner, holes, groups)
        return spaced.back(out.squeeze(0), r - 1)


for _n, _dense in enumerate((torch.conv1d, torch.conv2d, torch.conv3d), 1):
    declare_named(f"conv{_n}d", Convolution(_dense, _n), aten=())


class TokensAsBatch:
    """A dense function of a batch, applied to the tokens of (B, j1, *) as the batch.

    Batch and ragged dim: leading dims. Other places of the ragged dim: component by component. Gaps: 0.
    """

    def __init__(self, dense: Callable[..., Any], name: str, rank: int) -> None:
        self.dense = dense
        self.name = name
        self.rank = rank  # least number of dims of a nested tensor whose tokens are a batch

    def __call__(self, input: Any, *args: Any, **options: Any) -> Any:
        x = input
        if x._ragged_dim == 1 and x.dim() >= self.rank:
            return bridge.wrap(self.dense(zeroed(x), *args, **options), x._structure, 1, x)
        return _one_by_one(self.dense, self.name, x, *args, **options)


def _one_by_one(dense: Callable[..., Any], name: str, *args: Any, **options: Any) -> Any:
    """The loop over components; in a graph, the refusal."""
    overload = getattr(getattr(torch.ops.aten, name, None), "default", None)
    missing = errors.Undeclared(overload or torch.ops.aten.convolution.default)
    return per_component(dense, args, options, missing)


for _n, _transposed in enumerate((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), 1):
    declare_named(
        f"conv_transpose{_n}d", TokensAsBatch(_transposed, f"conv_transpose{_n}d", _n + 3), aten=()
    )
declare_named("interpolate", TokensAsBatch(F.interpolate, "interpolate", 4), aten=())


class Pool:
    """`F.{kind}_pool{n}d` over the last n dims.

    Batch dim: stays. Ragged dim: a leading dim as any other, or one of the pooled dims, along which each component is
    alone; with ceil_mode or an adaptive size component by component then. Gaps: not read.
    """

    def __init__(self, kind: str, n: int) -> None:
        self.kind = kind
        self.n = n
        self.name = f"{kind}_pool{n}d"
        self.dense = getattr(F, self.name)

    def __call__(self, input: Any, *args: Any, **options: Any) -> Any:
        x = input
        if x._ragged_dim < x.dim() - self.n:
            return self._per_row(x, args, options)
        if self.kind == "max":
            return self._windows(x, *args, **options)
        if self.kind == "avg":
            return self._means(x, *args, **options)
        return _one_by_one(self.dense, self.name, x, *args, **options)

    def _per_row(self, x: NestedTensor, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        packed, n = bridge.values(x), self.n
        lead = packed.shape[: packed.dim() - n]
        # torch takes one or two dims before those it pools
        flat = packed if len(lead) <= 2 else packed.flatten(0, len(lead) - 2)
        out = self.dense(flat, *args, **options)
        outs = [out] if isinstance(out, Tensor) else out
        outs = [o if len(lead) <= 2 else o.unflatten(0, lead[:-1]) for o in outs]
        nested = [bridge.wrap(o, x._structure, x._ragged_dim, x) for o in outs]
        return nested[0] if isinstance(out, Tensor) else tuple(nested)

    def _spaced(
        self,
        x: NestedTensor,
        kernel: list[int],
        stride: list[int],
        padding: list[int],
        dilation: list[int],
    ) -> tuple[Spaced, list[int]]:
        k = x._ragged_dim - (x.dim() - self.n)
        spaced = Spaced(self.name, x, kernel[k], stride[k], (padding[k], padding[k]), dilation[k])
        return spaced, [0 if d == k else p for d, p in enumerate(padding)]

    def _windows(
        self,
        x: NestedTensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        if ceil_mode or return_indices:
            return _one_by_one(
                self.dense,
                self.name,
                x,
                kernel_size,
                stride,
                padding,
                dilation,
                ceil_mode,
                return_indices,
            )
        n = self.n
        kernel, holes, pads = _each(kernel_size, n), _each(dilation, n), _each(padding, n)
        steps = kernel if stride is None or stride == [] else _each(stride, n)
        spaced, inner = self._spaced(x, kernel, steps, pads, holes)
        rows = spaced.rows(-torch.inf)  # neutral for a maximum, and what torch's own padding holds
        out = self.dense(rows.unsqueeze(0), kernel, steps, inner, holes)
        return spaced.back(out.squeeze(0), x._ragged_dim - 1)

    def _means(
        self,
        x: NestedTensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        n = self.n
        kernel, pads = _each(kernel_size, n), _each(padding, n)
        more = {} if n == 1 else {"divisor_override": divisor_override}
        if ceil_mode or not (count_include_pad or sum(pads) == 0 or n == 1):
            return _one_by_one(
                self.dense,
                self.name,
                x,
                kernel_size,
                stride,
                padding,
                ceil_mode,
                count_include_pad,
                **more,
            )
        steps = kernel if stride is None or stride == [] else _each(stride, n)
        spaced, inner = self._spaced(x, kernel, steps, pads, [1] * n)
        # zeros add nothing to a sum, and the divisor is the window's size: they count as padding does
        rows = spaced.rows()
        out = self.dense(rows.unsqueeze(0), kernel, steps, inner, False, True, **more).squeeze(0)
        nested = spaced.back(out, x._ragged_dim - 1)
        if count_include_pad or sum(pads) == 0:
            return nested
        ones = bridge.wrap(torch.ones_like(x._values.detach()), x._structure, x._ragged_dim, x)
        return nested / self._means(ones, kernel_size, stride, padding)


for _n in (1, 2, 3):
    for _kind in ("max", "avg", "adaptive_avg", "adaptive_max"):
        declare_named(f"{_kind}_pool{_n}d", Pool(_kind, _n), aten=())


def pad(input: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """`F.pad` of feature dims; the ragged dim too, component by component.

    Raises:
        RuntimeError: the batch dim would be padded.
    """
    x = input
    reached = [x.dim() - 1 - i // 2 for i, p in enumerate(pad) if p]
    if 0 in reached:
        raise errors.no_batch_dim("pad", x, 0)
    r = x._ragged_dim
    if r in reached:
        return _one_by_one(F.pad, "pad", x, list(pad), mode, value)
    own = list(pad[: 2 * (x.dim() - 1)])
    if mode == "constant":
        return bridge.wrap(F.pad(bridge.values(x), own, mode, value), x._structure, r, x)
    # other modes want as many dims as torch's modules have: the batch dim stands in for itself
    packed = bridge.values(x).unsqueeze(0)
    while own and own[-2:] == [0, 0]:
        own = own[:-2]
    fit = len(own) // 2 + 2
    flat = packed if packed.dim() <= fit else packed.flatten(0, packed.dim() - fit)
    out = F.pad(flat, own, mode, value)
    out = out.reshape(
        *packed.shape[: packed.dim() - len(own) // 2], *out.shape[out.dim() - len(own) // 2 :]
    )
    return bridge.wrap(out.squeeze(0), x._structure, r, x)


declare_named("pad", pad, aten=())
declare_function(pad, _compat.pad_function)
