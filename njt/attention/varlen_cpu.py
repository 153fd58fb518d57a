"""Attention over packed rows on CPU: sequences of equal lengths go through one flash call.

query (total_q, H, D), key (total_k, Hk, D), value (total_k, Hk, D) -> (total_q, H, D) and logsumexp
(total_q, H). A plan, made once for a batch from the lengths on the host, says which rows form a
block (n, L, H, D). Blocks are views where their rows are evenly spaced, else gathered by one index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from njt.attention.varlen_call import Call
from njt.attention.varlen_memo import Memo

aten = torch.ops.aten

# Where a sequence has more bytes, moving them costs more than the call that a shared block saves.
_GATHERED_BYTES = 64 * 1024
# One gathered block, a thread: it stays in cache between the gather, the flash call and the write.
_BLOCK_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of n sequences of equal length lie: evenly spaced, or listed in `index`."""

    n: int
    length: int
    start: int
    step: int  # rows between the starts of two sequences; unused with an index
    index: Tensor | None  # (n * length,) int64

    def read(self, packed: Tensor) -> Tensor:
        """(total, H, *) -> (n, H, length, *), a view if the rows are evenly spaced."""
        if self.index is not None:
            rows = packed.index_select(0, self.index)
            return rows.view(self.n, self.length, *rows.shape[1:]).transpose(1, 2)
        return self._view(packed)

    def write(self, packed: Tensor, block: Tensor) -> None:
        """Copies (n, H, length, *) into its rows of contiguous (total, H, *)."""
        if self.index is None:
            self._view(packed).copy_(block)
        else:
            rows = block.transpose(1, 2).reshape(self.index.shape[0], -1)
            packed = packed.view(packed.shape[0], -1)
            if rows.shape[1] * rows.element_size() % 16 == 0:
                # index_copy_ works by elements: the fewer, the better (a third of the time)
                rows, packed = rows.view(torch.complex128), packed.view(torch.complex128)
            packed.index_copy_(0, self.index, rows)

    def _view(self, packed: Tensor) -> Tensor:
        heads, *features = packed.shape[1:]
        row, head, *feature = packed.stride()
        return packed.as_strided(
            (self.n, heads, self.length, *features),
            (self.step * row, head, row, *feature),
            packed.storage_offset() + self.start * row,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The blocks of one batch, and whether they cover every row, in order, as a single view."""

    blocks: tuple[tuple[Rows, Rows], ...]
    covers_q: bool
    covers_k: bool

    def is_whole(self, total_q: int, total_k: int) -> bool:
        """One view over all rows: its flash call needs no copy on either side."""
        if len(self.blocks) != 1:
            return False
        q, k = self.blocks[0]
        return _is_whole(q, total_q) and _is_whole(k, total_k)


_memo = Memo()


def plan_of(call: Call, query: Tensor, key: Tensor) -> Plan:
    """The plan of a call, kept as long as its offsets and lengths live."""
    total_q, heads, width = query.shape
    total_k = key.shape[0]
    row_bytes = max(1, heads * width * query.element_size())
    limits = _GATHERED_BYTES // row_bytes, _BLOCK_BYTES * torch.get_num_threads() // row_bytes
    q, k = (call.q_offsets, call.q_lengths), (call.k_offsets, call.k_lengths)
    shared = q[0] is k[0] and q[1] is k[1]
    sources = tuple(x for x in (q if shared else q + k) if x is not None)

    def make() -> Plan:
        q_side = _host(*q)
        k_side = q_side if shared else _host(*k)
        return make_plan(*q_side, *k_side, total_q, total_k, *limits)

    # which of two sources is what: the count of sources says it only together with the kinds
    kinds = (call.q_lengths is None, call.k_lengths is None, shared)
    return _memo.get(sources, (kinds, total_q, total_k, limits), make)


def _host(offsets: Tensor, lengths: Tensor | None) -> tuple[list[int], list[int]]:
    bounds = offsets.tolist()
    starts = bounds[:-1]
    if lengths is not None:
        return starts, lengths.tolist()
    return starts, [stop - start for start, stop in zip(starts, bounds[1:], strict=True)]


def make_plan(
    q_starts: Sequence[int],
    q_lengths: Sequence[int],
    k_starts: Sequence[int],
    k_lengths: Sequence[int],
    total_q: int,
    total_k: int,
    longest: int,
    block_rows: int,
) -> Plan:
    """Groups the sequences by their two lengths; those without queries or keys are in no block.

    Sequences of more than `longest` rows are not gathered: one call each. A gathered block has about
    `block_rows` rows.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for i, pair in enumerate(zip(q_lengths, k_lengths, strict=True)):
        groups.setdefault(pair, []).append(i)
    shared = k_starts is q_starts and k_lengths is q_lengths
    blocks: list[tuple[Rows, Rows]] = []
    covered_q = covered_k = 0
    for (length_q, length_k), members in groups.items():
        if not length_q or not length_k:
            continue
        covered_q += length_q * len(members)
        covered_k += length_k * len(members)
        if _step(members, q_starts) and _step(members, k_starts):
            parts = [members]
        else:
            longer = max(length_q, length_k)
            n = max(1, block_rows // longer) if longer <= longest else 1
            parts = [members[i : i + n] for i in range(0, len(members), n)]
        for part in parts:
            q = _rows(part, length_q, q_starts)
            blocks.append((q, q if shared else _rows(part, length_k, k_starts)))
    return Plan(tuple(blocks), covered_q == total_q, covered_k == total_k)


def forward(
    query: Tensor, key: Tensor, value: Tensor, call: Call, keep: bool = True
) -> tuple[Tensor, ...]:
    """Output (total_q, H, D) and to `keep` logsumexp (total_q, H); rows in no block get 0."""
    plan = plan_of(call, query, key)
    is_causal, scale = call.is_causal, call.scale
    query, key, value = (_last_dim_dense(x) for x in (query, key, value))
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    total_q, heads, width = query.shape
    if plan.is_whole(total_q, key.shape[0]):
        q, k = plan.blocks[0]
        out, logsumexp = flash(
            q.read(query), k.read(key), k.read(value), 0.0, is_causal, scale=scale
        )
        return (
            out.transpose(1, 2).reshape(total_q, heads, width),
            logsumexp.transpose(1, 2).reshape(total_q, heads),
        )
    new = torch.empty if plan.covers_q else torch.zeros
    packed = new(total_q, heads, width, dtype=query.dtype, device=query.device)
    sums = new(total_q, heads, dtype=_accumulate(query.dtype), device=query.device)
    for q, k in plan.blocks:
        out, logsumexp = flash(
            q.read(query), k.read(key), k.read(value), 0.0, is_causal, scale=scale
        )
        q.write(packed, out)
        if keep:
            q.write(sums, logsumexp)
    return packed, sums


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, packed as they are; rows in no block get 0."""
    call: Call = rest[-1]
    plan = plan_of(call, query, key)
    is_causal, scale = call.is_causal, call.scale
    grad_out, query, key, value = (_last_dim_dense(x) for x in (grad_out, query, key, value))
    flash = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    whole = plan.is_whole(query.shape[0], key.shape[0])
    grads: tuple[Tensor, ...] = ()
    if not whole:
        new_q = torch.empty if plan.covers_q else torch.zeros
        new_k = torch.empty if plan.covers_k else torch.zeros
        grads = tuple(
            new(x.shape, dtype=x.dtype, device=x.device)
            for new, x in ((new_q, query), (new_k, key), (new_k, value))
        )
    for q, k in plan.blocks:
        found = flash(
            q.read(grad_out),
            q.read(query),
            k.read(key),
            k.read(value),
            q.read(out),
            q.read(logsumexp),
            0.0,
            is_causal,
            scale=scale,
        )
        if whole:
            rows = (query, key, value)
            return tuple(  # type: ignore[return-value]
                g.transpose(1, 2).reshape(x.shape) for g, x in zip(found, rows, strict=True)
            )
        for side, grad, block in zip((q, k, k), grads, found, strict=True):
            side.write(grad, block)
    return grads  # type: ignore[return-value]


def state(query: Tensor, call: Call) -> tuple[Tensor, ...]:
    """The shape of logsumexp."""
    return (query.new_empty(query.shape[:2], dtype=_accumulate(query.dtype)),)


def _rows(members: list[int], length: int, starts: Sequence[int]) -> Rows:
    step = _step(members, starts)
    if step:
        return Rows(len(members), length, starts[members[0]], step, None)
    first = torch.tensor([starts[i] for i in members])
    return Rows(len(members), length, 0, 0, (first.unsqueeze(1) + torch.arange(length)).flatten())


def _step(members: list[int], starts: Sequence[int]) -> int:
    """Rows between the starts of the members; 0 if they are not evenly spaced."""
    if len(members) == 1:
        return 1
    step = starts[members[1]] - starts[members[0]]
    previous = starts[members[0]]
    for i in members[1:]:
        if starts[i] - previous != step:
            return 0
        previous = starts[i]
    return max(step, 0)


def _is_whole(rows: Rows, total: int) -> bool:
    if rows.index is not None or rows.start or rows.n * rows.length != total:
        return False
    return rows.n == 1 or rows.step == rows.length


def _last_dim_dense(x: Tensor) -> Tensor:
    # the flash kernel reads heads and rows by stride, but takes the features as adjacent
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _accumulate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
