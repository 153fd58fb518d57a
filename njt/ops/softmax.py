"""Softmax family."""

from __future__ import annotations

import torch

from njt.kernels import segments
from njt.registry import declare_named
from njt.rules.reduction import DimMapped

declare_named("softmax", DimMapped(torch.softmax, segments.softmax))
declare_named("log_softmax", DimMapped(torch.log_softmax, segments.log_softmax))
