"""Every declared operator works in a graph: one graph, any batch, and the values and gradients of eager.

A line is an operator; the lines of a group are compiled together, since a graph of twenty costs little more than one
of one. A group that fails is compiled again line by line, so that the failure names the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import njt
from njt import registry
from njt.ops.__main__ import table
from tests.compile.streams import Counting, offsets

jagged = njt.nested_tensor_from_jagged


class Given(NamedTuple):
    """What lines are fed. Floats lie in 0.1..0.9, inside the domain of nearly every function, and ask for gradients."""

    x: Any  # (B, j1, 6)
    y: Any  # as x
    q: Any  # (B, 2, j1, 4)
    n: Any  # (B, j1, 6) of 0..5
    s: Any  # (B, j1) of 0..5
    m: Any  # (B, j1, 6) of bool
    z: Any  # (B, j1, 6) complex
    v: Tensor  # (6,)
    w: Tensor  # (6, 6)
    i: Tensor  # (2,) of 0..5


def usual(lengths: Sequence[int], seed: int = 0) -> Given:
    """A batch whose tensors share one structure."""
    g = torch.Generator().manual_seed(seed)
    total, starts = sum(lengths), offsets(lengths)
    like = jagged(torch.zeros(total, 1), starts)

    def floats(*size: int) -> Tensor:
        return torch.rand(size, generator=g) * 0.8 + 0.1

    def nested(values: Tensor, dim: int = 1) -> Any:
        x = njt.NestedTensor(values, like.structure, dim)
        return x.requires_grad_(values.is_floating_point() or values.is_complex())

    def ints(*size: int) -> Tensor:
        return torch.randint(6, size, generator=g)

    return Given(
        nested(floats(total, 6)),
        nested(floats(total, 6)),
        nested(floats(2, total, 4), 2),
        nested(ints(total, 6)),
        nested(ints(total)),
        nested(ints(total, 6) < 3),
        nested(torch.complex(floats(total, 6), floats(total, 6))),
        floats(6).requires_grad_(),
        floats(6, 6).requires_grad_(),
        torch.tensor([1, 4]),
    )


Line = Callable[[Given], Any]


def words(text: str) -> list[str]:
    return text.split()


def each(home: Any, names: str, call: Callable[[Any, Given], Any]) -> dict[str, Line]:
    """The functions of these names in `home`, called the same way."""
    return {name: partial(call, getattr(home, name)) for name in words(names)}


def _written(f: Callable[..., Any], written: list[Any], *others: Any) -> list[Any]:
    f(written, *others)
    return written


R, LAST = 1, -1


# ---- pointwise: names, each with what it is called on ---------------------------------------------------------------
UNARY = words("""
    abs acos angle asin asinh atan atanh ceil conj_physical cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1
    floor frac i0 isfinite isinf isnan isneginf isposinf lgamma log log10 log1p log2 logical_not logit nan_to_num neg
    positive rad2deg reciprocal relu round rsqrt selu sigmoid sign signbit sin sinc sinh sqrt square tan tanh trunc
    special.airy_ai special.bessel_j0 special.bessel_j1 special.bessel_y0 special.bessel_y1 special.entr special.erfcx
    special.i0e special.i1 special.i1e special.log_ndtr special.modified_bessel_i0 special.modified_bessel_i1
    special.modified_bessel_k0 special.modified_bessel_k1 special.ndtri special.scaled_modified_bessel_k0
    special.scaled_modified_bessel_k1 special.spherical_bessel_j0 nn.functional.celu nn.functional.elu
    nn.functional.gelu nn.functional.hardshrink nn.functional.hardsigmoid nn.functional.hardswish
    nn.functional.hardtanh nn.functional.leaky_relu nn.functional.logsigmoid nn.functional.mish nn.functional.relu6
    nn.functional.silu nn.functional.softplus nn.functional.softshrink nn.functional.softsign
    nn.functional.tanhshrink
""")
BINARY = words("""
    add atan2 copysign div eq float_power floor_divide fmax fmin fmod ge gt heaviside hypot ldexp le logaddexp
    logaddexp2 lt maximum minimum mul ne nextafter pow remainder rsub sub true_divide xlogy special.xlog1py
    igamma igammac logical_and logical_or logical_xor
""")
OF_INTEGERS = words("""
    bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor gcd lcm
""")
IN_PLACE = words("""
    abs_ acos_ asin_ asinh_ atan_ atanh_ ceil_ celu_ cos_ cosh_ deg2rad_ digamma_ elu_ erf_ erfc_ erfinv_ exp2_ exp_
    expm1_ floor_ frac_ gelu_ hardsigmoid_ hardswish_ hardtanh_ i0_ leaky_relu_ lgamma_ log10_ log1p_ log2_ log_ logit_
    mish_ nan_to_num_ neg_ rad2deg_ reciprocal_ relu_ round_ rsqrt_ selu_ sigmoid_ sign_ silu_ sin_ sinc_ sinh_
    sqrt_ square_ tan_ tanh_ trunc_ zero_ conj_physical_
""")
IN_PLACE_BINARY = words("""
    add_ atan2_ copysign_ div_ eq_ floor_divide_ fmod_ ge_ gt_ heaviside_ hypot_ ldexp_ le_ lt_ mul_ ne_
    nextafter_ pow_ remainder_ sub_ xlogy_ igamma_ igammac_ logical_and_ logical_or_ logical_xor_
""")
POLYNOMIALS = words("""
    chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h
    hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t
    shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w zeta
""")
# torch itself has no derivative of these, or none where x lies
NO_GRADIENT = {*POLYNOMIALS, *words("""
    nextafter nextafter_ igamma igammac igamma_ igammac_ heaviside heaviside_ zeta floor_divide floor_divide_ ge_ gt_
    le_ lt_ eq_ ne_ logical_and_ logical_or_ logical_xor_ logical_not_ special.airy_ai special.bessel_j0
    special.bessel_j1 special.bessel_y0 special.bessel_y1 special.modified_bessel_i0 special.modified_bessel_i1
    special.modified_bessel_k0 special.modified_bessel_k1 special.scaled_modified_bessel_k0
    special.scaled_modified_bessel_k1 special.spherical_bessel_j0 asinh_ atanh_
    """)}  # fmt: skip


def function(name: str) -> Callable[..., Any]:
    """torch.<name> or what is nearest."""
    at: Any = torch
    for part in name.split("."):
        at = getattr(at, part, None)
    if at is None:
        at = getattr(torch.Tensor, name, None) or getattr(torch.ops.aten, name)
    return at


def _unary(name: str) -> Line:
    f = function(name)
    if name in NO_GRADIENT:
        return lambda g: f(g.x.detach() * 1)
    if name.endswith("_"):
        return lambda g: f(g.x * 1)
    return lambda g: f(g.x)


def _binary(name: str) -> Line:
    f = function(name)
    if name.endswith("_"):
        if name in NO_GRADIENT:
            return lambda g: f(g.x.detach() * 1, g.y.detach())
        return lambda g: f(g.x * 1, g.y)
    if name in NO_GRADIENT:
        return lambda g: f(g.x.detach(), g.y.detach())
    return lambda g: (f(g.x, g.y), f(g.x, g.v)) if name != "rsub" else f(g.x, g.y)


def _integers(name: str) -> Line:
    f, in_place = function(name), getattr(torch.Tensor, name + "_")
    return lambda g: (f(g.n, g.n + 1), in_place(g.n.clone(), g.n + 1))


def _polynomial(name: str) -> Line:
    f = getattr(torch.special, name)
    return lambda g: f(g.x.detach() + 1, g.n)


aten = torch.ops.aten
POINTWISE: dict[str, Line] = {
    "acosh": lambda g: torch.acosh(g.x + 1.5),
    "acosh_": lambda g: (g.x.detach() + 1.5).acosh_(),
    "float_power_": lambda g: g.x.double().float_power_(2),
    "addcdiv": lambda g: torch.addcdiv(g.x, g.y, g.x + 1, value=2),
    "addcdiv_": lambda g: (g.x * 1).addcdiv_(g.y, g.x + 1),
    "addcmul": lambda g: torch.addcmul(g.x, g.y, g.x, value=2),
    "addcmul_": lambda g: (g.x * 1).addcmul_(g.y, g.x),
    "bitwise_not": lambda g: (torch.bitwise_not(g.n), torch.bitwise_not(g.m)),
    "bitwise_not_": lambda g: g.n.clone().bitwise_not_(),
    "bucketize": lambda g: torch.bucketize(g.x, g.v.detach().sort().values),
    "clamp": lambda g: (g.x.clamp(0.2, 0.7), g.x.clamp(g.y, g.y + 0.1), g.x.clip(max=0.5)),
    "clamp_": lambda g: ((g.x * 1).clamp_(0.2), (g.x * 1).clip_(0.2, 0.4)),
    "clamp_max": lambda g: (torch.clamp_max(g.x, 0.5), torch.clamp_max(g.x, g.y)),
    "clamp_max_": lambda g: (g.x * 1).clamp_max_(0.5),
    "clamp_min": lambda g: (torch.clamp_min(g.x, 0.5), torch.clamp_min(g.x, g.y)),
    "clamp_min_": lambda g: (g.x * 1).clamp_min_(0.5),
    "clone": lambda g: g.x.clone(),
    "copy_": lambda g: (g.x * 1).copy_(g.y),
    "fill": lambda g: torch.fill(g.x, 2.0),
    "fill_": lambda g: (g.x * 1).fill_(2.0),
    "frexp": lambda g: torch.frexp(g.x),
    "isclose": lambda g: torch.isclose(g.x, g.y),
    "lerp": lambda g: (torch.lerp(g.x, g.y, 0.3), torch.lerp(g.x, g.y, g.x)),
    "lerp_": lambda g: (g.x * 1).lerp_(g.y, 0.3),
    "logical_not_": lambda g: g.m.clone().logical_not_(),
    "masked_fill": lambda g: (g.x.masked_fill(g.m, 0.5), g.x.masked_fill(g.v > 0.5, 0.1)),
    "masked_fill_": lambda g: (g.x * 1).masked_fill_(g.m, 0.5),
    "mvlgamma": lambda g: torch.mvlgamma(g.x + 2, 2),
    "mvlgamma_": lambda g: (g.x + 2).mvlgamma_(2),
    "polygamma": lambda g: torch.polygamma(1, g.x),
    "shifts": lambda g: (g.n << 1, g.n >> 1, g.n ^ 3),
    "__ilshift__": lambda g: g.n.clone().__ilshift__(1),
    "__irshift__": lambda g: g.n.clone().__irshift__(1),
    "__ixor__": lambda g: g.n.clone().__ixor__(3),
    "threshold": lambda g: F.threshold(g.x, 0.5, 0.1),
    "threshold_": lambda g: F.threshold_(g.x * 1, 0.5, 0.1),
    "where": lambda g: (torch.where(g.m, g.x, g.y), torch.where(g.m, g.x, 0.0)),
    "zero": lambda g: torch.zero(g.x) if hasattr(torch, "zero") else aten.zero(g.x),
    "angle": lambda g: torch.angle(g.x),
    "dense operands": lambda g: (g.x + g.v, g.v * g.x, g.x - g.w[:, :1].sum(0), 2 / g.x),
    "type_as": lambda g: g.n.type_as(g.x),
    "to": lambda g: (g.x.to(torch.float64), g.x.half(), g.n.bool()),
    "likes": lambda g: (
        torch.zeros_like(g.x), torch.ones_like(g.x), torch.full_like(g.x, 2.0), torch.rand_like(g.x),
        torch.randn_like(g.x), torch.randint_like(g.x, 5), torch.empty_like(g.x).zero_(),
    ),
    "news": lambda g: (
        g.x.new_zeros(g.x.shape), g.x.new_ones(3), g.x.new_full(g.x.shape, 2.0), g.x.new_empty(2).fill_(1),
    ),
    "complex": lambda g: torch.complex(g.x, g.y),
    "polar": lambda g: torch.polar(g.x, g.y),
    "of complex": lambda g: (torch._neg_view(g.x) * 1,
        g.z * 2, g.z.abs(), g.z.real, g.z.imag, g.z.conj() * 1, torch.view_as_real(g.z), torch.resolve_conj(g.z),
        torch.resolve_neg(g.z), torch.sgn(g.z), torch.conj_physical(g.z),
    ),
    "view_as_complex": lambda g: torch.view_as_complex(g.x.unflatten(-1, (3, 2))),
}  # fmt: skip


# ---- over dims ------------------------------------------------------------------------------------------------------
def over(f: Callable[..., Any], whole: bool = True, **options: Any) -> Line:
    """Over the ragged dim, over features with the dim kept, over the ragged dim of a transposed one, and over all."""

    def line(g: Given) -> Any:
        outs = [
            f(g.x, dim=R, **options),
            f(g.x, dim=LAST, keepdim=True, **options),
            f(g.q, dim=2, **options),
        ]
        return [*outs, f(g.x, **options)] if whole else outs

    return line


def along(f: Callable[..., Any]) -> Line:
    """The same for operators that keep the dim."""
    return lambda g: [f(g.x, dim=R), f(g.x, dim=LAST), f(g.q, dim=2)]


REDUCTIONS: dict[str, Line] = {
    **{name: over(getattr(torch, name)) for name in (
        ["all", "any", "sum", "nansum", "mean", "nanmean", "amax", "amin", "argmax", "argmin", "std", "var", "std_mean", "var_mean"])},
    "count_nonzero": lambda g: (torch.count_nonzero(g.n, R), torch.count_nonzero(g.n, LAST), torch.count_nonzero(g.n)),
    "sums of several dims": lambda g: (g.x.sum((0, 1)), g.x.sum((1, 2)), g.q.mean((1, 3)), g.x.amax((0, 1), True)),
    "logsumexp": over(torch.logsumexp, whole=False),
    "special_logsumexp": over(torch.special.logsumexp, whole=False),
    "prod": over(torch.prod),
    "aminmax": over(torch.aminmax),
    "max": over(torch.max),
    "min": over(torch.min),
    "median": over(torch.median),
    "nanmedian": over(torch.nanmedian),
    "mode": over(torch.mode, whole=False),
    "kthvalue": over(torch.kthvalue, whole=False, k=1),
    "quantile": over(torch.quantile, q=0.3),
    "nanquantile": over(torch.nanquantile, q=0.3),
    "norm": lambda g: (torch.norm(g.x), torch.norm(g.x, dim=R), g.x.norm(1, LAST)),
    "linalg_vector_norm": over(torch.linalg.vector_norm),
    "linalg_norm": over(torch.linalg.norm),
    "linalg_matrix_norm": lambda g: (torch.linalg.matrix_norm(g.x), torch.linalg.matrix_norm(g.x, 1)),
    "dist": lambda g: torch.dist(g.x, g.y),
}  # fmt: skip
ALONG: dict[str, Line] = {
    **{name: along(getattr(torch, name)) for name in
       ["softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort"]},
    "softmin": along(F.softmin),
    "special_softmax": along(torch.special.softmax),
    "special_log_softmax": along(torch.special.log_softmax),
    "cumsum_": lambda g: (g.x * 1).cumsum_(R),
    "cumprod_": lambda g: (g.x * 1).cumprod_(R),
    "topk": lambda g: (torch.topk(g.x, 2), torch.topk(g.x, 1, R)),
    "flip": lambda g: (g.x.flip(R), g.x.flip(R, LAST)),
    "fliplr": lambda g: torch.fliplr(g.x),
    "diff": lambda g: (g.x.diff(), g.x.diff(dim=R)),
    "roll": lambda g: (g.x.roll(1, R), g.x.roll((2, -1), (R, LAST))),
    "renorm": lambda g: torch.renorm(g.x, 2, LAST, 0.5),
    "renorm_": lambda g: (g.x * 1).renorm_(2, LAST, 0.5),
    "normalize": along(F.normalize),
    "glu": lambda g: F.glu(g.x),
}  # fmt: skip

# ---- shapes ---------------------------------------------------------------------------------------------------------
VIEWS: dict[str, Line] = {
    "transpose": lambda g: (g.x.transpose(1, 2), g.q.transpose(1, 2), g.x.mT),
    "transpose_": lambda g: (g.x * 1).transpose_(1, 2),
    "permute": lambda g: g.q.permute(0, 2, 3, 1),
    "unsqueeze": lambda g: (g.x.unsqueeze(1), g.x.unsqueeze(-1)),
    "unsqueeze_": lambda g: (g.x * 1).unsqueeze_(-1),
    "squeeze": lambda g: (g.x.unsqueeze(-1).squeeze(-1), g.x.unsqueeze(1).squeeze()),
    "squeeze_": lambda g: g.x.unsqueeze(-1).clone().squeeze_(-1),
    "view": lambda g: (g.x.view(g.x.shape[0], -1, 2, 3), g.x.view(torch.int32)),
    "view_as": lambda g: g.x.view_as(g.y),
    "reshape": lambda g: (g.x.reshape(g.x.shape[0], g.x.shape[1], 3, 2), g.x.reshape(-1, 6) * 1),
    "reshape_as": lambda g: g.x.reshape_as(g.y),
    "flatten": lambda g: (g.q.transpose(1, 2).flatten(2), g.x.flatten(1), g.x.flatten(0, 1) * 1),
    "ravel": lambda g: g.x.ravel() * 1,
    "unflatten": lambda g: (g.x.unflatten(-1, (2, 3)), torch.unflatten(g.x, 2, (3, -1))),
    "expand": lambda g: g.x.unsqueeze(-1).expand(-1, -1, -1, 3),
    "expand_as": lambda g: (g.x[..., :1].expand_as(g.y), g.v.expand_as(g.y)),
    "as_strided": lambda g: torch.as_strided(g.x, g.x.shape, g.x.stride()),
    "diagonal": lambda g: g.x.unflatten(-1, (2, 3)).diagonal(0, -2, -1),
    "linalg_diagonal": lambda g: torch.linalg.diagonal(g.x.unflatten(-1, (2, 3)), dim1=-2, dim2=-1),
    "unfold": lambda g: g.x.unfold(-1, 2, 2),
    "contiguous": lambda g: (g.x.contiguous(), g.q.transpose(1, 2).contiguous()),
    "broadcast_tensors": lambda g: torch.broadcast_tensors(g.x, g.y),
    "alias": lambda g: (g.x.detach(), aten.alias(g.x)),
    "chunk": lambda g: (*g.x.chunk(2, -1), *torch.chunk(g.x, 3, 2)),
    "split": lambda g: (*g.x.split(2, -1), *torch.split(g.x, [1, 5], 2)),
    "split_with_sizes": lambda g: torch.split_with_sizes(g.x, [2, 4], -1),
    "tensor_split": lambda g: torch.tensor_split(g.x, 3, -1),
    "unsafe_chunk": lambda g: torch.unsafe_chunk(g.x, 2, -1),
    "unsafe_split": lambda g: torch.unsafe_split(g.x, 2, -1),
    "dsplit": lambda g: torch.dsplit(g.x, 2),
    "hsplit": lambda g: torch.hsplit(g.q, 2),
    "vsplit": lambda g: torch.vsplit(g.x, 1),
    "unbind": lambda g: (*g.x.unbind(-1), *g.x[:2].sum(-1).unsqueeze(-1).unbind(-1)),
    "values": lambda g: g.x.values() * 2,
}
JOINS: dict[str, Line] = {
    "cat": lambda g: (torch.cat([g.x, g.y]), torch.cat([g.x, g.y], R), torch.cat([g.x, g.y], -1)),
    "concat": lambda g: torch.concat([g.x, g.y], -1),
    "concatenate": lambda g: torch.concatenate([g.x, g.y], -1),
    "stack": lambda g: (torch.stack([g.x, g.y], -1), torch.stack([g.x, g.y], 1)),
    "hstack": lambda g: torch.hstack([g.x, g.y]),
    "column_stack": lambda g: torch.column_stack([g.x, g.y]),
    "vstack": lambda g: torch.vstack([g.x, g.y]),
    "row_stack": lambda g: torch.row_stack([g.x, g.y]),
    "dstack": lambda g: torch.dstack([g.x, g.y]),
    "repeat": lambda g: (g.x.repeat(1, 1, 2), g.x.repeat(2, 2, 1)),
    "tile": lambda g: torch.tile(g.x, (2,)),
    "repeat_interleave": lambda g: (g.x.repeat_interleave(2, -1), g.x.repeat_interleave(2, R), g.x.repeat_interleave(2, 0)),
    "to_padded_tensor": lambda g: (g.x.to_padded_tensor(0.0), torch.nested.to_padded_tensor(g.x, 1.0)),
    "pad": lambda g: (F.pad(g.x, (1, 2)), F.pad(g.x, (1, 1), "reflect")),
}  # fmt: skip
INDEXING: dict[str, Line] = {
    "select": lambda g: (g.x.select(-1, 1), g.x.select(1, 0), g.x.select(0, 1) * 1),
    "slice": lambda g: (g.x[..., 1:4], g.x[:, :2], g.x[1:], g.x[:, 1:, ::2]),
    "narrow": lambda g: (g.x.narrow(-1, 1, 2), g.x.narrow(0, 0, 2)),
    "index_select": lambda g: (g.x.index_select(-1, g.i), g.x.index_select(0, g.i.clamp(max=1))),
    "masked_select": lambda g: g.x.masked_select(g.m),
    "__getitem__": lambda g: (g.x[0] * 1, g.x[:, 0], g.x[..., g.i], g.x[[1, 0]], g.x[:, ::2], g.x[g.m]),
    "__setitem__": lambda g: (
        put(g.x * 1, (slice(None), slice(None), 1), 0.5), put(g.x * 1, (slice(None), slice(0, 2)), 0.5),
        put(g.x * 1, g.m, 0.5), put(g.x * 1, 0, 0.5),
    ),
    "index_put": lambda g: torch.index_put(g.x, (g.i.clamp(max=1), g.i * 0), g.y.values()[:2]),
    "index_put_": lambda g: (g.x * 1).index_put_((g.i.clamp(max=1), g.i * 0), g.y.values()[:2]),
    "gather": lambda g: (g.x.gather(-1, g.n[..., :3]), g.x.gather(R, g.n * 0)),
    "take_along_dim": lambda g: torch.take_along_dim(g.x, g.n, -1),
    "scatter": lambda g: (g.x.scatter(-1, g.n[..., :1], g.y[..., :1]), g.x.scatter(-1, g.n, 0.5)),
    "scatter_": lambda g: (g.x * 1).scatter_(-1, g.n[..., :1], g.y[..., :1]),
    "scatter_add": lambda g: (g.x.scatter_add(-1, g.n, g.y), g.x.scatter_add(R, g.n * 0, g.y)),
    "scatter_add_": lambda g: (g.x * 1).scatter_add_(-1, g.n, g.y),
    "scatter_reduce": lambda g: g.x.scatter_reduce(-1, g.n, g.y, "amax"),
    "scatter_reduce_": lambda g: (g.x * 1).scatter_reduce_(-1, g.n, g.y, "sum"),
    "index_fill": lambda g: g.x.index_fill(-1, g.i, 0.5),
    "index_fill_": lambda g: (g.x * 1).index_fill_(-1, g.i, 0.5),
    "index_add": lambda g: g.x.index_add(-1, g.i, g.y[..., :2]),
    "index_add_": lambda g: (g.x * 1).index_add_(-1, g.i, g.y[..., :2]),
    "index_copy": lambda g: g.x.index_copy(-1, g.i, g.y[..., :2]),
    "index_copy_": lambda g: (g.x * 1).index_copy_(-1, g.i, g.y[..., :2]),
    "masked_scatter": lambda g: g.x.masked_scatter(g.m, g.y),
    "masked_scatter_": lambda g: (g.x * 1).masked_scatter_(g.m, g.y),
    "select_scatter": lambda g: torch.select_scatter(g.x, g.y[..., 0], -1, 1),
    "slice_scatter": lambda g: torch.slice_scatter(g.x, g.y[..., :2], -1, 1, 3),
    "diagonal_scatter": lambda g: torch.diagonal_scatter(
        g.x.unflatten(-1, (2, 3)), g.y[..., :2], 0, -2, -1
    ),
}  # fmt: skip

# ---- layers ---------------------------------------------------------------------------------------------------------
WEIGHT = torch.linspace(-1, 1, 4 * 2 * 3).reshape(4, 2, 3)


def put(x: Any, index: Any, value: Any) -> Any:
    x[index] = value
    return x


LAYERS: dict[str, Line] = {
    "linear": lambda g: (F.linear(g.x, g.w), F.linear(g.x, g.w, g.v)),
    "bilinear": lambda g: F.bilinear(g.x, g.y, g.w.unsqueeze(0), g.v[:1]),
    "matmul": lambda g: (g.x @ g.w, torch.matmul(g.x.mT, g.y), g.x @ g.w.expand(g.x.shape[0], 6, 6), g.x @ g.v),
    "linalg_matmul": lambda g: torch.linalg.matmul(g.x, g.w),
    "__matmul__": lambda g: g.q @ g.w[:4, :4],
    "__rmatmul__": lambda g: g.w @ g.x.mT,
    "bmm": lambda g: torch.bmm(g.x.mT, g.y),
    "baddbmm": lambda g: torch.baddbmm(g.x, g.y, g.w.expand(g.x.shape[0], 6, 6), beta=0.5, alpha=2),
    "einsum": lambda g: (
        torch.einsum("bjd,de->bje", g.x, g.w), torch.einsum("bjd,bje->bde", g.x, g.y), torch.einsum("bjd->bd", g.x),
        torch.einsum("bjd,bde->bje", g.x, g.w.expand(g.x.shape[0], 6, 6)),
    ),
    "layer_norm": lambda g: F.layer_norm(g.x, (6,), g.v, g.v),
    "rms_norm": lambda g: F.rms_norm(g.x, (6,), g.v),
    "batch_norm": lambda g: (
        F.batch_norm(g.x, None, None, g.v, g.v, True), F.batch_norm(g.x.mT, g.v.detach(), g.v.detach(), g.v, g.v),
    ),
    "instance_norm": lambda g: F.instance_norm(g.q, weight=g.v[:2]),
    "group_norm": lambda g: (F.group_norm(g.x.mT, 2, g.v, g.v), F.group_norm(g.x, 3, g.v, g.v)),
    "local_response_norm": lambda g: F.local_response_norm(g.q, 2),
    "prelu": lambda g: (F.prelu(g.x - 0.5, g.v[:1]), F.prelu(g.x.mT - 0.5, g.v)),
    "cosine_similarity": lambda g: (F.cosine_similarity(g.x, g.y, -1), F.cosine_similarity(g.x, g.y, R)),
    "pairwise_distance": lambda g: F.pairwise_distance(g.x, g.y),
    "embedding": lambda g: (F.embedding(g.n, g.w), torch.embedding(g.w, g.s)),
    "embedding_bag": lambda g: (F.embedding_bag(g.s, g.w), F.embedding_bag(g.s, g.w, mode="sum")),
    "one_hot": lambda g: F.one_hot(g.n, 6),
    "conv1d": lambda g: (F.conv1d(g.x.mT, g.w.unsqueeze(-1).expand(6, 6, 3), g.v, padding=1),
                         F.conv1d(g.x.unsqueeze(2), g.w[:, :1].unsqueeze(-1).expand(6, 1, 3))),
    "conv2d": lambda g: F.conv2d(g.q, g.w[:2, :2].reshape(2, 2, 1, 1).expand(2, 2, 3, 3), padding=1),
    "conv3d": lambda g: F.conv3d(g.q.unsqueeze(-1), g.w[:2, :2].reshape(2, 2, 1, 1, 1).expand(2, 2, 3, 3, 3), padding=1),
    "conv_transpose1d": lambda g: F.conv_transpose1d(g.x.unsqueeze(2), g.w[:1].unsqueeze(-1).expand(1, 6, 3)),
    "conv_transpose2d": lambda g: F.conv_transpose2d(
        g.x.reshape(g.x.shape[0], -1, 1, 2, 3), g.w[:1].reshape(1, 6, 1, 1).expand(1, 6, 2, 2)),
    "conv_transpose3d": lambda g: F.conv_transpose3d(
        g.x.reshape(g.x.shape[0], -1, 1, 1, 2, 3), g.w[:1].reshape(1, 6, 1, 1, 1).expand(1, 6, 2, 2, 2)),
    "interpolate": lambda g: F.interpolate(g.x.unsqueeze(2), 4),
    **each(F, """
        max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
        adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
        """, lambda f, g: f(g.x.unflatten(-1, (1, 1, 6)), 1)),
    "pools over rows": lambda g: (F.max_pool1d(g.x.mT, 3, 1, 1), F.avg_pool1d(g.x.mT, 3, 1, 1)),
    "scaled_dot_product_attention": lambda g: (
        F.scaled_dot_product_attention(g.q, g.q, g.q), F.scaled_dot_product_attention(g.q, g.q, g.q, is_causal=True)),
    "multi_head_attention_forward": lambda g: F.multi_head_attention_forward(
        g.x, g.x, g.x, 6, 2, torch.cat([g.w] * 3), None, None, None, False, 0.0, g.w, None, need_weights=False)[0],
}  # fmt: skip
LOSSES: dict[str, Line] = {
    **each(F, """
        mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
        soft_margin_loss poisson_nll_loss hinge_embedding_loss
        """, lambda f, g: (f(g.x, g.y.detach()), f(g.x, g.y.detach(), reduction="none"))),
    "kl_div": lambda g: [F.kl_div(g.x, g.y.detach(), reduction=how) for how in ("none", "sum", "batchmean")],
    "margin_ranking_loss": lambda g: F.margin_ranking_loss(g.x, g.y, g.m * 2.0 - 1),
    "nll_loss": lambda g: F.nll_loss(g.x.log_softmax(-1), g.s),
    "cross_entropy": lambda g: (F.cross_entropy(g.x, g.s), F.cross_entropy(g.x, g.y), F.cross_entropy(g.x.mT, g.s)),
    "cosine_embedding_loss": lambda g: F.cosine_embedding_loss(g.x, g.y, g.s.clamp(max=0) * 2 + 1),
    "triplet_margin_loss": lambda g: F.triplet_margin_loss(g.x, g.y, g.x * 2),
    "triplet_margin_with_distance_loss": lambda g: F.triplet_margin_with_distance_loss(g.x, g.y, g.x * 2),
    "multi_margin_loss": lambda g: F.multi_margin_loss(g.x, g.s),
    "multilabel_margin_loss": lambda g: F.multilabel_margin_loss(g.x, g.n),
    "multilabel_soft_margin_loss": lambda g: F.multilabel_soft_margin_loss(g.x, g.y),
}  # fmt: skip
RANDOM: dict[str, Line] = {
    **each(F, "dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d", lambda f, g: f(g.x)),
    "feature_dropout": lambda g: torch.feature_dropout(g.x, 0.5, True),
    "dropout_": lambda g: torch.dropout_(g.x * 1, 0.5, True),
    "native_dropout": lambda g: torch.native_dropout(g.x, 0.5, True)[0],
    "rrelu": lambda g: (F.rrelu(g.x - 0.5), F.rrelu(g.x - 0.5, training=True)),
    "rrelu_": lambda g: torch.rrelu_(g.x - 0.5),
    "bernoulli": lambda g: torch.bernoulli(g.x),
    "multinomial": lambda g: (torch.multinomial(g.x.detach().mT, 1), torch.multinomial(g.x.detach()[..., 0], 2, True)),
    "poisson": lambda g: torch.poisson(g.x.detach()),
    **each(Tensor, "normal_ uniform_ exponential_ cauchy_ log_normal_ bernoulli_",
           lambda f, g: f(torch.empty_like(g.x))),
    "geometric_": lambda g: torch.empty_like(g.x).geometric_(0.5),
}  # fmt: skip
SPECIAL: dict[str, Line] = {
    "numel": lambda g: g.x * g.x.numel(),
    "nelement": lambda g: g.x * g.x.nelement(),
    "element_size": lambda g: g.x * g.x.element_size(),
    "is_contiguous": lambda g: g.x * g.x.is_contiguous(),
    "sizes": lambda g: g.x * g.x.shape[0] * g.x.shape[2] * g.x.dim() * g.x.stride(-1),
}
_ONE = words("""
    abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round
    rsqrt sigmoid sign sin sinh sqrt tan tanh trunc
""")
_TWO = words("add sub mul div maximum minimum clamp_max clamp_min pow")


def _lists(name: str, operands: int) -> Line:
    f, in_place = getattr(torch, "_foreach_" + name), getattr(torch, f"_foreach_{name}_")

    def line(g: Given) -> Any:
        a, b = [g.x, g.v], [[g.y, g.v + 1]] * (operands - 1)
        return [*f(a, *b), *_written(in_place, [g.x * 1, g.v * 1], *b)]

    return line


FOREACH: dict[str, Line] = {
    **{name: _lists(name, 1) for name in _ONE},
    **{name: _lists(name, 2) for name in _TWO},
    **{name: _lists(name, 3) for name in ("addcdiv", "addcmul")},
    "lerp": lambda g: torch._foreach_lerp([g.x, g.v], [g.y, g.v], 0.3),
    "lerp_": lambda g: _written(torch._foreach_lerp_, [g.x * 1, g.v * 1], [g.y, g.v], 0.3),
    "copy_": lambda g: _written(torch._foreach_copy_, [g.n * 1, g.i * 1], [g.n + 1, g.i + 1]),
    "zero_": lambda g: _written(torch._foreach_zero_, [g.x * 1, g.v * 1]),
    "norm": lambda g: torch._foreach_norm([g.x, g.v]),
}  # fmt: skip
# without gradients, since a joint graph draws other numbers; and what data gives its size
DATA: dict[str, Line] = {
    "nonzero": lambda g: g.m.nonzero(),
    "argwhere": lambda g: torch.argwhere(g.m),
    "unique": lambda g: g.n.unique(),
    "gumbel_softmax": lambda g: (
        F.gumbel_softmax(g.x.detach(), dim=R),
        F.gumbel_softmax(g.x.detach()),
    ),
    "unique_consecutive": lambda g: torch.unique_consecutive(g.n),
}
# what torch compiles for no tensor, or anew for every size
AS_DENSE: dict[str, Line] = {
    "polygamma_": lambda g: (g.x * 1).polygamma_(1),
    "hash_tensor": lambda g: torch.hash_tensor(g.x, LAST),
    "allclose": lambda g: g.x + torch.allclose(g.x, g.y),
    "equal": lambda g: g.x + torch.equal(g.x, g.y),
    "gaussian_nll_loss": lambda g: F.gaussian_nll_loss(g.x, g.y, g.x + 1),
    "is_same_size": lambda g: g.x * g.x.is_same_size(g.y),
    "random_": lambda g: torch.empty_like(g.x).random_(),
    "sgn": lambda g: torch.sgn(g.x),
    "sgn_": lambda g: (g.x * 1).sgn_(),
    "_foreach_max": lambda g: torch._foreach_max([g.x, g.v]),
}
GROUPS: dict[str, dict[str, Line]] = {
    "unary": {name: _unary(name) for name in UNARY},
    "binary": {name: _binary(name) for name in BINARY},
    "integers": {name: _integers(name) for name in OF_INTEGERS},
    "in place": {name: _unary(name) for name in IN_PLACE},
    "binary in place": {name: _binary(name) for name in IN_PLACE_BINARY},
    "polynomials": {name: _polynomial(name) for name in POLYNOMIALS},
    "pointwise": POINTWISE, "reductions": REDUCTIONS, "along": ALONG, "views": VIEWS, "joins": JOINS,
    "indexing": INDEXING, "lists": FOREACH, "layers": LAYERS, "losses": LOSSES, "random": RANDOM, "data": DATA, "special": SPECIAL,
}  # fmt: skip


# ---- the test -------------------------------------------------------------------------------------------------------
BATCHES = [[3, 5, 2], [4, 7, 2, 9], [6, 5]]


def tensors(outs: Any) -> Iterator[Tensor]:
    """All tensors of nested lists of results, in order."""
    if isinstance(outs, Tensor):
        yield outs
    elif isinstance(outs, (list, tuple)):
        for out in outs:
            yield from tensors(out)


def plain(x: Tensor) -> Tensor:
    """Rows in use, one component after the other."""
    return torch.cat(x.unbind(), x.ragged_dim - 1) if x.is_nested else x


def run(fn: Callable[[Given], Any], given: Given) -> tuple[list[Tensor], list[Any]]:
    """Results, and gradients of all inputs for a fixed cotangent."""
    torch.manual_seed(0)
    outs = list(tensors(fn(given)))
    ends = [plain(o) for o in outs if o.requires_grad]
    leaves = [t for t in given if t.requires_grad]
    if not ends:
        return outs, []
    torch.manual_seed(1)
    return outs, list(
        torch.autograd.grad(ends, leaves, [torch.randn_like(e) for e in ends], allow_unused=True)
    )


def check(lines: dict[str, Line], make: Callable[[Sequence[int]], Given], most: int = 2) -> None:
    """One graph of all lines against eager, batch after batch."""

    def graph(g: Given) -> list[Any]:
        return [line(g) for line in lines.values()]

    counting = Counting("aot_eager")
    compiled = torch.compile(graph, fullgraph=True, backend=counting)
    for lengths in BATCHES:
        ours, our_grads = run(compiled, make(lengths))
        theirs, their_grads = run(graph, make(lengths))
        assert len(ours) == len(theirs)
        for k, (a, b) in enumerate(zip(ours, theirs)):
            same(a, b, f"result {k}")
        for name, a, b in zip(
            [f for f, t in zip(Given._fields, make(lengths)) if t.requires_grad],
            our_grads,
            their_grads,
        ):
            assert (a is None) == (b is None), f"gradient of {name}: {a} instead of {b}"
            if b is not None:
                assert plain(b).isfinite().all(), f"gradient of {name}: a sample outside the domain"
                same(a, b, f"gradient of {name}")
    assert counting.graphs <= most, f"compiled {counting.graphs} times"


def same(ours: Tensor, theirs: Tensor, where: str) -> None:
    assert type(ours) is type(theirs), f"{where}: {type(ours)}"
    assert ours.dtype is theirs.dtype, f"{where}: {ours.dtype}"
    assert ours.requires_grad == theirs.requires_grad, f"{where}: requires_grad"
    if theirs.is_nested:
        assert ours.ragged_dim == theirs.ragged_dim, where
        assert torch.equal(ours.structure.seqlens, theirs.structure.seqlens), where
    a, b = plain(ours), plain(theirs)
    torch.testing.assert_close(
        a, b, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda m: f"{where}: {m}"
    )


@pytest.mark.parametrize("group", GROUPS)
def test_operators(group: str) -> None:
    lines = GROUPS[group]
    try:
        check(lines, usual)
    except Exception:
        for name, line in lines.items():
            torch.compiler.reset()
            try:
                check({name: line}, usual)
            except Exception as error:
                raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
        raise


@pytest.mark.parametrize("name", AS_DENSE)
def test_what_torch_refuses_for_dense_tensors_too(name: str) -> None:
    """So that a torch that learns one of them is noticed, and ours is asked for it."""

    def dense(lengths: Sequence[int]) -> Given:
        return Given(*(t if type(t) is Tensor else t.values().unsqueeze(0) for t in usual(lengths)))

    with pytest.raises(
        Exception,
        match=r"compiled 3 times|not support|guard on data|non-Tensor|Data dep|custom|skipped",
    ):
        check({name: AS_DENSE[name]}, dense)


OUTSIDE = {
    # numbers and memory, which are the host's
    *words(
        "__array__ __bool__ __complex__ __float__ __index__ __int__ item numpy apply_ map_ map2_ data_ptr is_pinned"
    ),
    *words(
        "is_shared share_memory_ storage untyped_storage storage_offset record_stream pin_memory _pin_memory size"
    ),
    *words("resize_ resize_as_ set_"),
    # what torch calls below the operators of the lines
    *words(
        "_has_same_storage_numel _nested_sum_backward _nested_tensor_size _nested_tensor_storage_offsets"
    ),
    *words(
        "_nested_tensor_strides _nested_view_from_buffer _reshape_alias is_non_overlapping_and_dense"
    ),
    *words("mish_backward normal_functional sym_numel sym_size sym_storage_offset"),
    # other names of what a line calls
    *words("__matmul__ __rmatmul__ nelement real imag"),
    # refused for every nested tensor
    *words("flipud msort t_"),
    # unknown to Dynamo, or to some versions of torch
    *words("_foreach_clone _foreach_mm _foreach_powsum"),
}


def test_every_operator_has_a_line() -> None:
    called: set[str] = set()

    class Calls(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.add(_base(func))
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.add(_base(func))
            return func(*args, **(kwargs or {}))

    with Calls(), Operators():
        for lines in (*GROUPS.values(), AS_DENSE):
            for line in lines.values():
                run(line, usual([3, 5, 2]))
    declared = {o.split(".")[1] for o, _ in table() if o.startswith("aten.")}
    declared |= {_base(f) for f in registry.FUNCTIONS}
    assert sorted(declared - called - OUTSIDE) == []


def _base(func: Any) -> str:
    return getattr(func, "_opname", getattr(func, "__name__", str(func)))
