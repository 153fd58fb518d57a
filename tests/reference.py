"""The loop oracle: an operator on a nested tensor must be the dense operator on each component.

`check_against_components(fn, x, *others)` asserts it for values, gradients, structure, dtype and device;
`Case` and `grid` turn a list of lines into a test over all structures. Components are cut by hand
(samples.components) and given a batch dim of 1, so that `dim` means the same on both sides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import njt
from tests.samples import STRUCTURES, USUAL, Layout, components, sample

TOLERANCE = {
    torch.float64: (1e-9, 1e-11),
    torch.complex128: (1e-9, 1e-11),
    torch.float32: (1e-4, 1e-5),
    torch.complex64: (1e-4, 1e-5),
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (3e-2, 3e-2),
}


@dataclass(frozen=True)
class PerComponent:
    """A dense operand (B, ..) of which the loop sees row `[i : i + 1]`; other dense operands it sees whole."""

    tensor: Tensor


def check_against_components(
    fn: Callable[..., Any],
    x: Tensor,
    *others: Any,
    join: Callable[[list[Tensor]], Tensor] = torch.cat,
    grad: bool = True,
    gradgrad: bool = False,
    new_structure: bool = False,
    view: bool = False,
    raises: type[Exception] | None = None,
    tolerance: tuple[float, float] | None = None,
    compiled: bool = False,
    backend: str = "aot_eager",
) -> None:
    """Asserts that `fn(x, *others)` is what a loop over the components gives.

    Args:
        fn: takes nested tensors on one side, dense ones (1, n, *) on the other.
        x: nested.
        others: nested (cut alike), PerComponent, dense tensors and anything else (passed whole).
        join: makes the expected dense result of the components' results, (1, *) each.
        grad: compare gradients of all floating operands, with a random cotangent.
        gradgrad: compare gradients of the gradients too (in eager: torch compiles no double backward).
        new_structure: results may have equal lengths without sharing the operand's structure.
        view: results must share memory with `x`.
        raises: what the dense operator raises for some components; then ours must raise it too.
        tolerance: (rtol, atol) for floating results.
        compiled: run ours under torch.compile(fullgraph=True).
        backend: of the compiler.
    """
    operands = [_operand(o, grad) for o in (x, *others)]
    count = x.offsets().shape[0] - 1
    run = torch.compile(fn, fullgraph=True, backend=backend) if compiled else fn
    try:
        wanted = [_flat(fn(*(o.theirs(i) for o in operands))) for i in range(count)]
    except Exception as error:
        if raises is None or not isinstance(error, raises):
            raise
        with pytest.raises(raises):
            run(*(o.ours for o in operands))
        return
    got = _flat(run(*(o.ours for o in operands)))
    assert all(len(w) == len(got) for w in wanted), "another number of results"

    pairs: list[_Pair] = []  # differentiable outcomes, side by side
    for k, out in enumerate(got):
        parts = [w[k] for w in wanted]
        where = f"result {k}" if len(got) > 1 else "result"
        if not isinstance(out, Tensor):
            assert all(type(out) is type(p) and out == p for p in parts), f"{where}: {out}, {parts}"
            continue
        if view:
            same = _storage(_packed(out)) == _storage(operands[0].leaf)
            assert same, f"{where}: no view of the operand"
        if out.is_nested:
            share = not (new_structure or compiled)
            pairs += _check_nested(where, out, parts, operands, tolerance, share)
        else:
            pairs += _check_dense(where, out, parts, join, tolerance)
    if grad and pairs:
        _check_gradients(pairs, operands, gradgrad and not compiled, tolerance)


@dataclass
class _Operand:
    """One operand on both sides; the leaves are independent copies."""

    ours: Any
    theirs: Callable[[int], Any]
    leaf: Tensor | None = None  # ours: values, or the dense tensor
    their_leaves: list[Tensor] = field(default_factory=list)  # one per component, or one
    pieces: Callable[[Tensor], list[Tensor]] = lambda g: [g]  # what of our gradient belongs to each


def _operand(given: Any, grad: bool) -> _Operand:
    tensor = given.tensor if isinstance(given, PerComponent) else given
    if not isinstance(tensor, Tensor):
        return _Operand(given, lambda i: given)
    grad = grad and (tensor.is_floating_point() or tensor.is_complex())
    if tensor.is_nested:
        leaf = _copy(tensor.values().detach()).requires_grad_(grad)
        parts = [c.requires_grad_(grad) for c in components(tensor)]
        return _Operand(
            _over(leaf, tensor),
            lambda i: parts[i].unsqueeze(0),
            leaf,
            parts,
            lambda g: _cut(g, tensor),
        )
    leaf, theirs = (_copy(tensor.detach()).requires_grad_(grad) for _ in range(2))
    if isinstance(given, PerComponent):
        return _Operand(leaf, lambda i: theirs[i : i + 1], leaf, [theirs])
    return _Operand(leaf, lambda i: theirs, leaf, [theirs])


def _copy(x: Tensor) -> Tensor:
    """Same strides, own memory."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _over(values: Tensor, x: Tensor) -> Tensor:
    """A nested tensor over other values with the structure of `x`."""
    return njt.nested_tensor_from_jagged(values, x.offsets(), x.lengths(), jagged_dim=x.ragged_dim)


def _cut(values: Tensor, x: Tensor) -> list[Tensor]:
    """The rows of each component of `x` in a tensor of its values' shape; differentiable."""
    starts, lengths = x.offsets().tolist(), x.lengths()
    sizes = [b - a for a, b in itertools.pairwise(starts)] if lengths is None else lengths.tolist()
    return [values.narrow(x.ragged_dim - 1, a, n) for a, n in zip(starts, sizes)]


def _flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _packed(out: Tensor) -> Tensor:
    return out.values() if out.is_nested else out


def _storage(x: Tensor | None) -> int:
    assert x is not None
    return x.untyped_storage().data_ptr()


@dataclass
class _Pair:
    """A differentiable outcome: ours in one tensor, theirs in parts, and how to cut ours to match."""

    where: str
    ours: Tensor
    theirs: list[Tensor]
    cut: Callable[[Tensor], list[Tensor]]


def _check_nested(
    where: str,
    out: Tensor,
    parts: list[Any],
    operands: Sequence[_Operand],
    tolerance: tuple[float, float] | None,
    share: bool,
) -> list[_Pair]:
    nested = [o.ours for o in operands if isinstance(o.ours, Tensor) and o.ours.is_nested]
    assert type(out) is type(nested[0]), f"{where}: {type(out)}"
    assert out.layout is torch.jagged
    assert out.shape[0] == len(parts), f"{where}: {out.shape[0]} components for {len(parts)}"
    d = out.ragged_dim
    for i, (ours, theirs) in enumerate(zip(components(out), parts)):
        _close(f"{where}, component {i}", ours, theirs.squeeze(0), tolerance)
        fixed = (*out.shape[1:d], *out.shape[d + 1 :])
        assert fixed == (*theirs.shape[1:d], *theirs.shape[d + 1 :]), f"{where}: {out.shape}"
    lengths = [p.shape[d] for p in parts]
    assert out.max_seqlen == max(lengths, default=0), f"{where}: max_seqlen {out.max_seqlen}"
    assert out.min_seqlen == min(lengths, default=0), f"{where}: min_seqlen {out.min_seqlen}"
    same = [n for n in nested if _lengths(n) == lengths]
    if share and same:
        shared = any(n.offsets() is out.offsets() and n.lengths() is out.lengths() for n in same)
        assert shared, f"{where}: a new structure for the lengths of an operand"
    if not _differentiable(where, out, parts):
        return []
    return [_Pair(where, out.values(), [p.squeeze(0) for p in parts], lambda v: _cut(v, out))]


def _check_dense(
    where: str,
    out: Tensor,
    parts: list[Any],
    join: Callable[[list[Tensor]], Tensor],
    tolerance: tuple[float, float] | None,
) -> list[_Pair]:
    if not parts:
        if join is torch.cat:
            assert out.shape[0] == 0, f"{where}: {tuple(out.shape)} for a batch of none"
        return []
    try:
        wanted = join(parts)
    except RuntimeError as error:
        shapes = [tuple(p.shape) for p in parts]
        raise AssertionError(f"{where}: dense, of components {shapes}") from error
    _close(where, out, wanted, tolerance)
    return (
        [_Pair(where, out, [wanted], lambda v: [v])] if _differentiable(where, out, parts) else []
    )


def _lengths(x: Tensor) -> list[int]:
    return [c.shape[x.ragged_dim - 1] for c in components(x)]


def _differentiable(where: str, out: Tensor, parts: list[Tensor]) -> bool:
    if not parts:
        return False
    wanted = any(p.requires_grad for p in parts)
    assert out.requires_grad == wanted, f"{where}: requires_grad is {out.requires_grad}"
    return wanted


def _close(where: str, ours: Tensor, theirs: Tensor, tol: tuple[float, float] | None) -> None:
    assert ours.dtype is theirs.dtype, f"{where}: {ours.dtype}, expected {theirs.dtype}"
    assert ours.device == theirs.device, f"{where}: {ours.device}, expected {theirs.device}"
    assert ours.shape == theirs.shape, f"{where}: {ours.shape}, expected {theirs.shape}"
    rtol, atol = tol or TOLERANCE.get(ours.dtype, (0.0, 0.0))
    torch.testing.assert_close(
        ours, theirs, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{where}: {text}"
    )


def _check_gradients(
    pairs: list[_Pair],
    operands: Sequence[_Operand],
    gradgrad: bool,
    tolerance: tuple[float, float] | None,
) -> None:
    """The vector-Jacobian product of one random cotangent, over all outcomes at once."""
    cotangents = []
    for p in pairs:
        cotangent = torch.zeros_like(p.ours)
        for piece in p.cut(cotangent):  # rows in gaps stay 0
            piece.copy_(torch.randn_like(piece))
        cotangents.append(cotangent.detach().requires_grad_(gradgrad))
    their_cotangents = [
        c.detach().requires_grad_(gradgrad) for p, g in zip(pairs, cotangents) for c in p.cut(g)
    ]
    leafy = [o for o in operands if o.leaf is not None and o.leaf.requires_grad]
    ours = _vjp([p.ours for p in pairs], [o.leaf for o in leafy], cotangents, gradgrad)
    theirs = _vjp(
        [t for p in pairs for t in p.theirs],
        [leaf for o in leafy for leaf in o.their_leaves],
        their_cotangents,
        gradgrad,
    )
    our_pieces = [piece for o, g in zip(leafy, ours) for piece in o.pieces(g)]
    _compare_gradients("gradient", our_pieces, theirs, leafy, tolerance)
    if not gradgrad:
        return
    weights = [torch.randn_like(t) for t in theirs]
    again = _vjp(our_pieces, [o.leaf for o in leafy], weights, again=True)
    their_again = _vjp(
        theirs, [leaf for o in leafy for leaf in o.their_leaves], weights, again=True
    )
    pieces = [piece for o, g in zip(leafy, again) for piece in o.pieces(g)]
    _compare_gradients("second gradient", pieces, their_again, leafy, tolerance)
    again = _vjp(our_pieces, cotangents, weights)
    their_again = _vjp(theirs, their_cotangents, weights)
    pieces = [piece for p, g in zip(pairs, again) for piece in p.cut(g)]
    for k, (a, b) in enumerate(zip(pieces, their_again, strict=True)):
        _close(f"gradient of cotangent {k}", a, b, tolerance)


def _vjp(
    outputs: list[Tensor],
    inputs: list[Any],
    cotangents: list[Tensor],
    create_graph: bool = False,
    again: bool = False,
) -> list[Tensor]:
    """Gradients of `inputs`; zeros where there is no path. `again`: the graph is needed once more."""
    linked = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if not linked:
        return [torch.zeros_like(i) for i in inputs]
    found = torch.autograd.grad(
        [o for o, _ in linked],
        inputs,
        [c for _, c in linked],
        create_graph=create_graph,
        retain_graph=create_graph or again,
        allow_unused=True,
    )
    return [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, found)]


def _compare_gradients(
    what: str,
    ours: list[Tensor],
    theirs: list[Tensor],
    operands: Sequence[_Operand],
    tolerance: tuple[float, float] | None,
) -> None:
    names = [
        f"{what} of operand {k}" + (f", component {i}" if len(o.their_leaves) > 1 else "")
        for k, o in enumerate(operands)
        for i in range(len(o.their_leaves))
    ]
    for name, a, b in zip(names, ours, theirs, strict=True):
        _close(name, a.detach(), b.detach(), tolerance)


@dataclass(frozen=True)
class Case:
    """One operator, as a line in a list.

    Attributes:
        name: shows in the test's id.
        fn: called as fn(x, *others(x)).
        others: further operands, made from the nested sample.
        features: feature sizes of the sample, behind the ragged dim.
        dtype: of the sample.
        positive: a sample above zero, for log and the like.
        without: names of layouts that the dense operator itself refuses or where it is undefined.
        options: for check_against_components.
    """

    name: str
    fn: Callable[..., Any]
    others: Callable[[Tensor], Sequence[Any]] = lambda x: ()
    features: tuple[int, ...] = (4,)
    dtype: torch.dtype = torch.float32
    positive: bool = False
    without: Sequence[str] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def run_case(case: Case, layout: Layout = USUAL, *, device: str = "cpu", **options: Any) -> None:
    """Checks one case on one layout; `options` go before those of the case."""
    x = sample(layout, case.features, case.dtype, device=device, positive=case.positive)
    others = case.others(x)
    check_against_components(case.fn, x, *others, **{**case.options, **options})


def grid(cases: Sequence[Case], layouts: Sequence[Layout] = STRUCTURES) -> Any:
    """Parametrizes a test by `case` and `layout`: all of them but those a case is `without`.

    A name in `without` that no layout has is an error, so that a renamed layout does not hide a case.
    """
    known = {str(layout) for layout in STRUCTURES}
    for case in cases:
        assert set(case.without) <= known, f"{case}: without {set(case.without) - known}"
    return pytest.mark.parametrize(
        ("case", "layout"),
        [
            pytest.param(case, layout, id=f"{case}-{layout}")
            for case in cases
            for layout in layouts
            if str(layout) not in case.without
        ],
    )
