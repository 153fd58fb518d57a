"""What every test runs under: a seed, NaN in fresh memory, warnings as errors (pyproject.toml), no stale cache.

Environment variables are set here, before torch and triton are imported and read them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

if not torch.cuda.is_available():  # Triton kernels run through the interpreter, none is skipped
    os.environ["TRITON_INTERPRET"] = "1"

import hypothesis
import pytest
import torch._functorch.config
import torch._inductor.config

# a cached graph would hide a change of our lowerings; the C++ compiler's own cache stays on
torch._inductor.config.fx_graph_cache = False
torch._functorch.config.enable_autograd_cache = False

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]

hypothesis.settings.register_profile(
    "njt", deadline=None, max_examples=25, derandomize=True, database=None
)
hypothesis.settings.load_profile("njt")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Every device there is."""
    return request.param


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same numbers in every run, whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nan_in_fresh_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """`torch.empty` gives NaN (integers: the largest), so that reading what was never written shows.

    Deterministic mode is the only switch for it and changes what inductor generates: tests that read
    generated code carry the marker `plain_memory`, and all of tests/compile goes without.
    """
    plain = "plain_memory" in request.keywords or "compile" in request.path.parts
    torch.use_deterministic_algorithms(not plain, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """A test that compiles leaves nothing behind: no guard, no count of recompilations."""
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
