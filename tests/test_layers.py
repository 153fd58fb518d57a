"""Imports point down (README, "Where things are"), and stand at the top of a file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "njt"

# from the top down; a room is a module or a folder; rooms of one line don't know each other
LAYERS = [
    ["njt"],
    ["drop_in", "exporting", "testing", "bert_padding", "transforms"],
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


def foreign_private(sources: dict[str, str]) -> list[str]:
    """Uses of private parts of others: modules, and attributes that no file of ours defines.

    Names of operators are their address in the dispatcher: `aten._softmax`, also where torch lists them by a prefix.
    """
    ours, used = set(), []
    for where, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                ours.add(node.name)
            elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                ours.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.Import):
                used += [(where, node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("njt"):
                used += [(where, node.lineno, f"{node.module}.{a.name}") for a in node.names]
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] != "aten":
                used.append((where, node.lineno, node.attr))
    private = re.compile(r"(^|\.)_(?!_)")
    return [
        f"{where}, line {line}: {name}"
        for where, line, name in used
        if private.search(name) and name not in ours | PUBLIC
    ]


# documented despite the underscore
PUBLIC = {"_check", "_fields"}


def test_private_parts_of_torch_are_in_compat() -> None:
    """What a new torch may move stands in one file; there it says what breaks."""
    sources = {str(p.relative_to(PACKAGE)): p.read_text() for p in FILES if p.stem != "_compat"}
    assert foreign_private(sources) == []


def test_a_private_part_is_found() -> None:
    for line in (
        "from torch._ops import OpOverload",
        "import torch._dynamo",
        "y = x._version",
        "torch._C._nn.pad(x)",
        "torch._grouped_mm(a, b)",
        "torch.nested._internal.nested_tensor",
    ):
        assert foreign_private({"here": line}), line
    for line in (
        "x._own = 1\nx._own",
        "aten._softmax.default",
        "torch._check(n > 0)",
        "a.__name__",
    ):
        assert not foreign_private({"here": line}), line


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
