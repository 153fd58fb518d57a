"""Einsum: the batch label and the ragged label are kept, summed per component, or summed over everything.

On values an equation of nested operands is an equation without the batch label, where the ragged label counts all rows.
What sums over one component's rows, or brings a dense operand per component, goes to the grouped products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from njt import bridge, errors
from njt.kernels import grouped, segments
from njt.registry import declare_function
from njt.rules.per_token import Tokens
from njt.tensor import NestedTensor

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Term:
    """An operand on values: its labels without the batch label, and whether a dense one has that label first."""

    labels: str
    tensor: Tensor
    per_component: bool = False
    nested: bool = False


def einsum(equation: Any, *operands: Any) -> Any:
    """`torch.einsum` where some operands are nested.

    Args:
        equation: in letters, as torch takes it; "..." stands for dims that all have.
        operands: nested ones share the label of the batch dim, in front, and that of the ragged dim; dense ones
            may have the batch label, in front, and not the ragged one.
    Returns:
        nested if the result has the ragged label, with the batch label in front; else dense.
    Raises:
        RuntimeError: labels that ask for a result ragged in two dims, or mix components.

    >>> x = njt.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    >>> torch.einsum("bjd,bje->bde", x, x).shape
    torch.Size([2, 3, 3])
    """
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        raise errors.bad_type(
            "einsum", "labels as lists", "an equation of letters", 'Write "bjd,de->bje".'
        )
    lefts, out = _parsed(equation.replace(" ", ""), operands)
    x = next(o for o in operands if isinstance(o, NestedTensor))
    labels = next(left for left, o in zip(lefts, operands) if o is x)
    batch, ragged = labels[0], labels[x._ragged_dim]
    terms = _terms(equation, lefts, operands, batch, ragged)
    if (ragged in out and (not out or out[0] != batch)) or (batch in out and out[0] != batch):
        raise _refused(equation, x, f"a result with {batch!r}, the batch, in front")
    if ragged in out:
        rows = _rows(terms, ragged, out[1:], x)
        return bridge.wrap(rows, x._structure, out.index(ragged), x)
    if batch in out:
        return _per_component(terms, ragged, out[1:], x)
    return _rows(terms, ragged, out, x)


def _parsed(equation: str, operands: Sequence[Tensor]) -> tuple[list[str], str]:
    """The labels of each operand and of the result, "..." spelled out."""
    left, arrow, out = equation.partition("->")
    lefts = left.split(",")
    if len(lefts) != len(operands):
        raise errors.bad_shape(
            "einsum",
            f"{equation!r} for {len(operands)} operands",
            "a term for each",
            "Count the commas.",
        )
    free = [c for c in _LETTERS if c not in equation]
    widest = ""
    for k, (term, operand) in enumerate(zip(lefts, operands)):
        if "..." in term:
            count = operand.dim() - len(term) + 3
            spelled = "".join(free[:count][::-1])  # labels line up from the right
            lefts[k] = term.replace("...", spelled)
            widest = max(widest, spelled, key=len)
        if len(lefts[k]) != operand.dim():
            raise errors.bad_shape(
                "einsum",
                f"{term!r} for {errors.describe(operand)}",
                "a label for each dim",
                "Count them.",
            )
    if arrow:
        return lefts, out.replace("...", widest)
    every = "".join(lefts)
    once = sorted(c for c in set(every) if every.count(c) == 1 and c not in widest)
    return lefts, widest + "".join(once)


def _refused(equation: str, x: NestedTensor, expected: str) -> RuntimeError:
    return errors.bad_shape(
        "einsum",
        f"{equation!r} for {errors.describe(x)}",
        expected,
        "Pad first: njt.to_padded_tensor(x, 0.0).",
    )


def _terms(
    equation: str, lefts: list[str], operands: Sequence[Any], batch: str, ragged: str
) -> list[Term]:
    """The operands on values, checked.

    Raises:
        RuntimeError: a batch or ragged label where it can't be, or another batch size.
    """
    x = next(o for o in operands if isinstance(o, NestedTensor))
    tokens = Tokens("einsum", x)
    terms = []
    for labels, operand in zip(lefts, operands):
        if batch in labels[1:]:
            raise _refused(equation, x, f"the batch label {batch!r} in front of each operand")
        if isinstance(operand, NestedTensor):
            if labels[0] != batch or labels[operand._ragged_dim] != ragged:
                raise _refused(
                    equation, operand, f"labels {batch!r} and {ragged!r} of all nested operands"
                )
            rows = tokens.rows(operand)
            if labels.count(ragged) > 1:
                raise _refused(equation, operand, f"the ragged label {ragged!r} once")
            terms.append(Term(labels[1:], rows, nested=True))
            continue
        if ragged in labels:
            raise _refused(equation, x, f"the ragged label {ragged!r} on nested operands only")
        if labels[:1] == batch and operand.shape[0] == 1:
            terms.append(Term(labels[1:], operand.squeeze(0)))
            continue
        if labels[:1] == batch:
            _check_batch(operand, x)
            terms.append(Term(labels[1:], operand, per_component=True))
            continue
        terms.append(Term(labels, operand))
    return terms


def _check_batch(dense: Tensor, x: NestedTensor) -> None:
    torch._check(
        dense.shape[0] == x._structure.batch_size,
        lambda: (
            f"einsum(): got {errors.describe(dense)} with the batch label and {errors.describe(x)}. Expected "
            f"one batch size. Check the batches."
        ),
    )


def _rows(terms: list[Term], ragged: str, out: str, x: NestedTensor) -> Tensor:
    """An equation on rows; dense operands of each component come in by a grouped product, or repeated."""
    if len(terms) == 2 and ragged in out and sum(t.per_component for t in terms) == 1:
        one, each = sorted(terms, key=lambda t: t.per_component)
        if one.nested:
            return _multiplied(one, each, ragged, out, x)
    structure = x._structure
    rows = x._values.shape[x._ragged_dim - 1]
    lefts, tensors = [], []
    for term in terms:
        tensor, labels = term.tensor, term.labels
        if term.per_component:
            tensor = segments.broadcast(
                tensor, structure.offsets, rows, lengths=structure.lengths, dim=0
            )
            labels = ragged + labels
        lefts.append(labels)
        tensors.append(tensor)
    return torch.einsum(f"{','.join(lefts)}->{out}", *tensors)


def _per_component(terms: list[Term], ragged: str, out: str, x: NestedTensor) -> Tensor:
    """The ragged label is summed over, component by component: (B, *out)."""
    if len(terms) == 2 and all(t.nested for t in terms):
        a, b = terms
        return _contracted(a, b, ragged, out, x)
    structure = x._structure
    rows = _rows(terms, ragged, ragged + out, x)
    return segments.sum(rows, structure.offsets, lengths=structure.lengths)


@dataclass(frozen=True)
class _Roles:
    """What each label of two operands does: lead in both and the result, summed in both, or only in one."""

    lead: str
    summed: str
    first: str
    second: str

    @staticmethod
    def of(a: str, b: str, out: str, ragged: str) -> _Roles:
        def pick(keep: Any) -> str:
            return "".join(c for c in dict.fromkeys(a + b) if c != ragged and keep(c))

        return _Roles(
            pick(lambda c: c in a and c in b and c in out),
            pick(lambda c: c in a and c in b and c not in out),
            pick(lambda c: c in a and c not in b),
            pick(lambda c: c in b and c not in a),
        )


def _arranged(
    term: Term, out: str, keep: str, groups: Sequence[str]
) -> tuple[Tensor, dict[str, Any]]:
    """The operand with labels nobody else has summed away, the rest in groups, each one dim; and all sizes."""
    here = "".join(dict.fromkeys(c for c in term.labels if c in keep or c in out))
    tensor = (
        torch.einsum(f"{term.labels}->{here}", term.tensor) if here != term.labels else term.tensor
    )
    sizes = dict(zip(here, tensor.shape))
    order = [c for group in groups for c in group]
    tensor = tensor.permute([here.index(c) for c in order])
    return tensor.reshape([math.prod([sizes[c] for c in group]) for group in groups]), sizes


def _folded(x: NestedTensor, fold: Any) -> dict[str, Any]:
    """Offsets, lengths and width where each row counts `fold` times."""
    structure = x._structure
    width = structure.known_max_seqlen
    return {
        "offsets": structure.offsets * fold,
        "lengths": None if structure.lengths is None else structure.lengths * fold,
        "width": None if width is None else width * fold,
    }


def _multiplied(one: Term, each: Term, ragged: str, out: str, x: NestedTensor) -> Tensor:
    roles = _Roles.of(one.labels, each.labels, out, ragged)
    first = "".join(c for c in roles.first if c in out)
    second = "".join(c for c in roles.second if c in out)
    keep = roles.lead + roles.summed + ragged
    rows, sizes = _arranged(one, out, keep, (roles.lead, ragged + first, roles.summed))
    batch = "*"  # stands for the batch dim, which `_arranged` keeps in front
    per = Term(batch + each.labels, each.tensor)
    matrices, more = _arranged_batch(per, out, keep, (batch, roles.lead, roles.summed, second))
    fold = math.prod([sizes[c] for c in first])
    found = grouped.multiply(rows, matrices, **_folded(x, fold))
    sizes = {**more, **sizes}
    order = [*roles.lead, ragged, *first, *second]
    return found.reshape([sizes[c] for c in order]).permute([order.index(c) for c in out])


def _arranged_batch(
    term: Term, out: str, keep: str, groups: Sequence[str]
) -> tuple[Tensor, dict[str, Any]]:
    """`_arranged` of an operand whose first label is the batch."""
    letter = next(c for c in _LETTERS if c not in term.labels and c not in out and c not in keep)
    labels = letter + term.labels[1:]
    swapped = [group.replace("*", letter) for group in groups]
    return _arranged(Term(labels, term.tensor), out + letter, keep, swapped)


def _contracted(a: Term, b: Term, ragged: str, out: str, x: NestedTensor) -> Tensor:
    roles = _Roles.of(a.labels, b.labels, out, ragged)
    first = "".join(c for c in roles.first if c in out)
    second = "".join(c for c in roles.second if c in out)
    keep = roles.lead + roles.summed + ragged
    left, sizes = _arranged(a, out, keep, (roles.lead, ragged + roles.summed, first))
    right, more = _arranged(b, out, keep, (roles.lead, ragged + roles.summed, second))
    fold = math.prod([sizes[c] for c in roles.summed])
    found = grouped.contract(left, right, **_folded(x, fold))  # (B, lead, first, second)
    sizes = {**more, **sizes}
    order = [*roles.lead, *first, *second]
    found = found.reshape([found.shape[0], *(sizes[c] for c in order)])
    return found.permute([0, *(1 + order.index(c) for c in out)])


declare_function(einsum, torch.einsum)
