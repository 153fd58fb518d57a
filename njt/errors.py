"""Every message of the package, phrased alike: what came, what was expected, what to do.

Functions return the exception; the caller raises it, before anything is written. Imports nothing of njt:
arguments are tensors and structures, looked at only here, when the text is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Undeclared(NotImplementedError):
    """An operator that no rule covers arrived; carries the overload for the fallback."""

    def __init__(self, func: Any) -> None:
        self.func = func
        name = func.name().removeprefix("aten::")
        super().__init__(
            f"{name}(): no rule for nested tensors. Expected one of the operators that "
            f"`python -m njt.ops` lists. Declare {name!r} in a family file of njt/ops with a rule of "
            f"njt/rules, or call it on the components: [f(c) for c in x.unbind()]."
        )


class SizesAsNumbers(Undeclared):
    """C++ code asked for sizes or strides, of which one is no number."""

    def __init__(self, func: Any) -> None:
        super().__init__(func)
        name = func.name().removeprefix("aten::")
        self.args = (
            f"{name}(): got a nested tensor where sizes have to be numbers, as in TorchScript. Expected "
            f"a dense tensor. Call the function without torch.jit.script, or with torch.compile.",
        )


def _lengths_text(lengths: Sequence[int]) -> str:
    shown = ", ".join(str(n) for n in lengths[:12])
    return f"[{shown}{', ...' if len(lengths) > 12 else ''}]"


def describe(x: Any) -> str:
    """A tensor as a user knows it: kind and shape; other things as they print, if that is short."""
    if not isinstance(x, Tensor):
        text = repr(x)
        return text if len(text) <= 40 else f"an object of type {type(x).__name__}"
    if x.is_nested and not hasattr(x, "ragged_dim"):
        return "a nested tensor of torch's own class"
    shape = ", ".join(str(s) for s in x.shape)
    return f"{'nested' if x.is_nested else 'dense'} ({shape})"


def different_structures(op: str, a: Any, b: Any) -> RuntimeError:
    """Two nested operands whose lengths differ. `a`, `b`: nested tensors."""
    if a._structure.is_traced or b._structure.is_traced:
        came = f"nested {tuple(a.shape)} and nested {tuple(b.shape)}"
    else:
        came = (
            f"{describe(a)} with lengths {_lengths_text(a._structure.host_lengths())} and "
            f"{describe(b)} with lengths {_lengths_text(b._structure.host_lengths())}"
        )
    return RuntimeError(
        f"{op}(): got {came}. Expected equal lengths, component by component. Build the second from "
        f"the first's offsets, or pad both: njt.to_padded_tensor(x, 0.0)."
    )


def different_ragged_dims(op: str, a: Any, b: Any) -> RuntimeError:
    """Two nested operands that are ragged in different dims."""
    return RuntimeError(
        f"{op}(): got {describe(a)}, ragged in dim {a.ragged_dim}, and {describe(b)}, ragged in dim "
        f"{b.ragged_dim}. Expected the same ragged dim. Transpose one of them."
    )


def not_broadcastable(op: str, x: Any, dense: Tensor, why: str) -> RuntimeError:
    """A dense operand that does not fit a nested one."""
    return RuntimeError(
        f"{op}(): got {describe(x)} and {describe(dense)}: {why}. Expected a shape that broadcasts to "
        f"every component, or (B, ...) with one row per component. Reshape the dense operand, or make "
        f"it nested: njt.nested_tensor_from_jagged(values, x.offsets())."
    )


def no_batch_dim(op: str, x: Any, dim: int) -> RuntimeError:
    """A dim argument that names the batch dim where components can't mix."""
    return RuntimeError(
        f"{op}(): got dim={dim} for {describe(x)}. Expected another dim than the batch dim. Use "
        f"x.unbind(), or njt.to_padded_tensor(x, padding) first."
    )


def no_ragged_dim(op: str, x: Any, dim: int) -> RuntimeError:
    """A dim argument that names the ragged dim where its size must be the same for all."""
    return RuntimeError(
        f"{op}(): got dim={dim}, the ragged dim of {describe(x)}. Expected another dim. Use "
        f"x.unbind(), or njt.to_padded_tensor(x, padding) first."
    )


def unsupported(op: str, came: str, expected: str, advice: str) -> NotImplementedError:
    """Something dense torch has and njt lacks."""
    return NotImplementedError(f"{op}(): got {came}. Expected {expected}. {advice}")


def for_njt_export() -> NotImplementedError:
    """A nested tensor as an input of torch's own export, or inside."""
    return unsupported(
        "torch.export.export",
        "a nested tensor",
        "plain tensors",
        "Call njt.export(module, args), which writes nested tensors as their values and offsets.",
    )


def no_jit_trace() -> NotImplementedError:
    """A nested tensor in a trace of TorchScript, which would hold its lengths as constants."""
    return unsupported(
        "torch.jit.trace",
        "a nested tensor",
        "plain tensors",
        "Call njt.export(module, args), or torch.compile.",
    )


def bad_shape(op: str, came: str, expected: str, advice: str) -> RuntimeError:
    """A shape mistake, dense torch's RuntimeError."""
    return RuntimeError(f"{op}(): got {came}. Expected {expected}. {advice}")


def bad_value(op: str, came: str, expected: str, advice: str) -> ValueError:
    """An argument whose value can't be."""
    return ValueError(f"{op}(): got {came}. Expected {expected}. {advice}")


def bad_type(op: str, came: str, expected: str, advice: str) -> TypeError:
    """An argument of the wrong type."""
    return TypeError(f"{op}(): got {came}. Expected {expected}. {advice}")
