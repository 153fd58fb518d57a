"""What is installed and what is promised about it agree."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import torch

import njt

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = dict(
    re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_version_is_one() -> None:
    assert njt.__version__ == PROJECT["project"]["version"]


def test_every_test_dependency_is_pinned() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["dev"], *extras["plot"]]
    names = {_normal(re.match(r"[\w.-]+", requirement)[0]) for requirement in wanted}
    assert names <= {_normal(name) for name in PINS}


def test_installed_versions_are_the_pinned_ones() -> None:
    """Torch alone, and only where `make` made the environment: other torches are tested on purpose."""
    if Path(sys.prefix).parent == ROOT:
        assert torch.__version__.split("+")[0] == PINS["torch"]
        assert distribution("triton").version == PINS["triton"]


def test_no_absolute_path_and_no_address_in_the_tooling() -> None:
    for name in ("Makefile", ".ci/run", "constraints.txt", "pyproject.toml"):
        text = (ROOT / name).read_text().removeprefix("#!/usr/bin/env bash")
        assert not re.search(r"https?://|(?<![\w.*])/(home|opt|root|tmp|usr|work)\b", text), name


def test_typed_marker_is_there() -> None:
    assert (ROOT / "njt/py.typed").is_file()


def test_import_touches_neither_matplotlib_nor_the_compiler() -> None:
    """`import njt` stays light: what only a few need is imported when they need it."""
    code = "import njt, sys; print([m for m in ('matplotlib', 'torch._inductor.compile_fx') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
