"""Programs for `torch.export`: what is nested becomes operators on values, offsets and bounds.

torch.export itself can't take nested tensors, neither as inputs nor inside: it refuses, and names `njt.export`.
May import everything but drop_in and testing.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from njt import _compat, errors
from njt.structure import Structure
from njt.tensor import NestedTensor

__all__ = ["export"]


def export(
    module: nn.Module,
    args: tuple[Any, ...],
    *,
    dynamic_shapes: Any = None,
    strict: bool = False,
) -> torch.export.ExportedProgram:
    """Exports a module that takes, makes or returns nested tensors, for inference.

    The program has plain tensors only. Where the module takes or returns a nested tensor `x`, itself or in a tuple,
    list or dict, the program has the tuple `(x.values(), x.offsets())`, with gaps `(.., x.lengths())`.

    Args:
        module: its parameters and buffers keep their names.
        args: example inputs with more than one component and row, so that no size is 0 or 1.
        dynamic_shapes: as for `torch.export.export`, for the program's arguments, a tuple in the order of `args` or a
            dict. For a nested argument None, the default, leaves the number of components and of rows open.
        strict: as for `torch.export.export`.
    Returns:
        a program to run, save, or package with AOTInductor. It checks sizes that the module asked about, and may refuse
        batches of less than two components.

    >>> class Double(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x * 2
    >>> x = njt.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)])
    >>> program = njt.export(Double(), (x,))
    >>> values, offsets = program.module()((torch.ones(4, 2), torch.tensor([0, 1, 2, 4])))
    >>> njt.nested_tensor_from_jagged(values, offsets)
    NestedTensor(size=(3, j1, 2), lengths=[1, 1, 2])
    """
    given, spec = _compat.tree_flatten(args)
    parts = [_parts(leaf) for leaf in given]
    plain = _compat.tree_unflatten(parts, spec)
    names = _argument_names(module, len(args))
    shapes = _shapes(args, dynamic_shapes, names)
    leaves, plain_spec = _compat.tree_flatten(plain)
    leaves = _apart(leaves)
    plain = _compat.tree_unflatten(leaves, plain_spec)

    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    result_spec: list[Any] = []

    def flat(*inputs: Any) -> list[Any]:
        mine = dict(zip(state, inputs))
        rest = iter(inputs[len(state) :])
        again = [_whole(leaf, rest) for leaf in given]
        nested_args = _compat.tree_unflatten(again, spec)
        out = torch.func.functional_call(module, mine, nested_args)
        out_leaves, out_spec = _compat.tree_flatten(out)
        plain_leaves, plain_out = _compat.tree_flatten(
            _compat.tree_unflatten([_parts(leaf) for leaf in out_leaves], out_spec)
        )
        result_spec.append(plain_out)
        return plain_leaves

    closed: list[set[int]] = [set()] * len(state)
    with torch.no_grad():
        graph = _compat.flat_graph(
            flat, [*state.values(), *leaves], [*closed, *_open_dims(plain, shapes)]
        )
        specs = plain_spec, result_spec[-1]
        flattened = _compat.module_of_graph(graph, module, list(state), names, specs)
        return torch.export.export(flattened, plain, dynamic_shapes=shapes, strict=strict)


def _parts(leaf: Any) -> Any:
    """What the program has for a leaf."""
    if not isinstance(leaf, NestedTensor):
        return leaf
    if leaf._ragged_dim != 1:
        raise errors.unsupported(
            "export",
            f"{errors.describe(leaf)}, ragged in dim {leaf._ragged_dim}, as an argument or result",
            "ragged dim 1",
            "Transpose inside the module.",
        )
    structure = leaf._structure
    values = leaf._values.detach()
    if structure.lengths is None:
        return values, structure.offsets
    return values, structure.offsets, structure.lengths


def _whole(leaf: Any, inputs: Any) -> Any:
    """The reverse, for an argument like `leaf`."""
    if not isinstance(leaf, NestedTensor):
        return next(inputs)
    values, offsets = next(inputs), next(inputs)
    lengths = next(inputs) if leaf._structure.has_gaps else None
    return NestedTensor(values, Structure.find(offsets, lengths))


def _apart(leaves: list[Any]) -> list[Any]:
    """The leaves, of which no two are one tensor: the program gets two, that may differ."""
    seen: set[int] = set()
    apart = []
    for leaf in leaves:
        apart.append(leaf.clone() if isinstance(leaf, Tensor) and id(leaf) in seen else leaf)
        seen.add(id(leaf))
    return apart


def _argument_names(module: nn.Module, count: int) -> list[str]:
    names: list[str] = []
    for name, parameter in inspect.signature(module.forward).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}_{i}" for i in range(count - len(names))]
        names.append(name)
    return names[:count]


def _shapes(args: tuple[Any, ...], given: Any, names: list[str]) -> Any:
    """`dynamic_shapes` for plain arguments, in their order; open where nothing is said about a nested one."""
    if isinstance(given, dict):
        given = [given.get(name) for name in names]
    return tuple(_open(list(args), given))


_VARIES = {0: torch.export.Dim.DYNAMIC}


def _open(arg: Any, given: Any) -> Any:
    if isinstance(arg, NestedTensor) and given is None:
        return (_VARIES,) * (3 if arg._structure.has_gaps else 2)
    if isinstance(arg, (tuple, list)):
        each = [None] * len(arg) if given is None else given
        inside = [_open(a, g) for a, g in zip(arg, each, strict=True)]
        return inside if isinstance(arg, list) else tuple(inside)
    if isinstance(arg, dict):
        return {k: _open(a, None if given is None else given.get(k)) for k, a in arg.items()}
    return given


def _open_dims(plain: Any, shapes: Any) -> list[set[int]]:
    """Of each leaf, the dims that `dynamic_shapes` leaves open."""
    if isinstance(plain, (tuple, list)):
        return [dims for p, s in zip(plain, shapes) for dims in _open_dims(p, s)]
    if isinstance(plain, dict):
        return [dims for k, p in plain.items() for dims in _open_dims(p, shapes[k])]
    by_dim = shapes.items() if isinstance(shapes, dict) else enumerate(shapes or ())
    closed = (None, torch.export.Dim.STATIC)
    return [{d for d, size in by_dim if not isinstance(size, int) and size not in closed}]
