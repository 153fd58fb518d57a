"""The operator families; importing them fills the tables of `njt.registry`."""

from njt.ops import (
    creation,
    indexing,
    linear,
    metadata,
    normalization,
    padding,
    pointwise,
    reductions,
    softmax,
    splitting,
    views,
)

__all__ = [
    "creation",
    "indexing",
    "linear",
    "metadata",
    "normalization",
    "padding",
    "pointwise",
    "reductions",
    "softmax",
    "splitting",
    "views",
]
