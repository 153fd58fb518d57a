"""The padding value: which numbers a dtype holds, and the bytes of one as an element.

Asked once a call, before anything is written: copies of all kinds get a number that their dtype holds, so that none
rounds, wraps or overflows in a way of its own.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from njt import errors

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NUMBERS = (bool, int, float, complex)
_CPU = torch.device("cpu")


class _Unfit(NamedTuple):
    """A number that the dtype does not hold."""

    expected: str
    advice: str


def checked(op: str, padding: Any, dtype: torch.dtype) -> Any:
    """The padding value as a Python number of the kind that `dtype` holds.

    Args:
        op: what the user called.
        padding: a number, or a tensor or NumPy scalar that holds one; a symbol of a trace is believed.
        dtype: of the rectangle. Floating dtypes round as ever; nonzero is True for bool.
    Raises:
        TypeError: no number, or one that requires grad.
        RuntimeError: an integer dtype that does not hold the number exactly; a size that `dtype` can't reach; a
            complex number for a real dtype.
    """
    if isinstance(padding, _SYMBOLS):
        return padding
    if not isinstance(padding, _NUMBERS):
        padding = _number_of(op, padding)
    # by its text as well: -0.0 and 0.0 are equal, and other bits
    number = _fitted(repr(padding), padding, dtype)
    if isinstance(number, _Unfit):
        raise errors.bad_shape(op, f"padding {padding!r} for {dtype}", *number)
    return number


def _number_of(op: str, padding: Any) -> Any:
    if isinstance(padding, Tensor) and padding.requires_grad:
        raise errors.bad_type(
            op, "padding that requires grad", "a number", "Filler has no gradient: padding.item()."
        )
    single = hasattr(padding, "item") and getattr(padding, "shape", None) == ()
    number = padding.item() if single else None
    if not isinstance(number, (*_NUMBERS, *_SYMBOLS)):
        raise errors.bad_type(
            op,
            f"padding of type {type(padding).__name__}",
            "a number",
            "Pass a filler such as 0.0.",
        )
    return number


@functools.lru_cache(256)
def _fitted(text: str, padding: complex, dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return bool(padding)
    if isinstance(padding, complex) and not dtype.is_complex:
        if padding.imag != 0:
            return _Unfit("a real number", "Pass padding.real, or make the tensor complex.")
        padding = padding.real
    if dtype.is_floating_point or dtype.is_complex:
        return _floating(padding, dtype)
    return _integer(padding, dtype)  # type: ignore[arg-type]


def _integer(padding: float, dtype: torch.dtype) -> int | _Unfit:
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if not math.isfinite(padding) or padding != int(padding) or not low <= padding <= high:
        return _Unfit(
            f"an integer in {low}..{high}", "Pass one, or convert the tensor: x.to(torch.float32)."
        )
    return int(padding)


def _floating(padding: complex, dtype: torch.dtype) -> complex | _Unfit:
    most = torch.finfo(dtype).max
    # "fn" in a name: finite numbers and nan only
    endless = "fn" not in str(dtype)
    parts = (padding.real, padding.imag)
    if any(abs(p) > most and not (endless and p in (math.inf, -math.inf)) for p in parts):
        return _Unfit(
            f"at most {most} in size", "Pass a smaller one, or convert the tensor to a wider dtype."
        )
    return padding if isinstance(padding, complex) else float(padding)


def element_bytes(padding: Any, dtype: torch.dtype) -> bytes:
    """A padding value that was checked, as an element of `dtype`, converted as torch converts it."""
    return _element_bytes(repr(padding), padding, dtype)


@functools.lru_cache(256)
def _element_bytes(text: str, padding: Any, dtype: torch.dtype) -> bytes:
    raw: Tensor = torch.full((1,), padding, dtype=dtype, device=_CPU).view(torch.uint8)
    return bytes(raw.tolist())
