"""When two structures have the same lengths, or lie at the same rows: compared once, the proof kept on both.

May import _compat only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from njt import _compat

if TYPE_CHECKING:
    from njt.structure import Structure


class Proof:
    """A set of structures known to be equal: the root of a union-find tree stands for the set."""

    __slots__ = ("parent",)

    def __init__(self) -> None:
        self.parent: Proof | None = None

    def root(self) -> Proof:
        node = self
        while node.parent is not None:
            node = node.parent
        return node


def known(a: Proof, b: Proof) -> bool:
    return a is b or a.root() is b.root()


def keep(a: Proof, b: Proof) -> None:
    root_a, root_b = a.root(), b.root()
    if root_a is not root_b:
        root_b.parent = root_a


def same_lengths(a: Structure, b: Structure) -> bool | None:
    """`Structure.same_lengths` of two objects."""
    if a.is_traced or b.is_traced:
        if _compat.same_ragged_size(a.ragged_size, b.ragged_size):
            return True
        return None
    a._refresh()
    b._refresh()
    if known(a._same_lengths, b._same_lengths):
        return True
    if a.batch_size != b.batch_size:
        return False
    if a._host is not None and b._host is not None:
        equal = a._host == b._host
    elif a.seqlens.device == b.seqlens.device:
        equal = _compat.unseen(lambda: bool((a.seqlens == b.seqlens).all()))
    else:
        equal = a.host_lengths() == b.host_lengths()
    if equal:
        keep(a._same_lengths, b._same_lengths)
        _share_bounds(a, b)
    return equal


def same_layout(a: Structure, b: Structure) -> bool | None:
    """`Structure.same_layout` of two objects."""
    if a.lengths is None and b.lengths is None:
        return same_lengths(a, b)
    if a.lengths is None or b.lengths is None:
        return False
    if a.is_traced or b.is_traced:
        if a.offsets is b.offsets and a.lengths is b.lengths:
            return True
        # a compiled backward gets the gradient with offsets and lengths of its own; their symbol tells
        same = _compat.same_ragged_size(a.ragged_size, b.ragged_size)
        if not (same and _compat.in_backward()):
            return False
        text = "a gradient whose components lie at other rows than those of the result"
        _compat.check_later((a.offsets == b.offsets).all(), text)
        return True
    a._refresh()
    b._refresh()
    if known(a._same_layout, b._same_layout):
        return True
    if not same_lengths(a, b) or a.host_offsets()[:-1] != b.host_offsets()[:-1]:
        return False
    keep(a._same_layout, b._same_layout)
    return True


def _share_bounds(a: Structure, b: Structure) -> None:
    for name in ("_min", "_max", "_host"):
        mine, theirs = getattr(a, name), getattr(b, name)
        if mine is None:
            setattr(a, name, theirs)
        elif theirs is None:
            setattr(b, name, mine)
