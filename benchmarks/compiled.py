"""What the nested class costs in compiled code: one encoder layer, forward and backward, four ways.

    python benchmarks/compiled.py [--device cuda] [--mode reduce-overhead] [--json out.json]

The same weights run on nested tensors compiled and eager, on values and offsets packed by hand and
compiled, and padded with a mask and compiled. Ways are timed in turns; figures are medians, and ratios to
the first. "guards" is a compiled call of `x * 2`, less the same on a dense tensor: what finding the graph
and wrapping its results costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import njt
from njt.attention.varlen import varlen_attention


class Layer(nn.Module):
    """A pre-norm encoder layer, written for nested, packed and padded input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def mlp(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def split(self, x: Tensor) -> list[Tensor]:
        return [t.unflatten(-1, (self.heads, -1)) for t in self.project(self.norm1(x)).chunk(3, -1)]

    def nested(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.mlp(
            x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        )

    def packed(self, values: Tensor, offsets: Tensor, longest: int) -> Tensor:
        q, k, v = self.split(values)
        y = varlen_attention(q, k, v, offsets, offsets, max_q=longest, max_k=longest)
        return self.mlp(values + self.out(y.flatten(1)))

    def padded(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.mlp(x + self.out(y.transpose(1, 2).flatten(2)))


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def interleaved(ways: dict[str, Callable[[], None]], device: str, rounds: int) -> dict[str, float]:
    """Median milliseconds of each way, measured in turns."""
    for run in ways.values():
        for _ in range(5):
            run()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            synchronize(device)
            start = time.perf_counter()
            run()
            synchronize(device)
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) * 1e3 for name, t in taken.items()}


def steps(a: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Forward and backward of each way."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if a.device == "cuda" else torch.float32
    layer = Layer(a.width, a.heads).to(a.device, dtype)
    lengths = torch.randint(1, a.longest + 1, (a.batch,)).tolist()
    x = njt.nested_tensor([torch.randn(n, a.width, device=a.device, dtype=dtype) for n in lengths])
    values, offsets, longest = x.values(), x.offsets(), max(lengths)
    rectangle = x.to_padded_tensor(0.0)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None])[:, None, None].to(a.device)
    options = {"fullgraph": True, "mode": a.mode}
    nested = torch.compile(layer.nested, **options)
    packed = torch.compile(layer.packed, dynamic=True, **options)
    padded = torch.compile(layer.padded, **options)

    def step(forward: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            if a.mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            layer.zero_grad(set_to_none=True)
            out = forward()
            (out.values() if out.is_nested else out).sum().backward()

        return run

    return {
        "nested, compiled": step(lambda: nested(x)),
        "packed by hand, compiled": step(lambda: packed(values, offsets, longest)),
        "nested, eager": step(lambda: layer.nested(x)),
        "padded, compiled": step(lambda: padded(rectangle, mask)),
    }


def guards(device: str, rounds: int) -> float:
    """Microseconds that a compiled call on a nested tensor takes beyond one on a dense tensor."""
    x = njt.nested_tensor([torch.randn(n, 8, device=device) for n in (3, 5, 2)])
    compiled = torch.compile(lambda t: t * 2, fullgraph=True)
    with torch.no_grad():
        ways = {"nested": lambda: compiled(x), "dense": lambda: compiled(x.values())}
        found = interleaved(ways, "cpu", 20 * rounds)
    return (found["nested"] - found["dense"]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--mode", default=None, help="of torch.compile, such as reduce-overhead")
    parser.add_argument("--json", default="")
    a = parser.parse_args()
    found = interleaved(steps(a), a.device, a.rounds)
    base = found["nested, compiled"]
    for name, ms in found.items():
        print(f"{name:26} {ms:9.3f} ms  {ms / base:6.2f}")
    extra = guards(a.device, a.rounds)
    print(f"{'guards and wrapping':26} {extra:9.1f} µs a call")
    if a.json:
        with open(a.json, "w") as f:
            json.dump({"arguments": vars(a), "ms": found, "guards_us": extra}, f, indent=1)


if __name__ == "__main__":
    main()
