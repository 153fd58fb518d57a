"""Call: the arguments of an operator by their names in its schema, read once an overload.

May import bridge, tensor, errors, dims.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from njt import _compat, dims
from njt._compat import OpOverload
from njt.tensor import NestedTensor


@cache
def _parameters(func: OpOverload) -> tuple[tuple[str, ...], dict[str, Any]]:
    names = tuple(a.name for a in _compat.schema(func).arguments)
    defaults = {
        a.name: a.default_value for a in _compat.schema(func).arguments if a.has_default_value()
    }
    return names, defaults


def user_name(func: OpOverload) -> str:
    """The operator as a user writes it: `aten::_softmax` is "softmax"."""
    return _compat.schema(func).name.removeprefix("aten::").strip("_")


class Call:
    """One call of an overload: arguments by schema name, defaults filled in."""

    __slots__ = ("arguments", "func", "nested")

    def __init__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names, defaults = _parameters(func)
        self.func = func
        self.arguments = {**defaults, **dict(zip(names, args)), **kwargs}
        self.nested: NestedTensor = next(
            a for a in (*args, *kwargs.values()) if isinstance(a, NestedTensor)
        )

    @property
    def name(self) -> str:
        """The operator as a user writes it."""
        return user_name(self.func)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def dim(self, name: str) -> int:
        """The argument `name` as a dim counted from the front."""
        return dims.canonical(self.arguments[name], self.nested.dim())

    def on_values(self, **replaced: Any) -> Any:
        """The operator on the values of every nested argument, some arguments replaced."""
        arguments = {**self.arguments, **replaced}
        inner = {
            name: a._values if isinstance(a, NestedTensor) else a for name, a in arguments.items()
        }
        positional = [
            inner.pop(a.name) for a in _compat.schema(self.func).arguments if not a.kwarg_only
        ]
        return self.func(*positional, **inner)
