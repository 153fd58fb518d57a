"""Splitting features into pieces: one dense split of the values, each piece a view with the same structure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from njt import bridge, dims, errors
from njt.registry import declare_named


class Split:
    """`f(x, how, dim=0)` that cuts one feature dim into views.

    Batch dim and ragged dim: refused. Gaps: stay. Ragged dim elsewhere than 1: any.
    """

    def __init__(self, dense: Callable[..., Any], *aliases: str) -> None:
        self.dense = dense
        self.aliases = aliases

    def __call__(self, x: Any, how: Any = None, dim: int = 0, **named: Any) -> Any:
        for name in self.aliases:
            how = named.pop(name, how)
        dim = dims.canonical(dim, x.dim())
        name = self.dense.__name__
        if dim == 0:
            raise errors.no_batch_dim(name, x, 0)
        if dim == x._ragged_dim:
            raise errors.no_ragged_dim(name, x, dim)
        pieces = self.dense(bridge.values(x), how, dim=dim - 1)
        return tuple(bridge.nested_view(p, x._structure, x._ragged_dim, x) for p in pieces)


declare_named("chunk", Split(torch.chunk, "chunks"))
declare_named("split", Split(torch.split, "split_size", "split_size_or_sections", "split_sizes"))
declare_named("split_with_sizes", Split(torch.split_with_sizes, "split_sizes"))
declare_named("tensor_split", Split(torch.tensor_split, "indices_or_sections", "indices", "sections"))

