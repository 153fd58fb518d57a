"""Integers that users pass: lengths, bounds, totals and dims; neither truth values nor numbers that would be cut.

May import errors only.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
from torch import Tensor

from njt import errors

DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def integer(op: str, name: str, value: Any) -> Any:
    """`value` as a number, or as the symbol of a trace that it is.

    Args:
        value: anything that stands for an integer: NumPy's as well, or a tensor of one (read from its device).
    Raises:
        TypeError: another type: a bool, a float, None.
    """
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    if isinstance(value, Tensor):
        if value.dim() == 0 and value.dtype in DTYPES:
            return value.item()
    elif not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise errors.bad_type(
        op, f"{name}={errors.describe(value)}", "an integer", "Pass a number: int(x)."
    )


def integers(op: str, name: str, values: Any) -> list[Any]:
    """A list of them, or of anything that `integer` takes.

    Raises:
        TypeError: no list, or an entry of another type.
    """
    try:
        entries = list(values)
    except TypeError:
        raise errors.bad_type(
            op,
            f"{name} of type {type(values).__name__}",
            "a list of integers",
            "Pass one for each component, or dim.",
        ) from None
    return [integer(op, f"{name}[{i}]", n) for i, n in enumerate(entries)]
