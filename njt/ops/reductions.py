"""Reductions: a line names the dense function and the segment kernel for the ragged dim."""

from __future__ import annotations

import torch

from njt.kernels import segments
from njt.registry import declare_named
from njt.rules.reduction import Reduction

declare_named("sum", Reduction(torch.sum, segments.sum))
declare_named("mean", Reduction(torch.mean, segments.mean))
declare_named("amax", Reduction(torch.amax, segments.amax))
declare_named("amin", Reduction(torch.amin, segments.amin))
