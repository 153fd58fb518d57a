"""`njt.export`: dynamic batch and total, strict or not; run, saved, loaded, run again, packaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._inductor
import torch.nn.functional as F
from torch import Tensor, nn

import njt
from tests.compile.streams import nested, offsets


class Attention(nn.Module):
    """Values and offsets to values."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, values: Tensor, starts: Tensor) -> Tensor:
        x = njt.nested_tensor_from_jagged(values, starts)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).values()


class Pooled(nn.Module):
    """Values and offsets to a row per component."""

    def forward(self, values: Tensor, starts: Tensor) -> Tensor:
        return F.gelu(njt.nested_tensor_from_jagged(values, starts)).sum(1)


def batch(*lengths: int) -> tuple[Tensor, Tensor]:
    return torch.randn(sum(lengths), 8), offsets(lengths)


TOTAL, STARTS = torch.export.Dim("total", min=2), torch.export.Dim("starts", min=3)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("module", [Attention(), Pooled()], ids=lambda m: type(m).__name__)
def test_run_save_load(module: nn.Module, strict: bool, tmp_path: Path) -> None:
    shapes = ({0: TOTAL}, {0: STARTS})
    program = njt.export(module, batch(3, 5, 2), dynamic_shapes=shapes, strict=strict)
    torch.export.save(program, tmp_path / "program.pt2")
    again = torch.export.load(tmp_path / "program.pt2")
    for args in (batch(3, 5, 2), batch(4, 1, 6, 2), batch(2, 9)):
        wanted = module(*args)
        torch.testing.assert_close(program.module()(*args), wanted)
        torch.testing.assert_close(again.module()(*args), wanted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, about its own trees
def test_package(tmp_path: Path) -> None:
    module = Pooled()
    program = njt.export(module, batch(3, 5, 2), dynamic_shapes=({0: TOTAL}, {0: STARTS}))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "p.pt2"))
    packaged = torch._inductor.aoti_load_package(path)
    for args in (batch(3, 5, 2), batch(4, 1, 6, 2)):
        torch.testing.assert_close(packaged(*args), module(*args))


def test_nested_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="dense arguments"):
        njt.export(nn.Identity(), (nested([3, 5]),))
