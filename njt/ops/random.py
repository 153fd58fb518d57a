"""Random numbers written in place, where gap rows are left as they are, in-place dropout, and drawing by weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from njt import _compat, bridge, errors
from njt._compat import OpOverload
from njt.registry import OPS, declare, declare_function, declare_named, overloads
from njt.rules.reduction import one_node
from njt.tensor import NestedTensor


class Drawn:
    """An in-place filler that never looks at what it overwrites: on the values; with gaps on fresh rows."""

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, rest = args[0], args[1:]
        if not x._structure.has_gaps:
            func(x._values, *rest, **kwargs)
            return x
        d, rows = x._ragged_dim - 1, x._structure.row_index()
        drawn = torch.empty_like(x._values.index_select(d, rows))
        x._values.index_copy_(d, rows, func(drawn, *rest, **kwargs))
        return x


FILLERS = [
    "normal_",
    "uniform_",
    "exponential_",
    "cauchy_",
    "geometric_",
    "log_normal_",
    "random_",
    "bernoulli_",
]
for _name in FILLERS:
    for _overload in overloads(_name):
        if _overload not in OPS and not any(
            str(a.type) == "Tensor" for a in _compat.schema(_overload).arguments[1:]
        ):
            declare(_overload, Drawn())


def dropout_(input: Any, p: float = 0.5, train: bool = True) -> NestedTensor:
    """Multiplies by 0 or 1 / (1 - p), in place."""
    if not train or p == 0:
        return input
    if p == 1:
        return input.mul_(0)
    noise = torch.empty_like(input, requires_grad=False).bernoulli_(1 - p).div_(1 - p)
    return input.mul_(noise)


declare_function(dropout_, torch.dropout_)


def multinomial(
    x: Any, num_samples: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> Tensor:
    """Draws `num_samples` positions of the last dim of each component, by the weights there.

    Batch dim: components draw on their own. Ragged dim: tokens that draw each, or, if last, what is drawn from.
    Gaps: never drawn. Ragged dim elsewhere than 1: as the last.

    Args:
        x: nested weights (B, j1), (B, j1, D) or (B, D, j1), floating.
        num_samples, replacement, generator: as for dense tensors.
    Returns:
        int64: dense (B, num_samples) or (B, D, num_samples), positions inside the component, if the ragged dim is
        the last one; else nested (B, j1, num_samples).
    Raises:
        RuntimeError: a component has fewer positions than are to be drawn, or too many dims.
    """
    if x.dim() > 3:
        raise errors.bad_shape(
            "multinomial", errors.describe(x), "(B, j1), (B, j1, D) or (B, D, j1)", "Flatten it."
        )
    if x._ragged_dim < x.dim() - 1:
        rows = bridge.compact_values(x).detach()
        drawn = torch.multinomial(rows, num_samples, replacement, generator=generator)
        drawn = bridge.spread(drawn, x._structure, x._values.shape[0], 0)
        return bridge.wrap(drawn, x._structure, 1, x)
    structure = x._structure
    least = 1 if replacement else num_samples
    if not structure.is_traced and structure.batch_size and structure.min_seqlen < least:
        raise errors.bad_shape(
            "multinomial",
            f"{num_samples} draws from a component of {structure.min_seqlen}",
            f"at least {least} positions in each",
            "Draw fewer, or leave short components out.",
        )
    weights = x.detach().to_padded_tensor(0.0)
    flat = weights.flatten(0, -2)
    if not flat.shape[0]:
        return torch.empty(*weights.shape[:-1], num_samples, dtype=torch.int64, device=x.device)
    drawn = torch.multinomial(flat, num_samples, replacement, generator=generator)
    drawn = drawn.unflatten(0, weights.shape[:-1])
    # rounding may let torch choose the end of the row, which is padding
    last = structure.seqlens.long() - 1
    return torch.minimum(drawn, last.view(-1, *[1] * (drawn.dim() - 1)))


declare_named("multinomial", one_node("multinomial", multinomial))
