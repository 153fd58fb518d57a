"""Launches of Triton kernels without asking Triton at each call what the kernel was compiled for.

Triton looks at every argument of every launch: 20-40 us. A kernel whose run-time arguments are all exempt from
specialization is the same binary whatever their numbers, so it is found here by what it was compiled for.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
from torch import Tensor

# versions whose compiled kernels take all arguments in order, constants too; others go Triton's own way
_DIRECT = triton.__version__.startswith(("3.6.", "3.7."))


class Launcher:
    """A kernel(*pointers, *numbers, *constants), none of whose pointers and numbers are specialized."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self,
        programs: int,
        memory: tuple[Tensor, ...],
        index: tuple[Tensor, ...],
        numbers: tuple[int, ...],
        constants: tuple[Any, ...],
    ) -> None:
        """Launches on the device of the tensors; the kernel takes `memory` as bytes and `index` by its dtype."""
        device = memory[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(programs, memory, index, numbers, constants)
        key = (device.index, constants, *[x.dtype for x in index])
        compiled = self._compiled.get(key)
        if compiled is not None:
            pointers = [x.data_ptr() for x in (*memory, *index)]
            compiled[(programs, 1, 1)](*pointers, *numbers, *constants)
            return None
        raw = [x.view(-1).view(torch.uint8) for x in memory]
        made = self.kernel[(programs,)](*raw, *index, *numbers, *constants)
        if _DIRECT and made is not None:  # None: Triton's interpreter
            self._compiled[key] = made
        return None
