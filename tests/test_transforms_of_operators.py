"""Every case of tests/ops once more, under torch.func: vjp, jvp, jvp of vjp and vmap against loops."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, func

import tests.ops
from tests import reference
from tests.reference import TOLERANCE, PerComponent
from tests.samples import components


def _grids() -> Iterator[Any]:
    """(module, test, case, layout) of every test that goes over cases and layouts."""
    for info in pkgutil.iter_modules(tests.ops.__path__):
        module = importlib.import_module(f"{tests.ops.__name__}.{info.name}")
        for name, test in sorted(vars(module).items()):
            whole = inspect.isfunction(test) and {"case", "layout"} == {*signature(test).parameters}
            for mark in getattr(test, "pytestmark", []) if whole else []:
                if mark.name == "parametrize" and mark.args[0] == ("case", "layout"):
                    for given in mark.args[1]:
                        title = f"{info.name}-{name}-{given.id}"
                        yield pytest.param(module, test, *given.values, id=title)


# what dense torch answers where it has no derivative, or nothing to take one of
_NONE = (NotImplementedError, RuntimeError, IndexError)


def _floats(t: Any) -> bool:
    return isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())


class _Side:
    """One operator as a function of its floating operands alone, with its floating results alone."""

    def __init__(self, fn: Callable[..., Any], operands: Sequence[Any], at: Sequence[int]) -> None:
        self.fn, self.operands, self.at = fn, operands, at
        self.primals = tuple(operands[k] for k in at)

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        operands = list(self.operands)
        for k, t in zip(self.at, given, strict=True):
            operands[k] = t
        return tuple(r for r in reference._flat(self.fn(*operands)) if _floats(r))

    def pulled(self, *primals: Tensor, cotangents: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The gradients."""
        return func.vjp(self, *primals)[1](cotangents)  # type: ignore[no-any-return]

    def pushed(self, tangents: tuple[Tensor, ...]) -> Any:
        """Values and tangents."""
        return func.jvp(self, self.primals, tangents)

    def pushed_gradients(self, tangents: Any, cotangents: Any) -> Any:
        """The tangents of the gradients."""

        def gradients(*primals: Tensor) -> tuple[Tensor, ...]:
            return self.pulled(*primals, cotangents=cotangents)

        return func.jvp(gradients, self.primals, tangents)[1]


def check_transforms(
    fn: Callable[..., Any],
    x: Tensor,
    *others: Any,
    join: Callable[[list[Tensor]], Tensor] = torch.cat,
    grad: bool = True,
    raises: type[Exception] | None = None,
    tolerance: tuple[float, float] | None = None,
    **options: Any,
) -> None:
    """As `check_against_components`, for transforms. What dense torch does not differentiate is passed over."""
    operands = [x, *others]
    plain = [o.tensor if isinstance(o, PerComponent) else o for o in operands]
    at = [k for k, t in enumerate(plain) if _floats(t)]
    count = x.offsets().shape[0] - 1

    def cut(k: int, t: Any, i: int) -> Any:
        if isinstance(t, Tensor) and t.is_nested:
            return components(t)[i].unsqueeze(0)
        return t[i : i + 1] if isinstance(operands[k], PerComponent) else t

    ours = _Side(fn, plain, at)
    theirs = [_Side(fn, [cut(k, t, i) for k, t in enumerate(plain)], at) for i in range(count)]
    if not (grad and at and count):
        return
    try:
        results = [side(*side.primals) for side in theirs]
    except Exception as error:
        if raises is None or not isinstance(error, raises):
            raise
        return
    if not results[0]:
        return

    def close(where: str, a: Tensor, parts: Sequence[Tensor], joined: Any) -> None:
        rtol, atol = tolerance or TOLERANCE[a.dtype]
        pieces = components(a) if a.is_nested else [a]
        parts = [p.squeeze(0) for p in parts] if a.is_nested else [joined(list(parts))]
        for i, (mine, wanted) in enumerate(zip(pieces, parts, strict=True)):
            # the dense derivative of a mean of nothing, and the like, is NaN; ours is 0
            mine = torch.where(wanted.isnan(), wanted, mine) if 0 in x.seqlens else mine
            reference._close(f"{where}, part {i}", mine, wanted, (rtol, atol))
        if a.is_nested and a.lengths() is not None:
            rest = a.values().detach().clone()
            for piece in reference._cut(rest, a):
                piece.zero_()
            assert not rest.any(), f"{where}: rows in gaps are not 0"

    def close_operands(where: str, found: Any, wanted: list[Any]) -> None:
        for n, k in enumerate(at):
            joined = torch.cat if isinstance(operands[k], PerComponent) else sum
            close(f"{where} {k}", found[n], [w[n] for w in wanted], joined)

    tangents = tuple(torch.randn_like(plain[k]) for k in at)
    their_tangents = [tuple(cut(k, t, i) for k, t in zip(at, tangents)) for i in range(count)]
    try:
        pairs = [side.pushed(t) for side, t in zip(theirs, their_tangents)]
    except _NONE:
        pairs = []
    if pairs:
        for n, tangent in enumerate(ours.pushed(tangents)[1]):
            close(f"tangent {n}", tangent, [p[1][n] for p in pairs], join)
    if join is not torch.cat:
        return  # how a cotangent is cut only `join` knows
    cotangents = tuple(torch.randn_like(r) for r in ours(*ours.primals))
    their_cotangents = [
        tuple(components(c)[i].unsqueeze(0) if c.is_nested else c[i : i + 1] for c in cotangents)
        for i in range(count)
    ]
    try:
        wanted = [s.pulled(*s.primals, cotangents=c) for s, c in zip(theirs, their_cotangents)]
    except _NONE:
        return
    close_operands("gradient", ours.pulled(*ours.primals, cotangents=cotangents), wanted)
    try:
        wanted = [
            side.pushed_gradients(t, c)
            for side, t, c in zip(theirs, their_tangents, their_cotangents)
        ]
    except _NONE:
        return
    found = ours.pushed_gradients(tangents, cotangents)
    close_operands("tangent of gradient", found, wanted)


def check_vmap(
    fn: Callable[..., Any],
    x: Tensor,
    *others: Any,
    tolerance: tuple[float, float] | None = None,
    **options: Any,
) -> None:
    """vmap over one feature dim more against a loop of ours. What dense torch does not map is passed over."""
    plain = [o.tensor if isinstance(o, PerComponent) else o for o in others]
    if not _floats(x) or not len(x):
        return
    both = torch.stack([x, x * 0.5 + 0.1], -1)
    one = (-1, *[None] * len(plain))
    try:
        wanted = [reference._flat(fn(t, *plain)) for t in both.unbind(-1)]
        first = [t[:1] if isinstance(o, PerComponent) else t for o, t in zip(others, plain)]
        first = [components(t)[0][None] if _nested(t) else t for t in first]
        func.vmap(fn, one, -1, randomness="same")(components(both)[0][None], *first)
    except Exception:
        return
    try:
        found = reference._flat(func.vmap(fn, one, -1, randomness="same")(both, *plain))
    except RuntimeError as refusal:
        # each would have lengths of its own
        if "that vmap runs over" in str(refusal) or "dynamic shape" in str(refusal):
            return
        raise
    for out, *parts in zip(found, *wanted, strict=True):
        for mine, want in zip(out.unbind(-1), parts, strict=True):
            pairs = zip(components(mine), components(want)) if want.is_nested else [(mine, want)]
            for a, b in pairs:
                reference._close("mapped", a, b, tolerance)


def _nested(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_nested


@pytest.mark.parametrize("check", [check_transforms, check_vmap])
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("module", "test", "case", "layout"), list(_grids()))
def test_each_case(
    module: Any, test: Any, case: Any, layout: Any, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator tests themselves, their oracle exchanged."""
    for home in (reference, module):
        if hasattr(home, "check_against_components"):
            monkeypatch.setattr(home, "check_against_components", check)
    test(case, layout)
