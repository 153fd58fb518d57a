"""Segment operators against the dense operator over dim 0 of the same values, and against a copy of them.

    python benchmarks/segments.py [--device cuda] [--quick] [--json FILE] [--only NAME]

All peers of a row run interleaved in one process; a figure is the median of njt over the median of the peer,
so below 1 njt is faster. `read` is one read of the values at the speed of a copy: the limit. CPU: process
time, one thread. CUDA: time between events, over enough calls that the queue never runs dry.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from njt.kernels import segments


@dataclass(frozen=True)
class Shape:
    """B segments of lengths drawn lognormally around the mean, rows of D values."""

    B: int
    mean: int
    D: int

    def lengths(self) -> Tensor:
        drawn = torch.randn(self.B, generator=torch.Generator().manual_seed(0)).exp()
        return (drawn * self.mean / drawn.mean()).long().clamp(min=1)

    def __str__(self) -> str:
        return f"{self.B} x ~{self.mean} x {self.D}"


CPU = (
    Shape(64, 256, 64),
    Shape(1024, 32, 64),
    Shape(16, 1024, 8),
    Shape(4096, 16, 8),
    Shape(8, 2000, 1),
)
CUDA = (
    Shape(2048, 184, 64),
    Shape(64, 6000, 64),
    Shape(65536, 8, 64),
    Shape(2048, 184, 1),
    Shape(4, 100000, 16),
)

# name -> (ours over segments, dense over dim 0)
OPS: dict[str, tuple[Callable[..., Any], Callable[[Tensor], Any]]] = {
    "sum": (segments.sum, lambda x: x.sum(0)),
    "mean": (segments.mean, lambda x: x.mean(0)),
    "amax": (segments.amax, lambda x: x.amax(0)),
    "argmax": (segments.argmax, lambda x: x.argmax(0)),
    "prod": (segments.prod, lambda x: x.prod(0)),
    "var": (segments.var, lambda x: x.var(0)),
    "norm": (segments.vector_norm, lambda x: torch.linalg.vector_norm(x, 2, 0)),
    "logsumexp": (segments.logsumexp, lambda x: x.logsumexp(0)),
    "softmax": (segments.softmax, lambda x: x.softmax(0)),
    "cumsum": (segments.cumsum, lambda x: x.cumsum(0)),
    "cummax": (lambda *a, **k: segments.cummax(*a, **k)[0], lambda x: x.cummax(0)[0]),
    "sort": (lambda *a, **k: segments.sort(*a, **k)[0], lambda x: x.sort(0)[0]),
    "median": (lambda *a, **k: segments.median(*a, **k)[0], lambda x: x.median(0)[0]),
}
WITHOUT_GRADIENT = ("argmax",)


def timed(calls: dict[str, Callable[[], Any]], device: str, seconds: float) -> dict[str, float]:
    """Median seconds of each call, interleaved."""
    cuda = device == "cuda"
    repeat = {}
    for name, call in calls.items():
        call()
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        once = max(time.perf_counter() - start, 1e-6)
        repeat[name] = max(1, min(100, int(seconds / 10 / once)))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(9):
        for name, call in calls.items():
            n = repeat[name]
            if cuda:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(2_000_000)  # calls queue up behind it: launch cost is hidden
                begin.record()
                for _ in range(n):
                    call()
                end.record()
                torch.cuda.synchronize()
                taken[name].append(begin.elapsed_time(end) / 1e3 / n)
            else:
                start = time.process_time()
                for _ in range(n):
                    call()
                taken[name].append((time.process_time() - start) / n)
    return {name: statistics.median(times) for name, times in taken.items()}


def with_backward(run: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Any]:
    leaf = x.detach().requires_grad_()
    cotangent = torch.randn_like(run(x))
    return lambda: torch.autograd.grad(run(leaf), leaf, cotangent)


def row(name: str, shape: Shape, dtype: torch.dtype, device: str, seconds: float) -> dict[str, Any]:
    ours, dense = OPS[name]
    lengths = shape.lengths()
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device)
    x = torch.randn(int(lengths.sum()), shape.D, dtype=dtype, device=device)
    target = torch.empty_like(x)
    where = {"max_seqlen": int(lengths.max())}

    def run(values: Tensor) -> Tensor:
        return ours(values, offsets, **where)

    calls = {"njt": lambda: run(x), "dense": lambda: dense(x), "copy": lambda: target.copy_(x)}
    if name not in WITHOUT_GRADIENT:
        calls["njt+bwd"] = with_backward(run, x)
        calls["dense+bwd"] = with_backward(dense, x)
    t = timed(calls, device, seconds)
    read = t["copy"] / 2
    out = {
        "op": name, "shape": str(shape), "dtype": str(dtype)[6:], "us": t["njt"] * 1e6,
        "fwd/dense": t["njt"] / t["dense"], "fwd/read": t["njt"] / read,
    }  # fmt: skip
    if "njt+bwd" in t:
        out["fwd+bwd/dense"] = t["njt+bwd"] / t["dense+bwd"]
        out["fwd+bwd/read"] = t["njt+bwd"] / read
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quick", action="store_true", help="the first shape only")
    parser.add_argument("--only", help="operators, by comma")
    parser.add_argument("--json", help="write the rows to a file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shapes = CUDA if arguments.device == "cuda" else CPU
    rows = []
    print(
        f"{'op':10} {'shape':22} {'us':>9} {'fwd/dense':>10} {'fwd/read':>9} {'f+b/dense':>10} {'f+b/read':>9}"
    )
    for shape in shapes[:1] if arguments.quick else shapes:
        for name in arguments.only.split(",") if arguments.only else OPS:
            try:
                r = row(name, shape, getattr(torch, arguments.dtype), arguments.device, 0.1)
            except RuntimeError as error:  # a peer that does not know the dtype
                print(f"{name:10} {shape!s:22} {error}")
                continue
            rows.append(r)
            print(
                f"{r['op']:10} {r['shape']:22} {r['us']:9.1f} {r['fwd/dense']:10.2f} {r['fwd/read']:9.2f} "
                f"{r.get('fwd+bwd/dense', 0):10.2f} {r.get('fwd+bwd/read', 0):9.2f}",
                flush=True,
            )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
