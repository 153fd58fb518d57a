"""Imports point down (README, "Where things are"), and stand at the top of a file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "njt"

# from the top down; a room is a module or a folder; rooms of one line don't know each other
LAYERS = [
    ["njt"],
    ["drop_in", "exporting", "testing", "bert_padding"],
    ["construct"],
    ["ops", "attention"],
    ["rules"],
    ["bridge"],
    ["tensor"],
    ["registry"],
    ["kernels", "structure"],
    ["dims", "errors", "_compat"],
]
LEVEL = {room: level for level, rooms in enumerate(reversed(LAYERS)) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """The room of a file: its folder under njt/, or its own name; a program stands above all rooms."""
    inner = path.relative_to(PACKAGE)
    if inner.name == "__main__.py" or inner.parts == ("__init__.py",):
        return "njt"
    return inner.parts[0].removesuffix(".py")


def imports(tree: ast.AST, names: set[str]) -> Iterator[tuple[int, str]]:
    """(line, room) of every import of njt's own rooms, also those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "njt":
                    yield node.lineno, ([*alias.name.split("."), "njt"])[1]
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            if parts[0] == "njt" and len(parts) > 1:
                yield node.lineno, parts[1]
            elif parts == ["njt"]:
                for alias in node.names:
                    yield node.lineno, alias.name if alias.name in names else "njt"


def upward(source: str, room: str, names: set[str]) -> list[str]:
    """What a file of `room` imports though it may not."""
    found = []
    for line, target in imports(ast.parse(source), names):
        if target != room and LEVEL[target] >= LEVEL[room]:
            found.append(f"line {line}: {room} imports {target}")
    return found


def inner_imports(source: str) -> list[int]:
    """Lines of imports inside functions."""
    tree = ast.parse(source)
    functions = [
        n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return sorted(
        n.lineno
        for f in functions
        for n in ast.walk(f)
        if isinstance(n, (ast.Import, ast.ImportFrom))
    )


ROOMS = {room_of(path) for path in FILES}


def test_every_room_has_a_layer() -> None:
    assert set(LEVEL) >= ROOMS


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_point_down(path: Path) -> None:
    assert upward(path.read_text(), room_of(path), set(LEVEL)) == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_import_inside_a_function(path: Path) -> None:
    assert inner_imports(path.read_text()) == []


def test_the_check_can_fail() -> None:
    names = set(LEVEL)
    assert upward("from njt.tensor import NestedTensor", "structure", names)
    assert upward("from njt import bridge, errors", "kernels", names)
    assert upward("import njt.ops.views", "rules", names)
    assert upward("def f():\n    from njt import NestedTensor", "rules", names)
    assert upward("from njt.structure import Structure", "kernels", names)
    assert not upward("from njt import errors\nfrom njt.kernels.rows import f", "kernels", names)
    assert inner_imports("def f():\n    import njt") == [2]
    assert not inner_imports("import njt")
