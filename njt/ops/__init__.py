"""The operator families; importing them fills the tables of `njt.registry`."""

from njt.ops import (
    creation,
    indexing,
    linear,
    losses,
    masked,
    metadata,
    normalization,
    norms,
    padding,
    pointwise,
    reductions,
    scans,
    softmax,
    sorting,
    splitting,
    views,
)

__all__ = [
    "creation",
    "indexing",
    "linear",
    "losses",
    "masked",
    "metadata",
    "normalization",
    "norms",
    "padding",
    "pointwise",
    "reductions",
    "scans",
    "softmax",
    "sorting",
    "splitting",
    "views",
]
