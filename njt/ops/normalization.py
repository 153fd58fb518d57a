"""Norms and dropout over the features of each token."""

from __future__ import annotations

import torch

from njt.registry import declare
from njt.rules.per_token import PerToken

aten = torch.ops.aten

declare(
    aten.native_layer_norm.default, PerToken("normalized_shape", per_token=(True, True, True))
)
declare(
    aten.native_layer_norm_backward.default,
    PerToken("normalized_shape", per_token=(True, False, False), sums=True),
)
declare(aten.native_dropout.default, PerToken(per_token=(True, True)))
declare(aten.native_dropout_backward.default, PerToken())
