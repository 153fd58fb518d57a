"""Fresh memory for large results: in huge pages where Linux lends them, so that first writes cost little.

A result of 32 MiB and more comes from the system page by page, and in pages of 4 KiB the faults cost more than
the copy. The memory is an ordinary torch allocation in every way (freed, resized, shared, pickled as ever); the
system is only told, for this range, that large pages are welcome. Users' own tensors are never touched.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# from here on glibc takes memory from the system for each allocation, and gives it back when it is freed
LEAST_BYTES = 32 << 20
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE_PAGE = 14  # MADV_HUGEPAGE, the same number on every Linux
_PAGE = 4096

_state = {"on": os.environ.get("NJT_HUGE_PAGES", "1") != "0"}


def use_huge_pages(on: bool) -> bool:
    """Switches huge pages for large results on or off; the environment variable NJT_HUGE_PAGES=0 starts with off.

    Returns:
        What the switch was.

    >>> before = use_huge_pages(False)
    >>> use_huge_pages(before)
    False
    """
    before, _state["on"] = _state["on"], on
    return before


def empty(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """torch.empty on CPU; a large one asks for huge pages, and is as good without them."""
    fresh = torch.empty(size, dtype=dtype, device="cpu")
    if math.prod(size) * dtype.itemsize >= LEAST_BYTES and _state["on"] and _ADVISE is not None:
        begin = -(-fresh.data_ptr() // _PAGE) * _PAGE
        end = (fresh.data_ptr() + fresh.nbytes) // _PAGE * _PAGE
        _ADVISE(begin, end - begin, _HUGE_PAGE)  # advice: a refusal changes nothing
    return fresh


def zeros(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """torch.zeros, in such memory."""
    if math.prod(size) * dtype.itemsize < LEAST_BYTES:
        return torch.zeros(size, dtype=dtype, device="cpu")
    return empty(size, dtype).zero_()


def _advise(platform: str, setting: Path) -> Callable[..., Any] | None:
    """The system's `madvise`, or None where it would not lead to huge pages."""
    if platform != "linux":
        return None
    try:
        if "[never]" in setting.read_text():
            return None
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise  # type: ignore[no-any-return]


_ADVISE = _advise(sys.platform, _SETTING)
