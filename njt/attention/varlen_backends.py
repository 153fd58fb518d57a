"""The table of attention backends: what each one takes, and its forward, backward and fake.

The first row whose conditions hold is used; `force` picks one by name. A backend's forward gives
(out, logsumexp) or (out, logsumexp, seed, seed_offset); its backward takes them back.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from njt import errors
from njt.attention import varlen_cpu, varlen_cuda
from njt.attention.varlen_call import Call


class Request(NamedTuple):
    """What the conditions may ask about: nothing that needs a look at the device's data."""

    device: torch.device
    dtype: torch.dtype
    fits_flash: bool  # both head sizes are at most 256
    top_left: bool  # causal, and the lengths of queries and keys may differ
    dropout: bool
    short: bool  # many rows, bounds are known numbers up to 256, head sizes are at most 64


@dataclass(frozen=True)
class Backend:
    """One row of the table. `takes` lists its conditions by name, to explain a refusal."""

    name: str
    takes: dict[str, Callable[[Request], bool]]
    forward: Callable[[Tensor, Tensor, Tensor, Call, bool], tuple[Tensor, ...]] | None
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]] | None
    state: Callable[[Tensor, Call], tuple[Tensor, ...]] | None  # shapes of logsumexp and seeds
    multiple: int = 1  # the head size is padded to a multiple of this
    default: bool = True  # else used only where it is forced

    def refusal(self, request: Request) -> str | None:
        """The first condition that does not hold, or None."""
        return next((name for name, holds in self.takes.items() if not holds(request)), None)


def _triton(name: str) -> Callable[..., Any]:
    """A function of `varlen_triton`, which is imported when it is first called."""

    def run(*args: Any) -> Any:
        module = importlib.import_module("njt.attention.varlen_triton")
        return getattr(module, name)(*args)

    return run


_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HALF = (torch.bfloat16, torch.float16)

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_TRITON_TAKES: dict[str, Callable[[Request], bool]] = {
    "Triton installed": lambda r: _HAS_TRITON,
    "a head size up to 256": lambda r: r.fits_flash,
    "32 bits or fewer": lambda r: r.dtype in (torch.float32, *_HALF),
    "no dropout": lambda r: not r.dropout,
}

BACKENDS = (
    Backend(
        "flash_cpu",
        {
            "on CPU": lambda r: r.device.type == "cpu",
            "a floating dtype": lambda r: r.dtype in _FLOATS,
            "no dropout": lambda r: not r.dropout,
            "flash enabled": lambda r: torch.backends.cuda.flash_sdp_enabled(),
        },
        varlen_cpu.forward,
        varlen_cpu.backward,
        varlen_cpu.state,
    ),
    # measured on an H200, bf16: 1.3 to 2.5 times flash for head size 64 at lengths up to 256
    Backend(
        "triton_short",
        {
            "on CUDA": lambda r: r.device.type == "cuda",
            "short sequences": lambda r: r.short,
            **_TRITON_TAKES,
        },
        _triton("forward"),
        _triton("backward"),
        lambda query, call: varlen_cuda.flash_state(query, call)[:1],
    ),
    Backend(
        "flash",
        {
            "on CUDA": lambda r: r.device.type == "cuda",
            "half precision": lambda r: r.dtype in _HALF,
            "head size up to 256": lambda r: r.fits_flash,
            "equal lengths if causal": lambda r: not r.top_left,
            "flash enabled": lambda r: torch.backends.cuda.flash_sdp_enabled(),
            "a GPU that has it": lambda r: varlen_cuda.has_flash(r.device),
        },
        varlen_cuda.flash_forward,
        varlen_cuda.flash_backward,
        varlen_cuda.flash_state,
        multiple=8,
    ),
    Backend(
        "efficient",
        {
            "on CUDA": lambda r: r.device.type == "cuda",
            "32 bits or fewer": lambda r: r.dtype in (torch.float32, *_HALF),
            "efficient enabled": lambda r: torch.backends.cuda.mem_efficient_sdp_enabled(),
        },
        varlen_cuda.efficient_forward,
        varlen_cuda.efficient_backward,
        varlen_cuda.efficient_state,
        multiple=8,
    ),
    Backend(
        "triton",
        _TRITON_TAKES,
        _triton("forward"),
        _triton("backward"),
        lambda query, call: varlen_cuda.flash_state(query, call)[:1],
        default=False,  # flash is as fast for long sequences and faster for head size 128
    ),
    Backend("math", {}, None, None, None),
)
_BY_NAME = {backend.name: backend for backend in BACKENDS}
_forced: list[str] = []


@contextmanager
def force(name: str) -> Iterator[None]:
    """Within the context every call uses the backend `name`, or is refused with the reason."""
    if name not in _BY_NAME:
        names = f"one of {', '.join(_BY_NAME)}"
        raise errors.bad_value("force", repr(name), names, "Look at njt.attention.varlen_backends.")
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


# a tracer keeps the name, and doesn't look into torch's switches
@torch.compiler.assume_constant_result
def choose(
    device: torch.device,
    dtype: torch.dtype,
    fits_flash: bool,
    top_left: bool,
    dropout: bool,
    short: bool = False,
) -> str:
    """Name of the first backend that takes such a call; the arguments are those of `Request`."""
    request = Request(device, dtype, fits_flash, top_left, dropout, short)
    if _forced:
        reason = _BY_NAME[_forced[-1]].refusal(request)
        if reason is None:
            return _forced[-1]
        raise errors.bad_shape(
            "scaled_dot_product_attention",
            f"a call for the forced backend {_forced[-1]!r}",
            reason,
            "Force another backend, or leave the choice to the table.",
        )
    for backend in BACKENDS:
        if backend.default and backend.refusal(request) is None:
            return backend.name
    raise AssertionError("the last backend takes everything")


def padded_width(name: str, width: int) -> int:
    """The head size that the backend is called with."""
    multiple = _BY_NAME[name].multiple
    return width if multiple == 1 else -(-width // multiple) * multiple


def forward(
    query: Tensor, key: Tensor, value: Tensor, call: Call, keep: bool = True
) -> tuple[Tensor, ...]:
    """Runs the chosen backend; only if told to `keep` need all but the output be right."""
    run = _BY_NAME[call.backend].forward
    assert run is not None
    return run(query, key, value, call, keep)


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: object
) -> tuple[Tensor, ...]:
    """Runs the backward of the backend that ran the forward. rest: out, logsumexp, seeds, call."""
    *state, call = rest
    assert isinstance(call, Call)
    run = _BY_NAME[call.backend].backward
    assert run is not None
    return run(grad_out, query, key, value, *state, call)


def no_seeds(query: Tensor) -> tuple[Tensor, Tensor]:
    """Stand-ins where a backend draws no random numbers."""
    return query.new_empty(0, dtype=torch.int64), query.new_empty(0, dtype=torch.int64)


def fake_forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, ...]:
    """Shapes of the forward's results, each from nothing but shapes."""
    state = _BY_NAME[call.backend].state
    assert state is not None
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    kept = state(query, call)
    return out, *kept, *(() if len(kept) == 3 else no_seeds(query))
