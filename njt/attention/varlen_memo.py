"""What was worked out from offsets and lengths, kept while they live and are not written to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class _Entry(NamedTuple):
    sources: tuple[weakref.ref[Tensor], ...]
    versions: tuple[int, ...]
    found: Any


class Memo:
    """Results by identity and version of the tensors they were made from, and a plain key."""

    def __init__(self) -> None:
        self._entries: dict[Any, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, sources: tuple[Tensor, ...], key: Any, make: Callable[[], Any]) -> Any:
        """The kept result, or the one of `make`, kept until one of `sources` dies."""
        place = (*map(id, sources), key)
        versions = tuple(map(_version, sources))
        entry = self._entries.get(place)
        if (
            entry is not None
            and entry.versions == versions
            and all(ref() is x for ref, x in zip(entry.sources, sources, strict=True))
        ):
            return entry.found
        found = make()
        drop = _dropper(self._entries, place)
        self._entries[place] = _Entry(tuple(weakref.ref(x, drop) for x in sources), versions, found)
        return found


def _dropper(entries: dict[Any, _Entry], place: Any) -> Callable[[Any], None]:
    def drop(ref: Any) -> None:
        entry = entries.get(place)
        # an id may be in use again: drop the entry only if this reference is its own
        if entry is not None and any(ref is kept for kept in entry.sources):
            del entries[place]

    return drop


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
