"""Attention on ragged batches: njt against torch's own class, a loop, and a padded batch with a mask.

    python benchmarks/attention.py [--device cuda] [--quick] [--json FILE] [--only NAME] [--tilings]

All peers of a row run interleaved in one process; a figure is the median of njt over the median of the
peer, so below 1 njt is faster. CPU: process time, one thread. CUDA: time between events, with enough
calls between two events that the queue never runs dry for long batches, and host cost shows for tiny ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from njt.attention import varlen_backends
from njt.attention.varlen import varlen_attention
from njt.attention.varlen_call import Call

try:
    from njt.attention import varlen_triton
except ImportError:
    varlen_triton = None

aten = torch.ops.aten


@dataclass(frozen=True)
class Shape:
    """One batch: its lengths, heads, head size, and whether it is masked causally."""

    name: str
    lengths: tuple[int, ...]
    heads: int
    width: int
    causal: bool = False


def uniform(count: int, longest: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(1, longest + 1, (count,), generator=generator).tolist())


def lognormal(count: int, longest: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(count, generator=generator).exp() * longest / 5
    return tuple(drawn.clamp(1, longest).int().tolist())


CPU = (
    Shape("tiny batch, 8 up to 64", uniform(8, 64), 8, 64),
    Shape("64 up to 64", uniform(64, 64), 8, 64),
    Shape("64 up to 256", uniform(64, 256), 8, 64),
    Shape("16 up to 1024", uniform(16, 1024), 8, 64),
    Shape("4096 up to 8", uniform(4096, 8), 8, 64),
    Shape("4096 up to 32", uniform(4096, 32), 4, 32),
    Shape("4096 up to 8, 2 heads of 16", uniform(4096, 8), 2, 16),
    Shape("64 of 64 each", (64,) * 64, 8, 64),
    Shape("64 up to 64, causal", uniform(64, 64), 8, 64, True),
    Shape("512 up to 128, causal", uniform(512, 128), 4, 32, True),
)
CUDA = (
    Shape("tiny batch, 8 up to 64", uniform(8, 64), 8, 64),
    Shape("long, lognormal up to 4096", lognormal(64, 4096), 16, 128),
    Shape("long, causal", lognormal(64, 4096), 16, 128, True),
    Shape("2048 up to 256, D 64", uniform(2048, 256), 16, 64),
    Shape("2048 up to 256, D 128", uniform(2048, 256), 16, 128),
    Shape("8192 up to 64, D 64", uniform(8192, 64), 16, 64),
    Shape("equal, 32 of 1024", (1024,) * 32, 16, 64),
)


class Batch:
    """Packed inputs of a shape, and each peer as a function that returns its output."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype) -> None:
        total = sum(shape.lengths)
        self.shape, self.longest = shape, max(shape.lengths)
        self.offsets = torch.tensor([0, *shape.lengths]).cumsum(0).to(device)
        self.cu_seqlens = self.offsets.int()
        # chunks of one projection, as a model has them
        self.leaf = torch.randn(
            total, 3 * shape.heads * shape.width, device=device, dtype=dtype, requires_grad=True
        )
        self.cotangent = torch.randn(total, shape.heads, shape.width, device=device, dtype=dtype)
        self.contiguous = [x.detach().contiguous().requires_grad_() for x in self.packed()]
        self.fits_padded = len(shape.lengths) * self.longest**2 * shape.heads < 2**31
        if self.fits_padded:
            there = torch.arange(self.longest, device=device) < self.offsets.diff()[:, None]
            self.mask = there[:, None, None, :]
            self.rectangles = []
            for x in self.contiguous:
                whole = x.new_zeros(*there.shape, *x.shape[1:])
                whole[there] = x.detach()
                self.rectangles.append(whole.transpose(1, 2).requires_grad_())

    def packed(self) -> list[Tensor]:
        return [
            c.unflatten(-1, (self.shape.heads, self.shape.width)) for c in self.leaf.chunk(3, -1)
        ]

    def njt(self) -> Tensor:
        return varlen_attention(
            *self.packed(),
            self.offsets,
            self.offsets,
            max_q=self.longest,
            max_k=self.longest,
            is_causal=self.shape.causal,
        )

    def loop(self) -> Tensor:
        parts = zip(*(x.split(self.shape.lengths) for x in self.packed()), strict=True)
        return torch.cat(
            [
                F.scaled_dot_product_attention(
                    *(x.transpose(0, 1)[None] for x in part), is_causal=self.shape.causal
                )[0].transpose(0, 1)
                for part in parts
            ]
        )

    def torch_nested(self) -> Tensor:
        """On contiguous inputs of its own: it takes no chunks."""
        q, k, v = (
            torch.nested.nested_tensor_from_jagged(
                x, self.offsets, min_seqlen=min(self.shape.lengths), max_seqlen=self.longest
            ).transpose(1, 2)
            for x in self.contiguous
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.shape.causal)
        return out.transpose(1, 2).values()

    def padded(self) -> Tensor:
        """Attention alone, on a batch that was padded before: no conversion is counted."""
        mask = None if self.shape.causal else self.mask
        return F.scaled_dot_product_attention(*self.rectangles, mask, is_causal=self.shape.causal)

    def backward(self, out: Tensor) -> None:
        if out.dim() == 4:
            torch.autograd.grad(out, self.rectangles, torch.ones_like(out))
        else:
            torch.autograd.grad(out, self.leaf, self.cotangent)

    def backward_contiguous(self, out: Tensor) -> None:
        torch.autograd.grad(out, self.contiguous, self.cotangent)


class RawFlash:
    """torch's flash kernels called on int32 offsets, with nothing around them (CUDA)."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def forward(self) -> tuple[Any, ...]:
        batch = self.batch
        self.inputs = [x.detach() for x in batch.packed()]
        n = batch.longest
        cu_seqlens = batch.cu_seqlens
        return aten._flash_attention_forward(
            *self.inputs, cu_seqlens, cu_seqlens, n, n, 0.0, batch.shape.causal, False
        )

    def both(self) -> Any:
        batch, n = self.batch, self.batch.longest
        out, logsumexp, seed, offset, _ = self.forward()
        found = aten._flash_attention_backward(
            batch.cotangent,
            *self.inputs,
            out,
            logsumexp,
            batch.cu_seqlens,
            batch.cu_seqlens,
            n,
            n,
            0.0,
            batch.shape.causal,
            seed,
            offset,
        )
        # the gradient of the projection that the three are chunks of
        return torch.cat([g.flatten(1) for g in found], -1)


def peers(batch: Batch, device: str) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Forward, and forward with backward, of everyone who can run this batch."""

    def pair(
        run: Callable[[], Tensor], backward: Callable[[Tensor], None] = batch.backward
    ) -> tuple[Callable[[], Any], Callable[[], Any]]:
        def forward() -> Tensor:
            with torch.no_grad():
                return run()

        return forward, lambda: backward(run())

    found = {"njt": pair(batch.njt)}
    if device == "cpu" or len(batch.shape.lengths) <= 64:
        found["loop"] = pair(batch.loop)
    if not batch.shape.causal:
        found["torch nested"] = pair(batch.torch_nested, batch.backward_contiguous)
    if batch.fits_padded:
        found["padded"] = pair(batch.padded)
    if device == "cuda":
        raw = RawFlash(batch)
        found["raw flash"] = raw.forward, raw.both
        found["njt triton"] = tuple(map(forced_triton, found["njt"]))
    return found


def forced_triton(run: Callable[[], Any]) -> Callable[[], Any]:
    def inner() -> Any:
        with varlen_backends.force("triton"):
            return run()

    return inner


def try_tilings(shape: Shape, dtype: torch.dtype) -> None:
    """Milliseconds of the Triton kernels by block sizes, warps and stages (CUDA)."""
    batch = Batch(shape, "cuda", dtype)
    q, k, v = (x.detach() for x in batch.packed())
    n = batch.longest
    call = Call(batch.offsets, batch.offsets, None, None, n, n, shape.causal, 0.1, 0.0, "triton")
    out, logsumexp = varlen_triton.forward(q, k, v, call)
    grad = batch.cotangent
    parts = {
        "forward": lambda: varlen_triton.forward(q, k, v, call),
        "backward": lambda: varlen_triton.backward(grad, q, k, v, out, logsumexp, call),
    }
    print(f"{shape.name}: milliseconds by (block_m, block_n, warps, stages)")
    for part, run in parts.items():
        kernels = [name for name in varlen_triton.TILINGS if name.startswith(part)]
        for kernel in kernels:
            before, found = varlen_triton.TILINGS[kernel], []
            blocks = (64, 64), (128, 64), (64, 128), (128, 128), (32, 64)
            for block, launch in itertools.product(blocks, ((4, 2), (4, 3), (8, 2))):
                sizes = *block, *launch
                varlen_triton.TILINGS[kernel] = varlen_triton.Tiling(*sizes)
                try:
                    run()
                    found.append((seconds(run, "cuda", 5) * 1e3, sizes))
                except Exception:  # too large for the device, or refused by the compiler
                    continue
            varlen_triton.TILINGS[kernel] = before
            if not found:
                print(f"  {kernel}: nothing ran")
                continue
            best = ", ".join(f"{ms:.3f} {sizes}" for ms, sizes in sorted(found)[:4])
            print(f"  {kernel}: {best}; slowest {max(found)[0]:.3f}", flush=True)


def seconds(run: Callable[[], Any], device: str, calls: int) -> float:
    if device == "cpu":
        start = time.process_time()
        for _ in range(calls):
            run()
        return (time.process_time() - start) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def measure(runs: dict[str, Callable[[], Any]], device: str, budget: float) -> dict[str, float]:
    """Median seconds of each, interleaved; who fails or takes too long is left out."""
    calls, medians = {}, {}
    for name, run in runs.items():
        try:
            run()
            once = seconds(run, device, 1)
        except Exception as error:  # a peer that cannot is no reason to stop
            print(f"    {name}: {str(error).splitlines()[0][:90]}")
            continue
        calls[name] = max(1, min(50, int(0.02 / max(once, 1e-6))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    started = time.perf_counter()
    while len(times["njt"]) < 25 and (
        len(times["njt"]) < 3 or time.perf_counter() - started < budget
    ):
        for name, count in calls.items():
            times[name].append(seconds(runs[name], device, count))
    for name, taken in times.items():
        medians[name] = statistics.median(taken)
    return medians


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default=None, help="default: float32 on CPU, bfloat16 on CUDA")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--json", default=None)
    parser.add_argument("--tilings", action="store_true", help="try the Triton block sizes (CUDA)")
    args = parser.parse_args(arguments)
    device = args.device
    dtype = getattr(torch, args.dtype or ("float32" if device == "cpu" else "bfloat16"))
    if device == "cpu":
        torch.set_num_threads(1)
    # torch's class says that it is a prototype, and why it has no backend
    warnings.filterwarnings("ignore", message=".*nested.*")
    logging.getLogger("torch").setLevel(logging.ERROR)
    if args.tilings:
        for shape in CUDA:
            if "up to" in shape.name and args.only in shape.name and "long" not in shape.name:
                try_tilings(shape, dtype)
        return
    names = ["loop", "torch nested", "padded"]
    if device == "cuda":
        names += ["raw flash", "njt triton"]
    print(f"njt, then njt / peer ({device}, {dtype}, torch {torch.__version__})")
    print(f"{'batch':32}{'':9}{'njt ms':>9}" + "".join(f"{n:>14}" for n in names))
    rows = []
    for shape in CPU if device == "cpu" else CUDA:
        if args.only not in shape.name:
            continue
        batch = Batch(shape, device, dtype)
        everyone = peers(batch, device)
        for i, kind in enumerate(("forward", "fwd+bwd")):
            runs = {name: both[i] for name, both in everyone.items()}
            found = measure(runs, device, 1.0 if args.quick else 6.0)
            ratios = {n: found["njt"] / found[n] for n in names if n in found}
            cells = "".join(f"{ratios[n]:14.2f}" if n in ratios else f"{'-':>14}" for n in names)
            print(f"{shape.name:32}{kind:9}{found['njt'] * 1e3:9.3f}{cells}", flush=True)
            rows.append({"batch": shape.name, "kind": kind, "seconds": found, "ratio": ratios})
        del batch, everyone
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": device, "dtype": str(dtype), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
