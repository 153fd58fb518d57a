"""njt where torch.nested is: the same program with other tensors.

`patch()` lets the functions of `torch.nested` that make jagged tensors make those of njt; what asks for the strided
layout stays torch's. `TABLE` lists the names. May import everything but testing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from njt import construct, errors
from njt.tensor import NestedTensor


@dataclass(frozen=True)
class Equivalent:
    """One function of `torch.nested` and ours.

    Attributes:
        name: in `torch.nested`.
        ours: the function of njt, with the same arguments.
        when: whether a call is for us, from its arguments.
        condition: the same in words.
        drops: keyword arguments of torch's that ours lacks, as they have nothing to say here.
    """

    name: str
    ours: Callable[..., Any]
    when: Callable[..., bool]
    condition: str
    drops: tuple[str, ...] = ()


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _jagged(*args: Any, **kwargs: Any) -> bool:
    given = (*args, *kwargs.values())
    return any(a is torch.jagged for a in given) or any(isinstance(a, NestedTensor) for a in given)


def _nested(*args: Any, **kwargs: Any) -> bool:
    return any(isinstance(a, NestedTensor) for a in (*args, *kwargs.values()))


_LAYOUT = "layout=torch.jagged is given"
TABLE: tuple[Equivalent, ...] = (
    Equivalent("nested_tensor", construct.nested_tensor, _jagged, _LAYOUT),
    Equivalent(
        "as_nested_tensor",
        construct.as_nested_tensor,
        _jagged,
        f"{_LAYOUT}, or a nested tensor of njt",
    ),
    Equivalent("nested_tensor_from_jagged", construct.nested_tensor_from_jagged, _always, "always"),
    Equivalent("narrow", construct.narrow, _jagged, _LAYOUT, drops=("layout",)),
    Equivalent("masked_select", construct.masked_select, _always, "always"),
    Equivalent(
        "to_padded_tensor",
        construct.to_padded_tensor,
        _nested,
        "the input is of njt",
        drops=("out",),
    ),
)


class Patch:
    """`torch.nested` with njt in it, until `undo()` or the end of a `with` block.

    >>> with njt.patch():
    ...     x = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    >>> type(x) is njt.NestedTensor
    True
    """

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}

    def apply(self) -> Patch:
        """Puts our functions in place; a second call does nothing."""
        if not self._before:
            for line in TABLE:
                before = getattr(torch.nested, line.name)
                self._before[line.name] = before
                setattr(torch.nested, line.name, _switch(line, before))
        return self

    def undo(self) -> None:
        """Puts back what was there before; patches must be undone in the reverse order of their making.

        Raises:
            RuntimeError: a later patch is still in place.
        """
        for name in self._before:
            if getattr(getattr(torch.nested, name), "njt_patch", None) is not self._before[name]:
                raise errors.bad_shape(
                    "undo",
                    "another patch on top of this one",
                    "the last patch",
                    "Undo that one first.",
                )
        for name, before in self._before.items():
            setattr(torch.nested, name, before)
        self._before = {}

    def __enter__(self) -> Patch:
        return self.apply()

    def __exit__(self, *exception: Any) -> None:
        self.undo()


def _switch(line: Equivalent, before: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ours where the line says so, and what was there before else."""
    ours, when, drops = line.ours, line.when, line.drops

    @functools.wraps(before)
    def function(*args: Any, **kwargs: Any) -> Any:
        if not when(*args, **kwargs):
            return before(*args, **kwargs)
        return ours(
            *_without_layout(args, drops), **{k: v for k, v in kwargs.items() if k not in drops}
        )

    function.njt_patch = before  # type: ignore[attr-defined]
    return function


def _without_layout(args: tuple[Any, ...], drops: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(a for a in args if a is not torch.jagged) if "layout" in drops else args


def patch() -> Patch:
    """Puts njt where `torch.nested` is, at once; returns what undoes it.

    Names that a program took out before, as `from torch.nested import nested_tensor` does, keep what they hold: patch
    before such imports.

    Returns:
        a `Patch`: call its `undo()`, or use it in a `with` statement.

    >>> undo = njt.patch().undo
    >>> torch.nested.nested_tensor_from_jagged(torch.ones(3, 2), torch.tensor([0, 2, 3])).max_seqlen
    2
    >>> undo()
    """
    return Patch().apply()
