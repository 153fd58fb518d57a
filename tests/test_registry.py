"""The tables: every line once, every operator resolved or refused by name."""

from __future__ import annotations

import pytest
import torch

import njt
from njt import registry
from njt.errors import Undeclared

aten = torch.ops.aten


def test_a_second_line_is_an_error() -> None:
    overload = next(iter(registry.OPS))
    with pytest.raises(ValueError, match="declared twice"):
        registry.declare(overload, lambda func, args, kwargs: None)
    function = next(iter(registry.FUNCTIONS))
    with pytest.raises(ValueError, match="declared twice"):
        registry.declare_function(lambda x: x, function)
    with pytest.raises(ValueError, match="declared twice"):
        registry.declare_tag(torch.Tag.pointwise, lambda func, args, kwargs: None)


def test_a_second_name_is_an_error() -> None:
    """A name whose guises have lines already is refused too, unless the declaration leaves them out by name."""
    before = dict(registry.OPS), dict(registry.FUNCTIONS)
    with pytest.raises(ValueError, match="declared twice"):
        registry.declare_named("softmax", lambda x: x)
    with pytest.raises(ValueError, match="declared twice"):
        registry.declare_named("softmax", lambda x: x, but=tuple(registry.named("softmax")))
    with pytest.raises(ValueError, match="no guise of softmax"):
        registry.declare_named("softmax", lambda x: x, but=(torch.sin,))
    registry.declare_named(
        "softmax", lambda x: x, (), but=tuple(registry.named("softmax"))
    )  # nothing is left to declare
    assert before == (registry.OPS, registry.FUNCTIONS)


def test_what_has_a_line_of_its_own_keeps_it() -> None:
    assert registry.FUNCTIONS[torch.linalg.norm] is not registry.FUNCTIONS[torch.norm]
    assert "FromHandler" not in repr(registry.OPS[aten.view.default])
    assert "FromHandler" in repr(registry.OPS[aten.view.dtype])


def test_resolving() -> None:
    """A line, else the tag, else torch's decomposition, else a refusal that names the operator."""
    assert registry.lookup(aten.linear.default) is registry.OPS[aten.linear.default]
    assert "Pointwise" in repr(registry.lookup(aten.sin.default))
    assert "Composite" in repr(registry.lookup(aten.frobenius_norm.dim))
    with pytest.raises(Undeclared, match="_cdist_forward"):
        registry.lookup(aten._cdist_forward.default)


@pytest.mark.parametrize("name", ["add_", "transpose_", "detach", "transpose", "select"])
def test_schemas_decide_aliasing(name) -> None:
    """A1: view and in-place overloads return through torch's aliasing helper while tracing."""
    for overload in registry.overloads(name):
        if overload in registry.OPS or torch.Tag.pointwise in overload.tags:
            assert isinstance(registry.lookup(overload), registry._Aliased), overload


def test_names_lead_to_all_guises() -> None:
    found = list(registry.named("softmax"))
    assert torch.softmax in found
    assert torch.Tensor.softmax in found
    assert torch.nn.functional.softmax in found
    assert not any(a.is_out for o in registry.overloads("sum") for a in o._schema.arguments)


def test_every_pointwise_operator_has_a_rule() -> None:
    """350 and more overloads need no line of their own."""
    tagged = set()
    for name in torch._C._dispatch_get_all_op_names():
        home, _, base = name.partition("::")
        for overload in registry.overloads(base.partition(".")[0]) if home == "aten" else ():
            if torch.Tag.pointwise in overload.tags:
                registry.lookup(overload)
                tagged.add(overload)
    assert len(tagged) > 300


def test_package_fills_the_tables() -> None:
    assert njt.ops
    assert len(registry.OPS) > 100
    assert len(registry.FUNCTIONS) > 30
