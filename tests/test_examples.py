"""Every example runs as a user would run it, and stays short."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import fx

import njt
from tests.samples import components

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
# run small here; `make demo` runs it whole
ARGUMENTS = {"multihead_attention.py": ["--width", "16", "--repeats", "1"]}


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    """As a user runs it; warnings are errors, as in the tests themselves."""
    # torch's own deprecated parts, met on the way to its compiler
    warnings = "error,ignore::DeprecationWarning,ignore::FutureWarning"
    done = subprocess.run(
        [sys.executable, str(path), *ARGUMENTS.get(path.name, [])],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(EXAMPLES.parent),
            "PYTHONWARNINGS": warnings,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout.strip(), "an example shows something"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 170


def test_picture_is_saved(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    _load("multihead_attention").plot([3, 1, 4], str(tmp_path / "lengths.png"))
    assert (tmp_path / "lengths.png").stat().st_size > 1000


@pytest.mark.parametrize("way", ["eager", "traced", "compiled", "traced and compiled"])
def test_attention_of_the_seed(way: str) -> None:
    """D1: one module, dense or nested in, traced and compiled, with gradients of input and weights."""
    module = _load("multihead_attention").MultiheadAttention(8, heads=2)
    run = fx.symbolic_trace(module) if "traced" in way else module
    if "compiled" in way:
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    parts = [torch.randn(n, 8) for n in (3, 1, 4)]

    x = njt.nested_tensor(parts, requires_grad=True)
    out = run(x)
    assert out.offsets().equal(x.offsets())
    cotangents = [torch.randn(n, 8) for n in (3, 1, 4)]
    wanted = [torch.zeros(()) for _ in module.parameters()]
    ours = torch.autograd.grad(out.values(), [x, *module.parameters()], torch.cat(cotangents))
    for i, (part, cotangent) in enumerate(zip(parts, cotangents, strict=True)):
        dense = part.unsqueeze(0).requires_grad_()
        alone = module(dense)
        torch.testing.assert_close(components(out)[i], alone[0], rtol=1e-4, atol=1e-5)
        inner, *weights = torch.autograd.grad(alone, [dense, *module.parameters()], cotangent[None])
        torch.testing.assert_close(components(ours[0])[i], inner[0], rtol=1e-4, atol=1e-5)
        wanted = [a + b for a, b in zip(wanted, weights, strict=True)]
    for a, b in zip(ours[1:], wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
