"""One matrix product a segment of packed rows.

`multiply`: rows (*lead, T, D), matrices (B, *lead, D, E) -> (*lead, T, E), row t times the matrix of its segment.
`contract`: a (*lead, T, D), b (*lead, T, E) -> (B, *lead, D, E), the sum over each segment's rows of a_t^T b_t.
Segment b is rows [offsets[b], offsets[b + 1]) or, with `lengths`, [offsets[b], offsets[b] + lengths[b]). Rows in gaps
are never read and are 0 in results. Each is the other's derivative, so both can be differentiated any number of times.
Knows neither Structure nor NestedTensor. Importing it registers `torch.ops.njt.grouped_multiply` and
`grouped_contract`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from njt import _compat
from njt.kernels import derivatives, padding

MANY = 64  # from so many segments on, one grouped call beats a loop of products (one CPU thread, 4096 rows, 64 x 64)


def multiply(
    rows: Tensor,
    matrices: Tensor,
    offsets: Tensor,
    *,
    lengths: Tensor | None = None,
    width: Any = None,
) -> Tensor:
    """Every row times the matrix of its segment.

    Args:
        rows: (*lead, T, D); matrices: (B, *lead, D, E), same dtype.
        offsets: (B + 1,) int32 or int64; lengths: (B,) rows in use, where there are gaps.
        width: at least the longest segment, where the host knows it.
    Returns:
        (*lead, T, E), new memory.

    >>> multiply(torch.ones(3, 1), torch.tensor([[[2.0]], [[3.0]]]), torch.tensor([0, 1, 3]))
    tensor([[2.],
            [3.],
            [3.]])
    """
    return torch.ops.njt.grouped_multiply(rows, matrices, offsets, lengths, width)


def contract(
    a: Tensor, b: Tensor, offsets: Tensor, *, lengths: Tensor | None = None, width: Any = None
) -> Tensor:
    """The transposed product of each segment, summed over its rows; 0 for an empty segment.

    Args:
        a: (*lead, T, D); b: (*lead, T, E), same dtype.
        offsets, lengths, width: as for `multiply`.
    Returns:
        (B, *lead, D, E), new memory.

    >>> contract(torch.ones(3, 1), torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([0, 1, 3])).flatten()
    tensor([1., 6.])
    """
    return torch.ops.njt.grouped_contract(a, b, offsets, lengths, width)


def _bounds(offsets: Tensor, lengths: Tensor | None) -> list[tuple[int, int]]:
    starts = offsets.tolist()
    if lengths is None:
        return list(pairwise(starts))
    return [(s, s + n) for s, n in zip(starts, lengths.tolist())]


def _groupable(*tensors: Tensor) -> bool:
    """Whether torch's grouped product takes them: plain matrices, rows of a multiple of 16 bytes."""
    first = tensors[0]
    dtypes = (torch.bfloat16,) if first.is_cuda else (torch.float32, torch.bfloat16, torch.float16)
    return first.dtype in dtypes and all(
        t.shape[-1] * t.element_size() % 16 == 0 and t.shape[-1] > 0 and t.data_ptr() % 16 == 0
        for t in tensors
    )


def _ends(offsets: Tensor) -> Tensor:
    return offsets[1:].to(torch.int32)


def _grouped_is_due(offsets: Tensor, *tensors: Tensor) -> bool:
    many = offsets.is_cuda or offsets.shape[0] > MANY
    return many and hasattr(torch, "_grouped_mm") and _groupable(*tensors)


def _padded_width(offsets: Tensor, lengths: Tensor | None, width: Any) -> int:
    if width is not None:
        return width
    sizes = offsets.diff() if lengths is None else lengths
    return int(sizes.max()) if sizes.numel() else 0


def _multiply_kernel(
    rows: Tensor, matrices: Tensor, offsets: Tensor, lengths: Tensor | None, width: int | None
) -> Tensor:
    out = rows.new_empty((*rows.shape[:-1], matrices.shape[-1]))
    single = rows.dim() == 2
    if single and lengths is None and out.numel() and _grouped_is_due(offsets, rows, matrices, out):
        return _compat.grouped_mm(rows.contiguous(), matrices.contiguous(), offs=_ends(offsets))
    if rows.is_cuda:  # a padded product: no look at the offsets, waste instead of B launches
        d, full = rows.dim() - 2, _padded_width(offsets, lengths, width)
        padded = padding.packed_to_padded(rows, offsets, full, lengths=lengths, values_dim=d)
        product = padded @ matrices
        return padding.padded_to_packed(
            product, offsets, rows.shape[d], lengths=lengths, values_dim=d
        )
    if lengths is not None:
        out.zero_()
    d = rows.dim() - 2
    for (start, stop), matrix in zip(_bounds(offsets, lengths), matrices.unbind()):
        if stop > start:
            torch.matmul(
                rows.narrow(d, start, stop - start), matrix, out=out.narrow(d, start, stop - start)
            )
    return out


def _contract_kernel(
    a: Tensor, b: Tensor, offsets: Tensor, lengths: Tensor | None, width: int | None
) -> Tensor:
    count = offsets.shape[0] - 1
    out = a.new_empty((count, *a.shape[:-2], a.shape[-1], b.shape[-1]))
    single = a.dim() == 2
    if single and lengths is None and out.numel() and a.shape[0] and _grouped_is_due(offsets, a, b):
        return _compat.grouped_mm(a.contiguous().t(), b.contiguous(), offs=_ends(offsets))
    d = a.dim() - 2
    if a.is_cuda:
        full = _padded_width(offsets, lengths, width)
        left, right = (
            padding.packed_to_padded(x, offsets, full, lengths=lengths, values_dim=d)
            for x in (a, b)
        )
        return left.mT @ right
    for (start, stop), one in zip(_bounds(offsets, lengths), out.unbind()):
        if stop > start:
            left, right = a.narrow(d, start, stop - start), b.narrow(d, start, stop - start)
            torch.matmul(left.mT, right, out=one)
        else:
            one.zero_()
    return out


def _multiply_fake(rows: Tensor, matrices: Tensor, offsets: Tensor, *rest: Any) -> Tensor:
    # sizes are tied here, early: a size that AOTAutograd finds to be a constant only later is one input too many
    _same(rows.shape[-1], matrices.shape[-2])
    _same(offsets.shape[0] - 1, matrices.shape[0])
    for n, m in zip(rows.shape[:-2], matrices.shape[1:-2]):
        _same(n, m)
    return rows.new_empty((*rows.shape[:-1], matrices.shape[-1]))


def _contract_fake(a: Tensor, b: Tensor, offsets: Tensor, *rest: Any) -> Tensor:
    for n, m in zip(a.shape[:-1], b.shape[:-1]):
        _same(n, m)
    return a.new_empty((offsets.shape[0] - 1, *a.shape[:-2], a.shape[-1], b.shape[-1]))


def _same(n: Any, m: Any) -> None:
    torch._check(n == m, lambda: f"grouped product: got sizes {n} and {m} that must agree")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    first, second, offsets, lengths, ctx.width = inputs
    ctx.save_for_backward(first, second, offsets, lengths)


def _multiply_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, matrices, offsets, lengths = ctx.saved_tensors
    where: dict[str, Any] = {"lengths": lengths, "width": ctx.width}
    wanted = ctx.needs_input_grad
    grad_rows = multiply(grad, matrices.mH, offsets, **where) if wanted[0] else None
    grad_matrices = contract(rows.conj(), grad, offsets, **where) if wanted[1] else None
    return grad_rows, grad_matrices, None, None, None


def _contract_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, offsets, lengths = ctx.saved_tensors
    where: dict[str, Any] = {"lengths": lengths, "width": ctx.width}
    wanted = ctx.needs_input_grad
    # of out = a^T b: a gets b grad^H, rows by rows; conjugates matter for complex numbers only
    grad_a = multiply(b, grad.mH, offsets, **where).conj().resolve_conj() if wanted[0] else None
    grad_b = multiply(a.conj(), grad, offsets, **where) if wanted[1] else None
    return grad_a, grad_b, None, None, None


_library = torch.library.Library("njt", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_REST = "Tensor offsets, Tensor? lengths, SymInt? width) -> Tensor"
_library.define(f"grouped_multiply(Tensor rows, Tensor matrices, {_REST}", tags=_TAGS)
_library.define(f"grouped_contract(Tensor a, Tensor b, {_REST}", tags=_TAGS)
for _key in ("CPU", "CUDA"):
    _library.impl("grouped_multiply", _multiply_kernel, _key)
    _library.impl("grouped_contract", _contract_kernel, _key)
torch.library.register_fake("njt::grouped_multiply", _multiply_fake, lib=_library)
torch.library.register_fake("njt::grouped_contract", _contract_fake, lib=_library)
derivatives.register(_library, "grouped_multiply", _multiply_backward, _setup_context)
derivatives.register(_library, "grouped_contract", _contract_backward, _setup_context)
