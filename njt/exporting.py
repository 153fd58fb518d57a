"""Programs for `torch.export`: what is nested inside a module becomes operators on its values, offsets and bounds.

torch.export itself does not take a graph with nested tensors in it: its tracers refuse them as inputs and
inside. May import everything but drop_in and testing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from njt import _compat, errors

__all__ = ["export"]


def export(
    module: nn.Module,
    args: tuple[Any, ...],
    *,
    dynamic_shapes: Any = None,
    strict: bool = False,
) -> torch.export.ExportedProgram:
    """Exports a module that builds nested tensors from dense ones, for inference.

    Args:
        module: takes values and offsets (or padded tensors and lengths) and returns dense tensors, such
            as `x.values()`; nested tensors are made inside.
        args: example inputs, dense tensors; more than one component and row, so that no size is 0 or 1.
        dynamic_shapes: as for `torch.export.export`, in the order of `args`, as a tuple.
        strict: as for `torch.export.export`.
    Returns:
        a program on plain tensors, to run, save, or package with AOTInductor.
    Raises:
        TypeError: an argument is nested.

    >>> class Double(torch.nn.Module):
    ...     def forward(self, values, offsets):
    ...         return (njt.nested_tensor_from_jagged(values, offsets) * 2).values()
    >>> program = njt.export(Double(), (torch.ones(5, 2), torch.tensor([0, 2, 5])))
    >>> program.module()(torch.ones(5, 2), torch.tensor([0, 2, 5])).sum()
    tensor(20.)
    """
    for a in args:
        if isinstance(a, Tensor) and a.is_nested:
            raise errors.bad_type(
                "export",
                errors.describe(a),
                "dense arguments",
                "Pass x.values() and x.offsets(), and make it nested inside the module.",
            )
    with torch.no_grad():
        graph = _compat.flat_graph(module, args)
        return torch.export.export(graph, args, dynamic_shapes=dynamic_shapes, strict=strict)
