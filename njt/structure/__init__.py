"""Structure: where every component of a batch lies in the packed values, and what follows from it.

One object per offsets tensor, shared by all tensors of a batch and passed on, never copied. It is the
only place where a bound or any other derived tensor is computed. Offsets (B + 1,), lengths (B,) or None.
Whether two are equal is decided in `equality`, whether offsets and lengths make sense in `validation`.
May import _compat and errors only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from njt import _compat, errors
from njt.structure import equality, validation
from njt.structure.integers import DTYPES, integer, integers


class Structure:
    """Offsets, lengths, seqlen bounds and caches of a batch of variable-length sequences.

    Use `Structure.find`, which gives the same object for the same offsets (and lengths) tensors.

    >>> s = Structure.find(torch.tensor([0, 2, 5]))
    >>> s.max_seqlen, s.host_lengths(), s is Structure.find(s.offsets)
    (3, (2, 3), True)
    """

    __slots__ = (
        "__weakref__",
        "_derived",
        "_extent",
        "_host",
        "_max",
        "_min",
        "_moved",
        "_multiples",
        "_same_layout",
        "_same_lengths",
        "_size",
        "_stamp",
        "_total",
        "batch_size",
        "is_traced",
        "lengths",
        "offsets",
    )

    def __init__(self, offsets: Tensor, lengths: Tensor | None) -> None:
        for vector in (offsets,) if lengths is None else (offsets, lengths):
            if not isinstance(vector, Tensor) or vector.dtype not in DTYPES or vector.dim() != 1:
                kind = f" of {vector.dtype}" if isinstance(vector, Tensor) else ""
                raise errors.bad_type(
                    "Structure.find",
                    f"{errors.describe(vector)}{kind}",
                    "offsets and lengths of one dim and an integer dtype",
                    "Use Structure.from_lengths for a list of lengths.",
                )
        self.offsets = offsets
        self.lengths = lengths
        self.batch_size = offsets.shape[0] - 1
        self.is_traced = _compat.is_fake(offsets)
        if self.is_traced and torch.compiler.is_exporting():
            raise errors.for_njt_export()
        if _compat.jit_tracing() is not None:
            raise errors.no_jit_trace()
        self._min: Any = None
        self._max: Any = None
        self._total: int | None = None  # rows that the offsets cover, once read
        self._host: tuple[int, ...] | None = None
        self._extent: Tensor | None = None
        self._size: torch.SymInt | None = None
        self._derived: dict[str, Any] = {}
        self._moved: dict[torch.device, Structure] = {}
        self._multiples: dict[int, Any] = {}
        self._same_lengths = equality.Proof()
        self._same_layout = equality.Proof()
        self._stamp = self._versions()

    @staticmethod
    def find(
        offsets: Tensor,
        lengths: Tensor | None = None,
        *,
        min_seqlen: Any = None,
        max_seqlen: Any = None,
        host_lengths: Sequence[int] | None = None,
        extent: Tensor | None = None,
    ) -> Structure:
        """The structure of these very tensors, made on first use; bounds that come along are kept.

        Args:
            offsets: (B + 1,) integer, start of each component.
            lengths: (B,) integer, rows in use of each component where there are gaps.
            min_seqlen, max_seqlen: bounds, believed.
            host_lengths: the lengths as numbers, if the caller has them.
            extent: bounds as a tensor of shape (max + 2, min + 2, 0), the form in which they travel
                through compiled graphs; a size of 1 stands for "not known".
        """
        if _compat.functorch_active():
            offsets, lengths = _outside(offsets), None if lengths is None else _outside(lengths)
        key = (id(offsets), id(lengths))
        found = _TABLE.get(key)
        if found is None:
            found = _TABLE[key] = Structure(offsets, lengths)
        # a trace's tensors belong to one of its levels, so the last one given is the one to use
        if extent is not None and (found._extent is None or found.is_traced):
            found._extent = extent
            if extent.shape[0] != 1:
                max_seqlen = extent.shape[0] - 2
            if extent.shape[1] != 1:
                min_seqlen = extent.shape[1] - 2
        if max_seqlen is not None and found._max is None:
            found._max = max_seqlen
        if min_seqlen is not None and found._min is None:
            found._min = min_seqlen
        if host_lengths is not None and found._host is None:
            found._take_host(tuple(host_lengths))
        return found

    @staticmethod
    def from_lengths(
        host_lengths: Sequence[int],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.int64,
        op: str = "Structure.from_lengths",
    ) -> Structure:
        """A structure without gaps for lengths known on the host: no device is ever asked about it.

        Raises:
            TypeError: lengths that are no integers; RuntimeError: one is negative. `op` is the name to blame.
        """
        if not all(type(n) is int for n in host_lengths):
            host_lengths = integers(op, "lengths", host_lengths)
            if not all(type(n) is int for n in host_lengths):
                return _from_symbols(host_lengths, device, dtype)
        if min(host_lengths, default=0) < 0:
            raise errors.bad_shape(
                op,
                f"lengths {errors._lengths_text(host_lengths)}",
                "lengths of 0 or more",
                "Check how they were counted.",
            )
        starts = [0, *accumulate(host_lengths)]
        offsets = torch.tensor(starts, dtype=dtype, device=device)
        structure = Structure.find(offsets, host_lengths=host_lengths)
        structure._total = starts[-1]
        return structure

    def _versions(self) -> tuple[int, int]:
        if self.is_traced:
            return (0, 0)
        return _compat.version(self.offsets), 0 if self.lengths is None else _compat.version(
            self.lengths
        )

    def _refresh(self) -> None:
        """Forgets what was read from offsets or lengths that have been written to since."""
        if self.is_traced and (_compat.unrecorded(self._max) or _compat.unrecorded(self._min)):
            # bounds of a nested input of make_fx, or of the base of one: no inputs of the graph
            self._min = self._max = self._extent = None
        now = self._versions()
        if now != self._stamp:
            self._stamp = now
            self._min = self._max = self._total = self._host = self._extent = None
            self._derived = {}
            self._moved = {}
            self._same_lengths, self._same_layout = equality.Proof(), equality.Proof()

    def _take_host(self, host: tuple[int, ...]) -> None:
        self._host = host
        self._max = max(host, default=0)
        self._min = min(host, default=0)

    # what it is

    @property
    def ragged_size(self) -> torch.SymInt:
        """The symbolic size of the ragged dim."""
        if self._size is None:
            size = _compat.ragged_size_of(self.offsets if self.lengths is None else self.lengths)
            if self.is_traced:
                return size  # a fake tensor's memo may change; don't hold on to it
            self._size = size
        return self._size

    def ragged_multiple(self, step: Any) -> Any:
        """The ragged size times `step`, a stride of the batch dim; made once."""
        if self.is_traced:
            return self.ragged_size * step
        multiple = self._multiples.get(step)
        if multiple is None:
            multiple = self._multiples[step] = self.ragged_size * step
        return multiple

    @property
    def has_gaps(self) -> bool:
        """Whether some rows of the values may belong to no component."""
        return self.lengths is not None

    @property
    def seqlens(self) -> Tensor:
        """(B,) lengths of the components, on the device of the offsets."""
        if self.lengths is not None:
            return self.lengths
        return self.derived("seqlens", lambda: self.offsets.diff())

    def host_lengths(self) -> tuple[int, ...]:
        """The lengths as numbers; read from the device once."""
        if self.is_traced:
            return tuple(_traced_bound(n) for n in self.seqlens.unbind())
        self._refresh()
        if self._host is None:
            self._take_host(tuple(_compat.unseen(self.seqlens.tolist)))
        assert self._host is not None
        return self._host

    def host_offsets(self) -> tuple[int, ...]:
        """The starts as numbers; read from the device once."""
        return self.derived("host_offsets", lambda: tuple(self.offsets.tolist()))

    @property
    def total_length(self) -> Any:
        """Sum of the lengths: read from the device once; without gaps, the rows of the values."""
        if self.is_traced:
            if self.lengths is None:
                return _traced_bound(self.seqlens.sum())
            if self._total is None:  # one symbol however often it is asked for
                self._total = _traced_bound(self.seqlens.sum())
            return self._total
        self._refresh()
        if self._host is not None:
            return sum(self._host)
        if self.lengths is None and self._total is not None:
            return self._total
        return self.derived("total_length", lambda: int(self.seqlens.sum()))

    def derived(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, kept as long as the offsets are not written to.

        Nothing is kept for a traced structure: its tensors belong to one level of one trace.
        """
        if self.is_traced:
            return make()
        self._refresh()
        if name not in self._derived:
            self._derived[name] = _compat.unseen(make)
        return self._derived[name]

    # bounds

    @property
    def known_max_seqlen(self) -> Any:
        """The longest length if it is known without a look at the device, else None."""
        self._refresh()
        return self._max

    @property
    def known_min_seqlen(self) -> Any:
        """The shortest length if it is known without a look at the device, else None."""
        self._refresh()
        return self._min

    @property
    def max_seqlen(self) -> Any:
        """The longest length (0 for an empty batch), read from the device once."""
        self._refresh()
        if self._max is None:
            if self.is_traced:
                return _traced_bound(torch.nn.functional.pad(self.seqlens, (0, 1)).amax())
            self._read_bounds()
        return self._max

    @property
    def longest_bound(self) -> Any:
        """No component is longer: exact in eager, up to 2 more in a graph.

        A graph's bounds come in as sizes that are larger by 2; kernels that need a bound and not the
        number take that size itself, since inductor's cache can't name what is computed from it.
        """
        if self.is_traced and self._extent is not None and self._max is not None:
            return self._extent.shape[0]
        return self.max_seqlen

    @property
    def known_host_lengths(self) -> tuple[int, ...] | None:
        """The lengths as numbers if they are at hand without a look at the device, else None."""
        self._refresh()
        return self._host

    @property
    def min_seqlen(self) -> Any:
        """The shortest length (0 for an empty batch), read from the device once."""
        self._refresh()
        if self._min is None:
            if self.is_traced:
                return _traced_bound(self.seqlens.amin())
            self._read_bounds()
        return self._min

    def set_bounds(
        self, min_seqlen: Any = None, max_seqlen: Any = None, op: str = "set_bounds"
    ) -> None:
        """Replaces what is known of the bounds; None leaves one as it is.

        Raises:
            TypeError: a bound that is no integer; ValueError: on CPU, one that is no bound.
        """
        min_seqlen = None if min_seqlen is None else integer(op, "min_seqlen", min_seqlen)
        max_seqlen = None if max_seqlen is None else integer(op, "max_seqlen", max_seqlen)
        self._refresh()
        if not self.is_traced and self.offsets.device.type == "cpu":
            validation.check_bounds(self, min_seqlen, max_seqlen, op)
        self._extent = None
        if max_seqlen is not None:
            self._max = max_seqlen
        if min_seqlen is not None:
            self._min = min_seqlen

    def _read_bounds(self) -> None:
        if self.batch_size == 0:
            low, high = 0, 0
        else:
            low, high = _compat.unseen(lambda: torch.stack(self.seqlens.aminmax()).tolist())
        self._max = high if self._max is None else self._max
        self._min = low if self._min is None else self._min

    @property
    def extent(self) -> Tensor | None:
        """The known bounds as a tensor of shape (max + 2, min + 2, 0), or None if none is known."""
        self._refresh()
        if self._extent is None and (self._max is not None or self._min is not None):
            high = 1 if self._max is None else self._max + 2
            low = 1 if self._min is None else self._min + 2
            extent = _compat.unseen(lambda: torch.empty(high, low, 0))
            known = {d for d, bound in enumerate((self._max, self._min)) if bound is not None}
            _compat.mark_dynamic(extent, known)
            self._extent = extent
        return self._extent

    # checks and equality

    def validate(self, rows: int | None, op: str) -> None:
        """Compares offsets and lengths with the number of rows they point into (None: unknown); reads them once.

        Raises:
            RuntimeError: offsets don't start at 0, fall, or don't end at `rows`; with lengths: a
                component leaves the rows.
            ValueError: a bound that was given is not one.
        """
        if not self.is_traced:
            validation.validate(self, rows, op)

    def same_lengths(self, other: Structure) -> bool | None:
        """Whether component lengths agree; None if that can't be known while tracing.

        Compared once, then remembered; structures made from host lengths are compared on the host.
        """
        return self is other or equality.same_lengths(self, other)

    def same_layout(self, other: Structure) -> bool | None:
        """Whether lengths agree and lie at the same rows, so that values line up as they are."""
        return self is other or equality.same_layout(self, other)

    # others like it

    def to(self, device: torch.device) -> Structure:
        """The same structure with its tensors on `device`; one object per device."""
        if device == self.offsets.device:
            return self
        self._refresh()
        moved = self._moved.get(device)
        if moved is None:
            offsets = _compat.unseen(lambda: self.offsets.to(device))
            given = self.lengths
            lengths = None if given is None else _compat.unseen(lambda: given.to(device))
            moved = Structure.find(offsets, lengths, min_seqlen=self._min, max_seqlen=self._max)
            if not self.is_traced:
                moved._host, moved._total = self._host, self._total
                equality.keep(self._same_lengths, moved._same_lengths)
                equality.keep(self._same_layout, moved._same_layout)
                self._moved[device] = moved
        return moved

    def compact(self) -> Structure:
        """The structure of the same components without gaps, made once."""
        if self.lengths is None:
            return self
        return self.derived("compact", self._make_compact)

    def _make_compact(self) -> Structure:
        assert self.lengths is not None
        offsets = torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0)).to(self.offsets.dtype)
        compact = Structure.find(offsets, min_seqlen=self._min, max_seqlen=self._max)
        if not self.is_traced:
            if self._host is not None:
                compact._take_host(self._host)
            equality.keep(self._same_lengths, compact._same_lengths)
        return compact

    def row_index(self) -> Tensor:
        """(total_length,) int64: the rows of the values in use, component after component."""
        return self.derived("row_index", self._make_row_index)

    def _make_row_index(self) -> Tensor:
        compact = self.compact()
        total = None if self.is_traced else self.total_length
        ids = torch.repeat_interleave(compact.seqlens, output_size=total)
        shift = self.offsets[:-1].long() - compact.offsets[:-1].long()
        return torch.arange(ids.shape[0], device=ids.device) + shift[ids]

    def row_mask(self, rows: int) -> Tensor:
        """(rows,) bool: True for the rows of the values that belong to a component."""
        return self.derived(f"row_mask {rows}", lambda: self._make_row_mask(rows))

    def _make_row_mask(self, rows: int) -> Tensor:
        if self.is_traced:  # without an index, whose length the data would decide
            steps = torch.zeros(rows + 1, dtype=torch.int64, device=self.offsets.device)
            starts, ones = (
                self.offsets[:-1].long(),
                torch.ones_like(self.seqlens, dtype=torch.int64),
            )
            steps = steps.index_add(0, starts, ones).index_add(0, starts + self.seqlens, -ones)
            return steps[:-1].cumsum(0) > 0
        mask = torch.zeros(rows, dtype=torch.bool, device=self.offsets.device)
        return mask.index_fill_(0, self.row_index(), True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Structure:
        lengths = None if self.lengths is None else self.lengths.clone()
        copied = Structure.find(
            self.offsets.clone(), lengths, min_seqlen=self._min, max_seqlen=self._max
        )
        copied._host, copied._total = self._host, self._total
        memo[id(self)] = copied
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.offsets, self.lengths, self.known_min_seqlen, self.known_max_seqlen)

    def __repr__(self) -> str:
        if self.is_traced:
            return f"Structure(batch_size={self.batch_size}, traced)"
        return f"Structure(lengths={errors._lengths_text(self.host_lengths())})"


def _outside(x: Tensor) -> Tensor:
    """Offsets or lengths as no transform of torch.func has them."""
    if _compat.is_batched(x):
        raise errors.bad_shape(
            "vmap",
            f"offsets or lengths {tuple(x.shape)} that vmap runs over",
            "one structure for all",
            "Make the nested tensor outside of vmap, or loop over structures.",
        )
    return _compat.untransformed(x)


def _traced_bound(bound: Tensor) -> Any:
    number = bound.item()
    torch._check(number >= 0)
    return number


def _from_symbols(
    lengths: Sequence[Any], device: torch.device | str, dtype: torch.dtype
) -> Structure:
    """Lengths that are symbols of a trace: sizes of tensors inside a graph."""
    counts = torch.stack([torch.scalar_tensor(n, dtype=dtype, device=device) for n in lengths])
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(dtype)
    longest, shortest = reduce(torch.sym_max, lengths), reduce(torch.sym_min, lengths)
    return Structure.find(offsets, min_seqlen=shortest, max_seqlen=longest)


def _rebuild(
    offsets: Tensor, lengths: Tensor | None, min_seqlen: int | None, max_seqlen: int | None
) -> Structure:
    return Structure.find(offsets, lengths, min_seqlen=min_seqlen, max_seqlen=max_seqlen)


# the key's ids are valid as long as the structure lives, since it holds both tensors
_TABLE: weakref.WeakValueDictionary[tuple[int, int], Structure] = weakref.WeakValueDictionary()
