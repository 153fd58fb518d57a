"""Prints what the tables declare, a line an operator: `python -m njt.ops`."""

from __future__ import annotations

import inspect
from typing import Any

import torch

import njt
from njt import _compat, registry


def described(rule: Any) -> str:
    """A rule by its class, a function by its name."""
    if isinstance(rule, registry._Aliased):
        return described(rule.rule)
    if isinstance(rule, registry.FromHandler):
        return described(rule.handler)
    if inspect.isfunction(rule):
        return rule.__name__.strip("_")
    return type(rule).__name__


def table() -> list[tuple[str, str]]:
    """(operator, rule) of every declared overload and every pointwise one, sorted."""
    lines = {str(overload): described(rule) for overload, rule in registry.OPS.items()}
    for name in _compat.operator_names():
        home, _, base = name.partition("::")
        for overload in registry.overloads(base.partition(".")[0]) if home == "aten" else ():
            if torch.Tag.pointwise in overload.tags and str(overload) not in lines:
                lines[str(overload)] = "Pointwise"
    return sorted(lines.items())


def main() -> None:
    """Prints the table and its size."""
    lines = table()
    for operator, rule in lines:
        print(f"{operator:50} {rule}")
    print(
        f"{len(lines)} overloads, {len(registry.FUNCTIONS)} functions above autograd, njt {njt.__version__}"
    )


if __name__ == "__main__":
    main()
