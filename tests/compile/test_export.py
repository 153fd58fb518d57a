"""`njt.export`: dynamic batch and total, strict or not; run, saved, loaded, run again, packaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

import njt
from tests.compile.streams import gappy, nested, offsets, rows


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


@pytest.mark.filterwarnings(
    "ignore:The given buffer is not writable"
)  # torch 2.11 reads a saved program so
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
def test_package_of_nested(tmp_path: Path) -> None:
    module = Encoder().eval()
    program = njt.export(module, (nested([3, 5, 2]),))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "p.pt2"))
    packaged = torch._inductor.aoti_load_package(path)
    for lengths in ((3, 5, 2), (4, 1, 6, 2)):
        x = nested(lengths)
        with torch.no_grad():
            compare(packaged(plain(x)), plain(module(x)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, about its own trees
def test_package(tmp_path: Path) -> None:
    module = Pooled()
    program = njt.export(module, batch(3, 5, 2), dynamic_shapes=({0: TOTAL}, {0: STARTS}))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "p.pt2"))
    packaged = torch._inductor.aoti_load_package(path)
    for args in (batch(3, 5, 2), batch(4, 1, 6, 2)):
        torch.testing.assert_close(packaged(*args), module(*args))


class Encoder(nn.Module):
    """Nested in, nested out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Containers(nn.Module):
    """Nested tensors inside of lists and dicts, both ways."""

    def forward(self, xs: list[Tensor], more: dict[str, Any]) -> dict[str, Any]:
        x = xs[0] * more["scale"] + xs[1]
        return {"all": [x], "sums": x.sum(1), "longest": x.max_seqlen, "nothing": None}


class Both(nn.Module):
    """Two batches whose lengths have to agree."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Gappy(nn.Module):
    """Gaps come and go."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.softmax(1), x.sum(1)


def containers(*lengths: int) -> tuple[Any, ...]:
    return [nested(lengths), torch.randn(8)], {"scale": torch.tensor(2.0)}


def both(*lengths: int) -> tuple[Tensor, Tensor]:
    return nested(lengths), nested(lengths)


NESTED: dict[str, tuple[nn.Module, Callable[..., Any]]] = {
    "encoder": (Encoder().eval(), lambda *lengths: (nested(lengths),)),
    "containers": (Containers(), containers),
    "one structure twice": (Both(), lambda *lengths: (nested(lengths),) * 2),
    "two structures": (Both(), both),
    "gaps": (Gappy(), lambda *lengths: (gappy(lengths),)),
}


def plain(tree: Any) -> Any:
    """What a program has for nested tensors."""

    def parts(x: Tensor) -> Any:
        if not isinstance(x, njt.NestedTensor):
            return x
        found = x.values(), x.offsets(), x.lengths()
        return found[: 2 if x.lengths() is None else 3]

    return pytree.tree_map_only(Tensor, parts, tree)


def compare(ours: Any, theirs: Any) -> None:
    """Results of a program and of its module, but what is in gaps."""
    if isinstance(theirs, tuple) and len(theirs) == 3:
        ours, theirs = (rows(njt.nested_tensor_from_jagged(*parts)) for parts in (ours, theirs))
    if isinstance(theirs, (tuple, list, dict)):
        keys = theirs.keys() if isinstance(theirs, dict) else range(len(theirs))
        assert len(ours) == len(theirs)
        for key in keys:
            compare(ours[key], theirs[key])
    else:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, about its own trees
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", NESTED)
def test_nested_in_and_out(name: str, strict: bool, tmp_path: Path) -> None:
    module, make = NESTED[name]
    with torch.no_grad():
        program = njt.export(module, make(3, 5, 2), strict=strict)
        torch.export.save(program, tmp_path / "program.pt2")
        again = torch.export.load(tmp_path / "program.pt2")
        for lengths in ((3, 5, 2), (4, 1, 6, 2), (2, 9), (0, 3, 0)):
            args = make(*lengths)
            wanted = plain(module(*args))
            for runs in (program.module(), again.module(), program.run_decompositions().module()):
                compare(runs(*plain(args)), wanted)


def test_parameters_keep_their_names() -> None:
    module = Encoder().eval()
    program = njt.export(module, (nested([3, 5, 2]),))
    assert program.state_dict.keys() == module.state_dict().keys()
    assert program.graph_signature.user_inputs == ("x_0", "x_1")


def test_lengths_that_differ_are_noticed_when_the_program_runs() -> None:
    program = njt.export(Both(), both(3, 5, 2))
    with pytest.raises(RuntimeError, match="component lengths of the operands differ"):
        program.module()(*plain((nested([3, 5, 2]), nested([5, 3, 2]))))


class Asks(nn.Module):
    """Two ways, by the number of components."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 3 else x * 3


def test_what_the_module_asked_about_sizes_is_checked() -> None:
    run = njt.export(Asks(), (nested([3, 5, 2]),)).module()
    x = nested([4, 4])
    torch.testing.assert_close(run(plain(x))[0], 3 * x.values())
    with pytest.raises(AssertionError, match="Guard failed"):
        run(plain(nested([1, 2, 3, 4])))


def test_equal_sizes_of_the_example_are_not_taken_for_one() -> None:
    # four offsets, four features, four rows of another argument
    class Scaled(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x.unflatten(-1, (2, 2)).flatten(-2) * 2).sum(1) @ y

    run = njt.export(Scaled(), (nested([1, 2, 3], 4), torch.randn(4, 4))).module()
    x, y = nested([1, 2, 3, 4], 4), torch.randn(4, 4)
    torch.testing.assert_close(run(plain(x), y), Scaled()(x, y))


def test_other_ragged_dims_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="ragged in dim 2"):
        njt.export(nn.Identity(), (nested([3, 5]).transpose(1, 2),))


class Inside(nn.Module):
    """A nested tensor between plain ones."""

    def forward(self, values: Tensor, starts: Tensor) -> Tensor:
        return (njt.nested_tensor_from_jagged(values, starts) * 2).values()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_torch_export_points_to_ours(strict: bool, inside: bool) -> None:
    args: tuple[Tensor, ...] = batch(3, 5, 2) if inside else (nested([3, 5, 2]),)
    with pytest.raises(Exception, match=r"njt\.export\(module, args\)"):
        torch.export.export(Inside() if inside else nn.Linear(8, 8), args, strict=strict)
