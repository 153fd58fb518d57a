"""Integer arithmetic on dims: how the dims of a nested tensor map to those of its values.

A nested tensor of rank n has dim 0 for the batch and `ragged_dim` in 1..n-1; its values lack the
batch dim, so dim d of the nested tensor is dim d - 1 of the values. Imports nothing of njt.
"""

from __future__ import annotations

from collections.abc import Sequence


def canonical(dim: int, rank: int) -> int:
    """`dim` counted from the front.

    Raises:
        IndexError: `dim` is outside [-rank, rank - 1].

    >>> canonical(-1, 3)
    2
    """
    if not -rank <= dim < rank:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], "
            f"but got {dim})"
        )
    return dim % rank


def canonical_all(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """`dims` counted from the front, sorted as given; None or an empty list means all of them.

    Raises:
        IndexError: an entry is out of range.
        RuntimeError: an entry comes twice.

    >>> canonical_all((-1, 0), 3)
    (2, 0)
    """
    if dims is None:
        return tuple(range(rank))
    if isinstance(dims, int):
        return (canonical(dims, rank),)
    if not dims:
        return tuple(range(rank))
    found = tuple(canonical(d, rank) for d in dims)
    if len(set(found)) != len(found):
        raise RuntimeError(f"dim {tuple(dims)} names the same dimension more than once")
    return found


def swap(ragged_dim: int, a: int, b: int) -> int:
    """Where the ragged dim is after dims `a` and `b` changed places.

    >>> swap(1, 1, 2)
    2
    """
    return {a: b, b: a}.get(ragged_dim, ragged_dim)


def permute(ragged_dim: int, order: Sequence[int]) -> int:
    """Where the ragged dim is after `x.permute(order)`.

    >>> permute(1, (0, 2, 1))
    2
    """
    return list(order).index(ragged_dim)


def drop(ragged_dim: int, dropped: Sequence[int]) -> int:
    """Where the ragged dim is after other dims went away.

    >>> drop(2, (1,))
    1
    """
    return ragged_dim - sum(d < ragged_dim for d in dropped)


def insert(ragged_dim: int, dim: int) -> int:
    """Where the ragged dim is after a new dim came in at `dim`.

    >>> insert(1, 1)
    2
    """
    return ragged_dim + (dim <= ragged_dim)
