"""What the documentation says is run: README code and commands, and every doctest of the package."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import njt
from njt.rules import per_component

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MODULES = sorted(
    m.name for m in pkgutil.walk_packages(njt.__path__, "njt.") if not m.name.endswith("__main__")
)


class _AnyRaggedSize(doctest.OutputChecker):
    """The number in `j1` counts batches made so far in the process: any will do."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        want, got = (re.sub(r"\bj\d+\b", "j1", text) for text in (want, got))
        return super().check_output(want, got, optionflags)


def _run(test: doctest.DocTest) -> None:
    report: list[str] = []
    runner = doctest.DocTestRunner(_AnyRaggedSize(), optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=report.append, clear_globs=False)
    assert runner.failures == 0, "".join(report)


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("module", ["njt", *MODULES])
def test_doctests(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_component, "FALLBACKS", Counter())  # as in a process of its own
    loaded = importlib.import_module(module)
    for test in doctest.DocTestFinder(exclude_empty=True).find(loaded):
        test.globs = {**vars(loaded), "njt": njt, "torch": torch}
        _run(test)


def test_a_wrong_doctest_fails() -> None:
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    with pytest.raises(AssertionError, match=r"Expected:\s+3\s+Got:\s+2"):
        _run(wrong)


def test_readme_tour() -> None:
    tour = "\n".join(_blocks("pycon"))
    assert tour.count(">>>") > 15
    _run(doctest.DocTestParser().get_doctest(tour, {}, "README.md", "README.md", 0))


def test_readme_python_blocks() -> None:
    blocks = _blocks("python")
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"torch": torch})


def test_readme_commands_are_there() -> None:
    """Each command of the README names a target of the Makefile or a file; CI runs the targets themselves."""
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = re.findall(r"^make (\w+)", "\n".join(_blocks("sh")), re.MULTILINE)
    assert commands == ["demo", "test"]
    assert set(commands) <= targets
    assert "make test" in (ROOT / ".ci/run").read_text()
    for script in re.findall(r"python ([\w/]+\.py)", README):
        assert (ROOT / script).is_file(), script


def test_readme_links_lead_somewhere() -> None:
    headings = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        else:
            assert (ROOT / target).exists(), target


def test_readme_table_names_every_room() -> None:
    rooms = {p.stem for p in (ROOT / "njt").iterdir() if p.suffix == ".py" or p.is_dir()}
    table = README[README.index("## Where things are") : README.index("### Adding an operator")]
    named = {name.strip("/") for name in re.findall(r"`([\w/]+)`", table)}
    missing = rooms - named - {"__init__", "__pycache__", "py"}
    assert missing == set()
