"""What one attention call is, apart from its three tensors.

The order of the fields is the order of the operator's arguments.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Call(NamedTuple):
    """Offsets (B + 1,), lengths (B,) or None, bounds, and how the weights are made."""

    q_offsets: Tensor
    k_offsets: Tensor
    q_lengths: Tensor | None
    k_lengths: Tensor | None
    max_q: int
    max_k: int
    is_causal: bool
    scale: float
    dropout_p: float
    backend: str
