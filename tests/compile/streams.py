"""A function, compiled once and fed batch after batch, must give what eager gives, and not be compiled again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

import njt
from njt.structure import Structure

# other numbers of components, totals, longest and shortest lengths
BATCHES = [[3, 5, 2], [4, 7, 2, 9], [6, 6], [1, 1, 2]]


def offsets(lengths: Sequence[int]) -> Tensor:
    """(B + 1,) for these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0)


def nested(lengths: Sequence[int], *features: int, requires_grad: bool = False) -> njt.NestedTensor:
    """A leaf with its bounds known; 8 features unless told."""
    values = torch.randn(sum(lengths), *(features or (8,)))
    x = njt.nested_tensor_from_jagged(values, offsets(lengths)).detach()
    return x.requires_grad_(requires_grad)


def unbounded(lengths: Sequence[int], requires_grad: bool = False) -> njt.NestedTensor:
    """A leaf whose bounds nobody has read yet, as from offsets on a GPU."""
    values = torch.randn(sum(lengths), 8)
    x = njt.NestedTensor(values, Structure.find(offsets(lengths)))
    assert not x._metadata_cache
    return x.requires_grad_(requires_grad)


def gappy(lengths: Sequence[int], requires_grad: bool = False) -> njt.NestedTensor:
    """A leaf with a row of NaN behind each component."""
    starts = offsets([n + 1 for n in lengths])
    values = torch.randn(int(starts[-1]), 8)
    values[starts[1:] - 1] = torch.nan
    x = njt.nested_tensor_from_jagged(values, starts, torch.tensor(list(lengths))).detach()
    return x.requires_grad_(requires_grad)


def rows(x: Any) -> Any:
    """What two results are compared by: rows in use."""
    if not isinstance(x, njt.NestedTensor):
        return x
    return torch.cat(x.unbind(), x.ragged_dim - 1)


class Counting:
    """A backend that counts its graphs."""

    def __init__(self, backend: str) -> None:
        self.backend = torch._dynamo.lookup_backend(backend)
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return self.backend(graph, inputs)


def check_stream(
    fn: Callable[..., Any],
    make: Callable[[Sequence[int]], Sequence[Any]],
    *,
    batches: Sequence[Sequence[int]] = BATCHES,
    most: int = 2,
    parameters: Sequence[Tensor] = (),
    backend: str = "aot_eager",
    **options: Any,
) -> None:
    """Compares `fn(*make(lengths))` compiled and eager, batch after batch.

    Args:
        most: how many compilations the stream may take; after them a new one is an error.
        parameters: of `fn`, whose gradients are compared along with those of the inputs.
    """
    counting = Counting(backend)
    compiled = torch.compile(fn, fullgraph=True, backend=counting, **options)
    for lengths in batches:
        inputs = make(lengths)
        enough = counting.graphs >= most
        with torch._dynamo.config.patch(error_on_recompile=enough):
            ours = compiled(*inputs)
        theirs = fn(*inputs)
        assert type(ours) is type(theirs)
        if not isinstance(theirs, Tensor):
            assert ours == theirs
            continue
        if isinstance(theirs, njt.NestedTensor):
            assert ours.ragged_dim == theirs.ragged_dim
            _check_structure(ours, theirs, inputs)
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(rows(ours), rows(theirs), rtol=1e-4, atol=1e-5)
        _check_gradients(ours, theirs, [*inputs, *parameters])
    assert counting.graphs <= most


def _check_structure(ours: Any, theirs: Any, inputs: Sequence[Any]) -> None:
    """Row M1: shared where eager shares, known where eager knows."""
    given = [x for x in inputs if isinstance(x, njt.NestedTensor)]
    if any(theirs.offsets() is x.offsets() for x in given):
        assert ours.structure is theirs.structure
    elif given:
        assert ours._metadata_cache == theirs._metadata_cache


def _check_gradients(ours: Tensor, theirs: Tensor, inputs: Sequence[Any]) -> None:
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    assert ours.requires_grad == theirs.requires_grad
    if not ours.requires_grad:
        return
    torch.manual_seed(1)
    cotangent = torch.randn_like(rows(theirs))
    found = [
        torch.autograd.grad(rows(out), leaves, cotangent, allow_unused=True)
        for out in (ours, theirs)
    ]
    for a, b in zip(*found):
        assert type(a) is type(b)
        if b is not None:
            torch.testing.assert_close(rows(a), rows(b), rtol=1e-3, atol=1e-4)
