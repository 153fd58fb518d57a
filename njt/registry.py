"""The two tables: overload -> rule (below autograd), torch function -> handler (above it).

A rule is called as `rule(func, args, kwargs)`, a handler as `handler(*args, **kwargs)`. Imports only
errors and _compat; `njt.ops` fills the tables when njt is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from njt import _compat, errors
from njt._compat import OpOverload


class Rule(Protocol):
    """What an operator does to nested tensors."""

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


Handler = Callable[..., Any]

OPS: dict[OpOverload, Rule] = {}
FUNCTIONS: dict[Callable[..., Any], Handler] = {}
_BY_TAG: dict[torch.Tag, Rule] = {}
_RESOLVED: dict[OpOverload, Rule] = {}


def declare(overload: OpOverload, rule: Rule) -> None:
    """Puts a line in the table; view and in-place overloads return with their aliasing corrected.

    Raises:
        ValueError: the overload has a line already.
    """
    if overload in OPS:
        raise ValueError(f"{overload} is declared twice")
    OPS[overload] = rule
    _RESOLVED[overload] = with_aliasing(overload, rule)


def implements(*overloads: OpOverload) -> Callable[[Rule], Rule]:
    """The decorator form of `declare`, for the odd operator that no rule fits."""

    def register(rule: Rule) -> Rule:
        for overload in overloads:
            declare(overload, rule)
        return rule

    return register


def declare_tag(tag: torch.Tag, rule: Rule) -> None:
    """The rule of every operator that carries `tag` and has no line of its own."""
    if tag in _BY_TAG:
        raise ValueError(f"{tag} is declared twice")
    _BY_TAG[tag] = rule


def declare_function(handler: Handler, *functions: Callable[..., Any]) -> None:
    """A handler that runs above autograd, in place of every given torch function."""
    for function in functions:
        if function in FUNCTIONS:
            raise ValueError(f"{function} is declared twice")
        FUNCTIONS[function] = handler


def implements_function(*functions: Callable[..., Any]) -> Callable[[Handler], Handler]:
    """The decorator form of `declare_function`."""

    def register(handler: Handler) -> Handler:
        declare_function(handler, *functions)
        return handler

    return register


def named(name: str) -> Iterator[Callable[..., Any]]:
    """The torch functions that users know by `name`: torch.<name>, Tensor.<name>, F.<name>, linalg, special."""
    homes = (torch, torch.Tensor, torch.nn.functional, torch.linalg, torch.special, torch.fft)
    seen: list[Callable[..., Any]] = []
    for home in homes:
        function = getattr(home, name, None)
        if callable(function) and function not in seen:
            seen.append(function)
            yield function


def overloads(name: str) -> Iterator[OpOverload]:
    """Every overload of aten::<name> that writes no `out=`."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is not None:
        for overload in packet.overloads():
            found = getattr(packet, overload)
            if not any(a.is_out for a in _compat.schema(found).arguments):
                yield found


def declare_named(
    name: str,
    handler: Handler,
    aten: tuple[str, ...] | None = None,
    but: tuple[Callable[..., Any], ...] = (),
) -> None:
    """A handler for the function in all its guises: torch.<name>, Tensor.<name>, F.<name>, and below autograd
    the overloads of aten::<name> (or of the names in `aten`), whose arguments it takes under their names.

    Args:
        but: guises, functions or overloads, that have a line of their own.
    Raises:
        ValueError: a guise has a line already, or `but` names none of them.
    """
    functions = list(named(name))
    below = [o for home in ((name,) if aten is None else aten) for o in overloads(home)]
    for other in but:
        if other not in functions and other not in below:
            raise ValueError(f"{other} is no guise of {name}")
    declare_function(handler, *(f for f in functions if f not in but))
    for overload in below:
        if overload not in but:
            declare(overload, FromHandler(handler))


class FromHandler:
    """A function's handler as the rule of its overloads."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.handler(*args, **kwargs)

    def __repr__(self) -> str:
        return f"FromHandler({self.handler!r})"


class _Aliased:
    """A rule whose results share memory with, or are, its arguments, as the schema says."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self.rule(func, args, kwargs)
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        # dense results are views of the values already; and where values are plain tensors the helper
        # would only swap the empty storages of wrappers, which nobody sees: storage questions are
        # answered by the values. That swap is half the cost of `detach`, so it is for tracing only.
        if args and first is args[0] and torch.Tag.inplace_view in func.tags:
            return out  # the helper would ask a dense kernel to change the wrapper's sizes, as the rule has done
        if args and type(first) is type(args[0]) and type(first._values) is not Tensor:
            return _compat.correct_aliasing(func, args, kwargs, out)
        return out


def with_aliasing(func: OpOverload, rule: Rule) -> Rule:
    """`rule`, returning through torch's aliasing helper where the schema of `func` aliases."""
    aliases = any(r.alias_info is not None for r in _compat.schema(func).returns)
    return _Aliased(rule) if aliases else rule


class _Composite:
    """An operator that torch itself decomposes into others."""

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _compat.redispatch_composite(func, args, kwargs)


def is_composite(rule: Rule) -> bool:
    """Whether the rule is torch's own decomposition."""
    return isinstance(rule, _Composite)


def lookup(func: OpOverload) -> Rule:
    """The rule of an overload: its line, else its tag's, else torch's own decomposition.

    Raises:
        errors.Undeclared: there is none.
    """
    rule = _RESOLVED.get(func)
    if rule is not None:
        return rule
    for tag, tagged in _BY_TAG.items():
        if tag in func.tags:
            found: Rule = with_aliasing(func, tagged)
            break
    else:
        if not _compat.has_composite(func):
            raise errors.Undeclared(func)
        found = _Composite()
    _RESOLVED[func] = found
    return found
