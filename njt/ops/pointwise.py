"""Pointwise operators: by their tag, with a line only for what torch forgot to tag."""

from __future__ import annotations

import torch

from njt.registry import declare, declare_tag
from njt.rules.pointwise import Pointwise

aten = torch.ops.aten

declare_tag(torch.Tag.pointwise, Pointwise())

declare(aten.fill_.Scalar, Pointwise())
declare(aten.fill_.Tensor, Pointwise())
declare(aten.zero_.default, Pointwise())
