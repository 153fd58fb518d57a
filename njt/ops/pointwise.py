"""Pointwise operators: by their tag, with a line only for what torch forgot to tag."""

from __future__ import annotations

from typing import Any

import torch

from njt import dims, errors
from njt._compat import OpOverload
from njt.registry import (
    declare,
    declare_function,
    declare_named,
    declare_tag,
    implements,
    overloads,
)
from njt.rules.pointwise import Pointwise, PointwiseAbove
from njt.rules.reduction import in_place
from njt.tensor import NestedTensor

declare_tag(torch.Tag.pointwise, Pointwise())

UNTAGGED = [
    "__irshift__",
    "_conj",
    "_conj_physical",
    "_neg_view",
    "abs_",
    "complex",
    "copysign_",
    "elu_backward",
    "eq_",
    "fill",
    "fill_",
    "floor_divide",
    "floor_divide_",
    "gcd_",
    "ge_",
    "gelu_",
    "gelu_backward",
    "gt_",
    "hardshrink_backward",
    "hardsigmoid_backward",
    "hardswish",
    "hardswish_",
    "hardswish_backward",
    "hardtanh_backward",
    "heaviside_",
    "lcm_",
    "le_",
    "leaky_relu_backward",
    "log_sigmoid_backward",
    "log_sigmoid_forward",
    "logit_backward",
    "lt_",
    "masked_fill",
    "masked_fill_",
    "mish_",
    "mish_backward",
    "nan_to_num",
    "ne_",
    "polar",
    "rsub",
    "sigmoid_backward",
    "silu_backward",
    "softplus_backward",
    "softshrink_backward",
    "tanh_backward",
    "threshold_",
    "threshold_backward",
    "xlogy_",
    "zero",
    "zero_",
]
for _name in UNTAGGED:
    for _overload in overloads(_name):
        if torch.Tag.pointwise not in _overload.tags:
            declare(_overload, Pointwise())


@implements(torch.ops.aten.bucketize.Tensor)
def _bucketize(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NestedTensor:
    # the boundaries are one list for all elements; of values in another order torch makes a copy, and warns
    x, boundaries = args[:2]
    if isinstance(boundaries, NestedTensor):
        raise errors.bad_type(
            "bucketize", f"boundaries {errors.describe(boundaries)}", "a dense vector", "Pass one."
        )
    return x.with_values(func(x._values.contiguous(), *args[1:], **kwargs))


# torch's derivatives of these make dense zeros of the operand's sizes, or know no complex nested views
for _function in (torch.complex, torch.copysign, torch.nextafter, torch.sgn):
    declare_named(_function.__name__, PointwiseAbove(_function), aten=())
declare_function(PointwiseAbove(torch.polar), torch.polar)  # torch.linalg.polar decomposes a matrix
for _function in (torch.copysign, torch.nextafter, torch.sgn):
    _name = _function.__name__ + "_"
    declare_named(_name, in_place(_name, PointwiseAbove(_function)), aten=())


@implements(torch.ops.aten._nested_sum_backward.default)
def _nested_sum_backward(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NestedTensor:
    # torch's own sums of broadcast gradients end here when they are differentiated once more
    grad, x, dim, keepdim = (*args, None, False)[:4]
    if not keepdim:
        for d in sorted(dims.canonical_all(dim, x.dim())):
            grad = grad.unsqueeze(d)
    return Pointwise()(
        torch.ops.aten.add.Tensor, (x.with_values(torch.zeros_like(x._values)), grad), {}
    )
