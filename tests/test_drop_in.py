"""njt in the place of torch.nested: which calls come here, and that everything can be put back."""

from __future__ import annotations

import inspect

import pytest
import torch

import njt
from njt import drop_in

NAMES = [line.name for line in drop_in.TABLE]
PARTS = [torch.ones(2, 3), torch.ones(1, 3)]


@pytest.fixture(autouse=True)
def put_back():
    before = {name: getattr(torch.nested, name) for name in NAMES}
    yield
    for name, function in before.items():
        assert getattr(torch.nested, name) is function, f"torch.nested.{name} was not put back"


def test_every_maker_of_jagged_tensors_is_in_the_table() -> None:
    public = {n for n in torch.nested.__all__ if callable(getattr(torch.nested, n))}
    assert set(NAMES) == public


@pytest.mark.parametrize("line", drop_in.TABLE, ids=lambda line: line.name)
def test_arguments_are_those_of_torch(line: drop_in.Equivalent) -> None:
    theirs = getattr(torch.nested, line.name)
    if not inspect.isfunction(theirs):
        return  # built in, no signature to read
    ours = inspect.signature(line.ours).parameters
    for name in inspect.signature(theirs).parameters:
        assert name in ours or name in line.drops, f"{line.name}() lacks {name}"


def test_jagged_calls_come_here() -> None:
    with njt.patch():
        x = torch.nested.nested_tensor(PARTS, layout=torch.jagged)
        made = {
            "nested_tensor": x,
            "as_nested_tensor": torch.nested.as_nested_tensor(PARTS, layout=torch.jagged),
            "of a nested tensor": torch.nested.as_nested_tensor(x),
            "positional layout": torch.nested.as_nested_tensor(PARTS, None, None, torch.jagged),
            "nested_tensor_from_jagged": torch.nested.nested_tensor_from_jagged(
                torch.ones(3, 3), torch.tensor([0, 2, 3])
            ),
            "narrow": torch.nested.narrow(
                torch.ones(2, 4, 3), 1, 0, torch.tensor([2, 1]), layout=torch.jagged
            ),
            "narrow, positional": torch.nested.narrow(
                torch.ones(2, 4, 3), 1, 0, torch.tensor([2, 1]), torch.jagged
            ),
            "masked_select": torch.nested.masked_select(
                torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
            ),
        }
        for name, y in made.items():
            assert type(y) is njt.NestedTensor, name
        padded = torch.nested.to_padded_tensor(x, 7.0)
    assert padded.tolist() == [[[1.0] * 3] * 2, [[1.0] * 3, [7.0] * 3]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_strided_calls_stay_with_torch() -> None:
    with njt.patch():
        x = torch.nested.nested_tensor(PARTS)
        assert x.layout is torch.strided
        assert type(x) is torch.Tensor
        assert torch.nested.to_padded_tensor(x, 0.0).shape == (2, 2, 3)
        assert torch.nested.as_nested_tensor(PARTS).layout is torch.strided


def test_patches_nest_and_refuse_the_wrong_order() -> None:
    first = njt.patch()
    second = njt.patch()
    with pytest.raises(RuntimeError, match="another patch on top"):
        first.undo()
    second.undo()
    first.undo()
    first.undo()  # nothing left to put back


def test_put_back_after_an_error() -> None:
    with pytest.raises(KeyError), njt.patch():
        raise KeyError


def test_patched_functions_compile() -> None:
    def build(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        x = torch.nested.nested_tensor_from_jagged(values, offsets)
        return (x * 2).values()

    with njt.patch():
        run = torch.compile(build, fullgraph=True, backend="aot_eager")
        out = run(torch.ones(3, 2), torch.tensor([0, 2, 3]))
    assert torch.equal(out, torch.full((3, 2), 2.0))
