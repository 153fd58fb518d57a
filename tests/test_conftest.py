"""The conditions that conftest.py promises to every test."""

from __future__ import annotations

import os
import warnings

import pytest
import torch


def test_fresh_memory_is_nan() -> None:
    assert torch.empty(3).isnan().all()
    assert torch.ones(3).new_empty(2).isnan().all()
    assert torch.empty_like(torch.ones(3, dtype=torch.bfloat16)).isnan().all()


@pytest.mark.plain_memory
def test_plain_memory_switches_it_off() -> None:
    assert not torch.are_deterministic_algorithms_enabled()


def test_warnings_are_errors() -> None:
    with pytest.raises(UserWarning, match="seen"):
        warnings.warn("seen", UserWarning, stacklevel=1)


def test_seed_is_fixed() -> None:
    assert torch.initial_seed() == 0


def test_triton_runs_on_every_machine() -> None:
    assert torch.cuda.is_available() or os.environ["TRITON_INTERPRET"] == "1"


def test_inductor_compiles_without_a_warning() -> None:
    x = torch.randn(5)
    torch.testing.assert_close(torch.compile(torch.sin, fullgraph=True)(x), x.sin())
