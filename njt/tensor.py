"""NestedTensor: a batch of variable-length sequences (B, j1, *) as one tensor over packed values.

The class holds, flattens and dispatches; what an operator means is decided by the tables of `registry`.
May import registry, structure, errors, dims, _compat.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from njt import _compat, errors, registry
from njt.structure import Structure

_FUNCTIONS = registry.FUNCTIONS
_RESOLVED = registry._RESOLVED
_disable_function = _compat.no_torch_function
_transforming = _compat.transforming
_jit_tracing = _compat.jit_tracing


# ragged dim, requires_grad and the names of the inner tensors: no data, or every batch is compiled anew
_Context = tuple[int, bool, tuple[str, ...]]


class NestedTensor(_compat.BASE):  # type: ignore[misc]
    """A batch of B components that differ in the size of one dim, the ragged dim.

    Not called by users: `njt.nested_tensor`, `njt.nested_tensor_from_jagged` and `njt.from_padded` make them.

    Attributes:
        ragged_dim: the dim of varying size, 1 for (B, j1, D).
        min_seqlen, max_seqlen: shortest and longest length, computed once and kept.
        seqlens: (B,) lengths on the device of the tensor.

    >>> x = njt.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)])
    >>> x.ragged_dim, x.max_seqlen, x.seqlens, x.values().shape
    (1, 2, tensor([2, 1]), torch.Size([3, 3]))
    """

    _values: Tensor
    _structure: Structure
    _ragged_dim: int
    _size: tuple[Any, ...]
    _strides: tuple[Any, ...]
    _lazy_bits_seen = False  # whether values that are conjugate or negative views were ever wrapped

    @staticmethod
    def __new__(
        cls,
        values: Tensor,
        structure: Structure,
        ragged_dim: int = 1,
        requires_grad: bool = False,
        like: NestedTensor | None = None,
    ) -> NestedTensor:
        """Wraps `values` as they are. `like`: a tensor whose values have the same shape and strides."""
        if like is not None:
            size, strides = like._size, like._strides
        elif not isinstance(structure, Structure):
            raise errors.bad_type(
                "NestedTensor",
                f"structure={errors.describe(structure)}",
                "a Structure",
                "Call njt.nested_tensor_from_jagged(values, offsets).",
            )
        else:
            shape, steps = values.shape, values.stride()
            if ragged_dim == 1:
                size = (structure.batch_size, structure.ragged_size, *shape[1:])
            else:
                d = ragged_dim - 1
                size = (structure.batch_size, *shape[:d], structure.ragged_size, *shape[d + 1 :])
            strides = (structure.ragged_multiple(steps[ragged_dim - 1]), *steps)
        if torch.is_inference_mode_enabled() and not values.is_inference():
            # over ordinary values, as in a view of an ordinary tensor, it is no inference tensor
            with torch.inference_mode(False):
                self = _compat.make_wrapper(
                    cls, size, strides, values.dtype, values.device, requires_grad
                )
        else:
            self = _compat.make_wrapper(
                cls, size, strides, values.dtype, values.device, requires_grad
            )
        if values.is_neg() or values.is_conj():
            cls._lazy_bits_seen = True
        self._values = values
        self._structure = structure
        self._ragged_dim = ragged_dim
        self._size = size
        self._strides = strides
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    # how it is taken apart and put together again

    def __tensor_flatten__(self) -> tuple[list[str], _Context]:
        structure = self._structure
        _compat.mark_dynamic(self._values, {self._ragged_dim - 1})
        _compat.mark_dynamic(structure.offsets, {0})
        inner = ["_values", "_offsets"]
        if structure.lengths is not None:
            _compat.mark_dynamic(structure.lengths, {0})
            inner.append("_lengths")
        if structure.extent is not None:
            inner.append("_extent")
        if not structure.is_traced and _compat.describing(self):
            self._leave_small_sizes_open()
        return inner, (self._ragged_dim, self.requires_grad, tuple(inner))

    def _leave_small_sizes_open(self) -> None:
        """Keeps a batch of at most one component, row or row a component from having a graph of its own."""
        structure, d = self._structure, self._ragged_dim - 1
        longest = structure.known_max_seqlen
        few = min(structure.batch_size, self._values.shape[d]) <= 1
        if few or (longest is not None and longest <= 1):
            dims = [(self._values, {d}), (structure.offsets, {0})]
            if structure.lengths is not None:
                dims.append((structure.lengths, {0}))
            if structure.extent is not None:
                dims.append(
                    (structure.extent, {i for i in (0, 1) if structure.extent.shape[i] > 1})
                )
            _compat.leave_open(*dims)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: _Context, outer_size: Any, outer_stride: Any
    ) -> NestedTensor:
        values, offsets, lengths = inner["_values"], inner["_offsets"], inner.get("_lengths")
        ragged_dim, requires_grad, _ = context
        source = offsets if lengths is None else lengths
        if _compat.fake_tensor(source) is source:
            _compat.remember_fake_size(source, outer_size[ragged_dim])
            d = ragged_dim - 1
            derived = (offsets.shape[0] - 1, *values.shape[:d], None, *values.shape[d + 1 :])
            for outer, inner_size in zip(outer_size, derived):
                _compat.tie(outer, inner_size)
            least = {"_offsets": 1, "_extent": 2}
            for name, part in inner.items():
                _compat.answer_for_open_sizes(part.shape, least.get(name, 0))
        structure = Structure.find(offsets, lengths, extent=inner.get("_extent"))
        return NestedTensor(values, structure, ragged_dim, requires_grad)

    def __coerce_same_metadata_as_tangent__(
        self, expected: _Context, expected_type: type | None = None
    ) -> NestedTensor | None:
        """A gradient as the compiled backward knows it: with bounds if those were known at the time, or without."""
        ragged_dim, requires_grad, inner = expected
        structure = self._structure
        gaps = structure.has_gaps != ("_lengths" in inner)
        if expected_type not in (None, NestedTensor) or gaps or ragged_dim != self._ragged_dim:
            return None
        if "_extent" not in inner:
            structure = Structure(structure.offsets, structure.lengths)
        elif structure.extent is None:
            structure.set_bounds(structure.min_seqlen, structure.max_seqlen)
        return NestedTensor(self._values, structure, ragged_dim, requires_grad)

    def _stable_hash_for_caching(self) -> str:
        """What a compiled graph may depend on, for the compilers' caches on disk."""
        parts: list[object] = [_compat.code_digest(), self._ragged_dim, self.requires_grad]
        parts += [str(self._size), str(self._strides)]
        for name in self.__tensor_flatten__()[0]:
            inner = getattr(self, name)
            parts += [name, inner.dtype, inner.device, inner.requires_grad]
            parts += [str(inner.shape), str(inner.stride()), str(inner.storage_offset())]
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (self._values, self._structure, self._ragged_dim, self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> NestedTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "deepcopy(): got a nested tensor that is the result of an operation. Expected a leaf. "
                "Copy x.detach() instead."
            )
        structure = memo.get(id(self._structure)) or self._structure.__deepcopy__(memo)
        values = self._values.detach().clone()
        copied = NestedTensor(values, structure, self._ragged_dim, self.requires_grad)
        if self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)
        memo[id(self)] = copied
        return copied

    def with_values(self, values: Tensor) -> NestedTensor:
        """A tensor of this structure over other values, below autograd.

        Args:
            values: same ragged dim and rows; other sizes may differ.
        """
        old = self._values
        same = (
            type(values) is type(old) is Tensor
            and values.shape == old.shape
            and values.stride() == old.stride()
        )
        return NestedTensor(values, self._structure, self._ragged_dim, like=self if same else None)

    def become(self, other: NestedTensor) -> NestedTensor:
        """Takes over the shape and values of `other`, for in-place view operators; returns itself."""
        with _disable_function():
            self.data = other
        for name in ("_values", "_structure", "_ragged_dim", "_size", "_strides"):
            setattr(self, name, getattr(other, name))
        return self

    # how an operator arrives

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if _transforming():
            return _hooks["transformed"](func, args, kwargs or {})
        if _jit_tracing() is not None:
            raise errors.no_jit_trace()
        handler = _FUNCTIONS.get(func)
        if handler is not None:
            if _compat.fake_mode_active():
                return _compat.traced(handler, args, kwargs or {})
            return handler(*args, **kwargs) if kwargs else handler(*args)
        if kwargs:
            args, kwargs = _hooks["unify_named"](func, args, kwargs)
        elif len(args) > 1:
            args = _hooks["unify"](func, args)
        if kwargs is None:
            kwargs = {}
        if torch.compiler.is_compiling() or _compat.proxy_tracing():
            with _disable_function():
                return _compat.traced(func, args, kwargs)
        try:
            with _disable_function():
                return func(*args, **kwargs)
        except errors.Undeclared as missing:
            return _hooks["undeclared"](func, args, kwargs, missing)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        rule = _RESOLVED.get(func)
        if rule is None:
            rule = registry.lookup(func)
        if cls._lazy_bits_seen:
            with _compat.lazy_bits_resolved():
                return rule(func, args, kwargs or {})
        return rule(func, args, kwargs or {})

    # what users read

    @property
    def shape(self) -> torch.Size:
        """(B, j1, *): the ragged size is a symbol, equal for tensors of one structure."""
        if torch.compiler.is_compiling():
            return _SHAPE.__get__(self)  # type: ignore[attr-defined]
        return torch.Size(self._size)

    @property
    def ragged_dim(self) -> int:
        """The dim whose size varies from component to component."""
        return self._ragged_dim

    @property
    def structure(self) -> Structure:
        """Offsets, lengths and bounds, shared with every tensor of the same batch."""
        return self._structure

    @property
    def min_seqlen(self) -> int:
        """The shortest length; settable to give a known bound."""
        return self._structure.min_seqlen

    @min_seqlen.setter
    def min_seqlen(self, bound: int) -> None:
        self._structure.set_bounds(min_seqlen=bound)

    @property
    def max_seqlen(self) -> int:
        """The longest length; settable to give a known bound."""
        return self._structure.max_seqlen

    @max_seqlen.setter
    def max_seqlen(self, bound: int) -> None:
        self._structure.set_bounds(max_seqlen=bound)

    @property
    def seqlens(self) -> Tensor:
        """(B,) lengths of the components."""
        return self._structure.seqlens

    def offsets(self) -> Tensor:
        """(B + 1,) start of each component in `values()`."""
        return self._structure.offsets

    def lengths(self) -> Tensor | None:
        """(B,) rows in use of each component, or None if there are no gaps."""
        return self._structure.lengths

    def values(self) -> Tensor:
        """The packed values, one dim fewer than the nested tensor: a view, gaps included."""
        if self.dtype.is_complex:
            return _hooks["complex_values"](self)
        return torch.ops.aten._nested_get_values.default(self)

    # torch's own would multiply the sizes, of which one is no number
    def numel(self) -> Any:
        """How many elements the components have; gaps are not counted."""
        return _hooks["numel"](self)

    @property
    def nbytes(self) -> Any:
        """Bytes of the elements that `numel` counts."""
        return self.numel() * self._values.element_size()

    def __len__(self) -> int:
        return self._structure.batch_size

    def __iter__(self) -> Any:
        return iter(self.unbind())

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        shape = ", ".join(str(s) for s in self._size)
        parts = [f"size=({shape})"]
        if not self._structure.is_traced:
            parts.append(f"lengths={errors._lengths_text(self._structure.host_lengths())}")
        if self.dtype is not torch.get_default_dtype():
            parts.append(f"dtype={self.dtype}")
        if self.device.type != "cpu":
            parts.append(f"device='{self.device}'")
        if self.grad_fn is not None:
            parts.append(f"grad_fn=<{type(self.grad_fn).__name__}>")
        elif self.requires_grad:
            parts.append("requires_grad=True")
        return f"NestedTensor({', '.join(parts)})"

    # what Dynamo asks about our outer sizes: the number of components and their lengths vary

    @property
    def _dynamo_unbacked_indices(self) -> set[int]:
        return _compat.UNKNOWN_DIMS

    @_dynamo_unbacked_indices.setter
    def _dynamo_unbacked_indices(self, dims: set[int]) -> None:
        pass  # copied along by Dynamo

    def _get_dynamic_dims(self) -> set[int]:
        return self.__dict__.get("_dynamic_dims") or {0, self._ragged_dim}

    def _set_dynamic_dims(self, dims: set[int]) -> None:
        self._dynamic_dims = dims

    locals()[_compat.DYNAMIC_DIMS] = property(_get_dynamic_dims, _set_dynamic_dims)

    # An optimizer's tensors would go into its graph as constants; a graph takes nested tensors as inputs only.

    @property
    def _dynamo_static_input_type(self) -> str | None:
        return self.__dict__.get("_static_input")

    @_dynamo_static_input_type.setter
    def _dynamo_static_input_type(self, kind: str) -> None:
        self._static_input = "unguarded"

    # names that programs written for torch's class read or assign

    @property
    def _offsets(self) -> Tensor:
        return self._structure.offsets

    @property
    def _lengths(self) -> Tensor | None:
        return self._structure.lengths

    @property
    def _extent(self) -> Tensor | None:
        return self._structure.extent

    @property
    def _ragged_idx(self) -> int:
        return self._ragged_dim

    @_ragged_idx.setter
    def _ragged_idx(self, ragged_dim: int) -> None:
        if not 1 <= ragged_dim <= self._values.dim():
            raise errors.bad_value(
                "_ragged_idx",
                f"ragged dim {ragged_dim} for values of {self._values.dim()} dims",
                f"a dim in 1..{self._values.dim()}",
                "Count the batch dim as 0.",
            )
        if ragged_dim != self._ragged_dim:
            self.become(NestedTensor(self._values, self._structure, ragged_dim))

    @property
    def _max_seqlen(self) -> int:
        return self._structure.max_seqlen

    @_max_seqlen.setter
    def _max_seqlen(self, bound: int) -> None:
        self._structure.set_bounds(max_seqlen=bound)

    @property
    def _min_seqlen(self) -> int:
        return self._structure.min_seqlen

    @_min_seqlen.setter
    def _min_seqlen(self, bound: int) -> None:
        self._structure.set_bounds(min_seqlen=bound)

    def _is_contiguous_or_false(self) -> bool:
        return not self._structure.has_gaps and self._values.is_contiguous()

    def _get_max_seqlen(self) -> int:
        return self._structure.max_seqlen

    def _get_min_seqlen(self) -> int:
        return self._structure.min_seqlen

    @property
    def _maybe_max_seqlen(self) -> int | None:
        return self._structure.known_max_seqlen

    @property
    def _maybe_min_seqlen(self) -> int | None:
        return self._structure.known_min_seqlen

    @property
    def _metadata_cache(self) -> dict[str, Any]:
        known = {
            "max_seqlen": self._structure.known_max_seqlen,
            "min_seqlen": self._structure.known_min_seqlen,
        }
        return {name: bound for name, bound in known.items() if bound is not None}

    @_metadata_cache.setter
    def _metadata_cache(self, cache: dict[str, Any]) -> None:
        self._structure.set_bounds(cache.get("min_seqlen"), cache.get("max_seqlen"))

    @property
    def _max_seqlen_tensor(self) -> Tensor | None:
        return self._structure.extent

    @property
    def _min_seqlen_tensor(self) -> Tensor | None:
        return self._structure.extent


@_compat.one_node
def _bound_carrier(x: NestedTensor, d: int) -> Tensor:
    """A tensor whose size in dim `d` is the longest (0) or shortest (1) length plus 2: a number in a graph."""
    structure = x._structure
    carrier = structure.extent
    if carrier is not None and carrier.shape[d] != 1:
        return carrier
    bound = structure.min_seqlen if d else structure.max_seqlen
    return torch.empty(bound + 2, bound + 2, 0)


@_compat.one_node
def _offsets_or_lengths(x: NestedTensor, which: str) -> Tensor:
    found: Tensor = getattr(x._structure, which)
    return found.view_as(found)


def _traced_max(x: NestedTensor) -> Any:
    return _bound_carrier(x, 0).shape[0] - 2


def _traced_min(x: NestedTensor) -> Any:
    return _bound_carrier(x, 1).shape[1] - 2


def _traced_seqlens(x: NestedTensor) -> Tensor:
    return _offsets_or_lengths(x, "seqlens")


# what a program may read inside a compiled function without its value being compiled in
_TRACED_ATTRIBUTES = {
    "max_seqlen": _traced_max,
    "_max_seqlen": _traced_max,
    "min_seqlen": _traced_min,
    "_min_seqlen": _traced_min,
    "seqlens": _traced_seqlens,
}
for _name, _read in _TRACED_ATTRIBUTES.items():
    _compat.trace_attribute(NestedTensor, _name, _read)
_compat.never_traced(
    NestedTensor.__torch_function__.__func__,  # type: ignore[attr-defined]
    NestedTensor.__torch_dispatch__.__func__,  # type: ignore[attr-defined]
)


def _rebuild(
    values: Tensor, structure: Structure, ragged_dim: int, requires_grad: bool
) -> NestedTensor:
    return NestedTensor(values.detach(), structure, ragged_dim, requires_grad)


# set by rooms above, which may not be imported from here
def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], missing: Exception) -> Any:
    raise missing


_hooks: dict[str, Callable[..., Any]] = {"unify": lambda func, args: args, "undeclared": _refuse}

_SHAPE = torch.Tensor.shape
