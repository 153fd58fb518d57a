"""Multi-head attention over real sentences: ragged against padded, same numbers, fewer tokens, less time.

The batch is the opening of "Alice's Adventures in Wonderland" (Lewis Carroll, 1865, public domain), a
sentence a line in alice.txt; a token is a byte. Both ways run the same module with the same weights.

    python examples/multihead_attention.py [--device cuda] [--plot lengths.png]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import njt

TEXT = Path(__file__).with_name("alice.txt")
Step = Callable[[], tuple[float, float]]


class MultiheadAttention(nn.Module):
    """Self-attention; `x` is dense (B, S, width), with a mask, or nested (B, j1, width), without."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        split = [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v)]
        y = F.scaled_dot_product_attention(*split, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


def batch(width: int, device: str) -> tuple[njt.NestedTensor, Tensor, Tensor]:
    """The sentences, embedded: ragged (B, j1, width), padded (B, S, width), and which tokens are real."""
    table = torch.randn(256, width)
    sentences = [torch.tensor(list(line.encode())) for line in TEXT.read_text().splitlines()]
    ragged = njt.nested_tensor([table[ids] for ids in sentences], device=device)
    padded = njt.to_padded_tensor(ragged, 0.0)
    real = torch.arange(padded.shape[1], device=device) < ragged.seqlens[:, None]
    return ragged, padded, real


def check(model: nn.Module, ragged: njt.NestedTensor, padded: Tensor, real: Tensor) -> None:
    """Asserts equal outputs for every real token and equal gradients for every weight."""
    packed = model(ragged).values()
    rectangle = model(padded, real[:, None, None])[real]
    torch.testing.assert_close(packed, rectangle, rtol=1e-3, atol=1e-4)
    weights, cotangent = list(model.parameters()), torch.randn_like(packed) / len(packed)
    for ours, theirs in zip(
        torch.autograd.grad(packed, weights, cotangent),
        torch.autograd.grad(rectangle, weights, cotangent),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def step(forward: Callable[[], Tensor], cotangent: Tensor, device: str) -> Step:
    """A function that runs forward and backward once and says how long each took, in seconds."""

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def run() -> tuple[float, float]:
        start = now()
        y = forward()
        middle = now()
        y.backward(cotangent)
        return middle - start, now() - middle

    return run


def measure(steps: dict[str, Step], repeats: int) -> dict[str, tuple[float, float]]:
    """Median times; the candidates take turns, so that a busy machine is equally unkind to all."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for step in steps.values():
        step()  # compiles, allocates
        step()
    for _ in range(repeats):
        for name, step in steps.items():
            times[name].append(step())
    return {n: (median(f for f, _ in t), median(b for _, b in t)) for n, t in times.items()}


def plot(lengths: list[int], path: str) -> None:
    """Saves a picture of the batch: each sentence a bar, the rest of the rectangle padding."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    axes.barh(range(len(lengths)), max(lengths), color="lightgrey", label="padding")
    axes.barh(range(len(lengths)), lengths, color="tab:blue", label="tokens")
    share = 1 - sum(lengths) / (len(lengths) * max(lengths))
    axes.set(xlabel="tokens", ylabel="sentence", title=f"{share:.0%} of the rectangle is padding")
    axes.legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--plot", metavar="FILE", help="save a picture of lengths and padding")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(0)
    ragged, padded, real = batch(args.width, args.device)
    model = MultiheadAttention(args.width, heads=4).to(args.device)
    check(model, ragged, padded, real)
    compiled = torch.compile(model, fullgraph=True)
    check(compiled, ragged, padded, real)

    mask = real[:, None, None]  # keys that are padding take no part
    dense = torch.randn_like(padded) * real[..., None]  # a loss over tokens, none over padding
    packed = dense[real]
    steps = {
        "padded eager": step(lambda: model(padded, mask), dense, args.device),
        "ragged eager": step(lambda: model(ragged).values(), packed, args.device),
        "padded compiled": step(lambda: compiled(padded, mask), dense, args.device),
        "ragged compiled": step(lambda: compiled(ragged).values(), packed, args.device),
    }
    times = measure(steps, args.repeats)

    table = Table(title="Multi-head attention, the same numbers twice (ms, median)")
    for heading in ("", "tokens", "eager fwd", "eager bwd", "compiled fwd", "compiled bwd"):
        table.add_column(heading, justify="right" if heading else "left")
    total = {"padded": real.numel(), "ragged": int(real.sum())}
    for way, tokens in total.items():
        cells = [*times[f"{way} eager"], *times[f"{way} compiled"]]
        table.add_row(way, f"{tokens:,}", *(f"{1e3 * t:.1f}" for t in cells))
    ratios = [
        p / r
        for mode in ("eager", "compiled")
        for p, r in zip(times[f"padded {mode}"], times[f"ragged {mode}"], strict=True)
    ]
    saved = total["padded"] / total["ragged"]
    table.add_row("padded / ragged", f"{saved:.1f}x", *(f"{ratio:.1f}x" for ratio in ratios))
    Console().print(table)
    print(f"outputs and gradients agree, eager and compiled, on {total['ragged']:,} tokens")
    if args.plot:
        plot(ragged.seqlens.tolist(), args.plot)
        print(f"picture saved: {args.plot}")


if __name__ == "__main__":
    main()
