"""Padded <-> packed against the time of a plain copy of as many bytes, and beside what else does it.

    python benchmarks/conversion.py [--device cuda] [--quick] [--json FILE] [--peers njt,aten]

First table: the share of the floor that each peer reaches, in per cent, more is better. The floor is a copy
of (bytes read + bytes written) / 2, timed in the same run; on CUDA the faster of the driver's copy and an
elementwise kernel, because the driver's copy alone was seen at two thirds of the memory's speed. The TB/s of
floor and njt stand beside it: a floor far below the memory's speed makes its row meaningless, and one far above
says that the batch fits in the cache. CUDA: replays of a CUDA graph, so that launch cost is out; a peer that
can't be captured (marked *) is timed between events. CPU: process time, one thread.
Second table: small sizes, microseconds a call with launch cost in.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from njt.kernels import padding, padding_ops

CUDA_GRID = (
    (32, 8192, 512),
    (256, 1024, 1024),
    (256, 2048, 128),
    (4096, 512, 64),
    (4096, 4096, 8),
    (4096, 8192, 1),
    (16384, 64, 256),
    (60000, 64, 64),
)
CPU_GRID = (
    (16, 256, 512),
    (64, 256, 64),
    (256, 128, 32),
    (1024, 64, 8),
    (4096, 32, 16),
    (1024, 256, 1),
    (64, 2048, 256),
)
SMALL = ((2, 8, 8), (8, 64, 64), (32, 128, 64), (256, 64, 32))
PEERS = ("njt", "aten", "inductor", "masked", "pad_sequence")
aten = torch.ops.aten


@dataclass
class Cell:
    """One batch: its two forms and what the peers need, made before anything is timed."""

    values: Tensor  # (T, D)
    padded: Tensor  # (B, S, D)
    offsets: Tensor
    mask: Tensor  # (B, S)
    sizes: list[int]
    width: int

    @property
    def rows(self) -> int:
        return self.values.shape[0]


def make_cell(B: int, S: int, D: int, dtype: torch.dtype, draw: str, device: str) -> Cell:
    random = torch.Generator().manual_seed(0)
    if draw == "uniform":
        sizes = torch.randint(1, S + 1, (B,), generator=random)
    else:
        sizes = (torch.randn(B, generator=random) * 0.8).exp().mul(S / 8).long().clamp(1, S)
    sizes[0] = S
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    values = torch.ones(int(offsets[-1]), D, dtype=dtype, device=device)
    padded = torch.ones(B, S, D, dtype=dtype, device=device)
    mask = (torch.arange(S) < sizes[:, None]).to(device)
    return Cell(values, padded, offsets.to(device), mask, sizes.tolist(), S)


@cache
def compiled(name: str) -> Callable[..., Tensor]:
    return torch.compile(getattr(padding, name), dynamic=True, fullgraph=True)


def calls(cell: Cell, back: bool, peers: list[str]) -> dict[str, Callable[[], Any]]:
    """What each peer runs."""
    c = cell
    views = c.values.split(c.sizes) if "pad_sequence" in peers and len(c.sizes) <= 4096 else None
    if back:
        known: dict[str, Callable[[], Any] | None] = {
            "njt": lambda: padding.padded_to_packed(c.padded, c.offsets, c.rows),
            "aten": lambda: aten._padded_dense_to_jagged_forward(c.padded, [c.offsets], c.rows),
            "inductor": lambda: compiled("padded_to_packed")(c.padded, c.offsets, c.rows),
            "masked": lambda: c.padded[c.mask],
        }
    else:
        known = {
            "njt": lambda: padding.packed_to_padded(c.values, c.offsets, c.width),
            "aten": lambda: aten._jagged_to_padded_dense_forward(
                c.values, [c.offsets], [c.width], 0.0
            ),
            "inductor": lambda: compiled("packed_to_padded")(c.values, c.offsets, c.width),
            "masked": lambda: torch.zeros_like(c.padded).masked_scatter_(
                c.mask[:, :, None], c.values
            ),
            "pad_sequence": None if views is None else lambda: pad_sequence(views, True),
        }
    return {name: call for name, call in known.items() if name in peers and call is not None}


def bytes_moved(cell: Cell, back: bool) -> int:
    """What the conversion has to read and write."""
    used, whole = (x.numel() * x.element_size() for x in (cell.values, cell.padded))
    return used + (used if back else whole)


def floor_calls(cell: Cell, back: bool) -> list[Callable[[], Any]]:
    """Copies of half the bytes that the conversion moves, by each way there is; the fastest is the floor."""
    words = max(bytes_moved(cell, back) // 16, 1)
    source = torch.ones(words, dtype=torch.int64, device=cell.values.device)
    if source.is_cuda:
        target = torch.empty_like(source)
        return [lambda: target.copy_(source), lambda: torch.bitwise_not(source, out=target)]
    return [source.clone]  # like the peers, into fresh memory


def events(run: Callable[[], Any], repeat: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeat):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeat


def seconds_cuda(call: Callable[[], Any]) -> tuple[float, bool]:
    """Median seconds, and whether a graph was replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    once = events(call, 1)
    run, captured = call, False
    if once < 0.05:  # thousands of launches aren't worth a graph
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call()
            run, captured = graph.replay, True
        except RuntimeError:
            torch.cuda.synchronize()
    repeat = max(1, min(10, int(0.005 / max(once, 1e-6))))
    return statistics.median(events(run, repeat) for _ in range(5)), captured


def seconds_cpu(call: Callable[[], Any]) -> tuple[float, bool]:
    call()
    start = time.process_time()
    call()
    repeat = max(1, min(100, int(0.02 / max(time.process_time() - start, 1e-6))))
    taken = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(repeat):
            call()
        taken.append((time.process_time() - start) / repeat)
    return statistics.median(taken), True


def capturable(name: str, back: bool) -> bool:
    return not (name == "masked" and back)  # masked_select reads the count back


def measure(cell: Cell, back: bool, peers: list[str], device: str) -> dict[str, Any]:
    """Seconds of the floor and of each peer; a peer that refuses the dtype has a text instead."""
    timed = seconds_cuda if device == "cuda" else seconds_cpu
    floors = [timed(call)[0] for call in floor_calls(cell, back)]
    out: dict[str, Any] = {"floor": min(floors), "floors": floors, "bytes": bytes_moved(cell, back)}
    for name, call in calls(cell, back, peers).items():
        try:
            if device == "cuda" and not capturable(name, back):
                call()
                out[name], captured = statistics.median(events(call, 3) for _ in range(3)), False
            else:
                out[name], captured = timed(call)
        except Exception as error:
            out[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
            continue
        if not captured:
            out.setdefault("not captured", []).append(name)
    return out


def shown(found: dict[str, Any], name: str) -> str:
    taken = found.get(name)
    if not isinstance(taken, float):
        return "-"
    star = "*" if name in found.get("not captured", ()) else ""
    return f"{100 * found['floor'] / taken:.0f}{star}"


def speed(found: dict[str, Any], name: str) -> str:
    taken = found.get(name)
    return f"{found['bytes'] / taken / 1e12:.3f}" if isinstance(taken, float) else "-"


def big_table(device: str, quick: bool, peers: list[str]) -> list[dict[str, Any]]:
    grid = CUDA_GRID if device == "cuda" else CPU_GRID
    dtypes = (torch.float32, torch.bfloat16, torch.uint8)
    draws = ("lognormal", "uniform")
    rows = []
    head = " ".join(f"{name:>12}" for name in peers)
    print(
        f"{'B':>6} {'S':>5} {'D':>5} {'dtype':>9} {'lengths':>10} {'':>5} {'floor us':>9} "
        f"{'TB/s':>6} {'njt':>6} {head}"
    )
    for B, S, D in grid[-2:] if quick else grid:
        for dtype in dtypes:
            for draw in draws[:1] if quick else draws:
                cell = make_cell(B, S, D, dtype, draw, device)
                for back in (False, True):
                    found = measure(cell, back, peers, device)
                    rows.append(
                        {"B": B, "S": S, "D": D, "dtype": str(dtype)[6:], "lengths": draw}
                        | {"direction": "unpad" if back else "pad"}
                        | found
                    )
                    shares = " ".join(f"{shown(found, name):>12}" for name in peers)
                    print(
                        f"{B:6} {S:5} {D:5} {rows[-1]['dtype']:>9} {draw:>10} "
                        f"{rows[-1]['direction']:>5} {found['floor'] * 1e6:9.1f} "
                        f"{speed(found, 'floor'):>6} {speed(found, 'njt'):>6} {shares}",
                        flush=True,
                    )
    return rows


def wall(call: Callable[[], Any], device: str) -> float:
    """Least seconds a call over rounds of many calls, host time included."""
    for _ in range(10):
        call()
    taken = []
    for _ in range(7):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - start) / 100)
    return min(taken)


def small_table(device: str) -> list[dict[str, Any]]:
    """Microseconds a call: the functions, the bare implementations, with a gradient wanted, and aten."""
    names = ("njt", "with grad", "bare", "aten", "pad_sequence")
    pad_bare, unpad_bare = padding_ops.IMPLEMENTATIONS[device]
    rows = []
    print("\nsmall sizes, us a call\n" + f"{'':20}" + " ".join(f"{name:>12}" for name in names))
    for B, S, D in SMALL:
        c = make_cell(B, S, D, torch.float32, "uniform", device)
        views = c.values.split(c.sizes)
        values, padded = c.values.clone().requires_grad_(), c.padded.clone().requires_grad_()
        runs: dict[str, list[Callable[[], Any]]] = {
            "pad": [
                lambda c=c: padding.packed_to_padded(c.values, c.offsets, c.width),
                lambda c=c, v=values: padding.packed_to_padded(v, c.offsets, c.width),
                lambda c=c: pad_bare(c.values, c.offsets, None, c.width, 0.0, 0, False),
                lambda c=c: aten._jagged_to_padded_dense_forward(
                    c.values, [c.offsets], [c.width], 0.0
                ),
                lambda views=views: pad_sequence(views, True),
            ],
            "unpad": [
                lambda c=c: padding.padded_to_packed(c.padded, c.offsets, c.rows),
                lambda c=c, p=padded: padding.padded_to_packed(p, c.offsets, c.rows),
                lambda c=c: unpad_bare(c.padded, c.offsets, None, c.rows, 0, False),
                lambda c=c: aten._padded_dense_to_jagged_forward(c.padded, [c.offsets], c.rows),
            ],
        }
        for direction, each in runs.items():
            micros = {name: wall(run, device) * 1e6 for name, run in zip(names, each)}
            rows.append({"B": B, "S": S, "D": D, "direction": direction, **micros})
            figures = " ".join(f"{t:12.1f}" for t in micros.values())
            print(f"{B:4} {S:4} {D:4} {direction:>5} {figures}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="two shapes, one draw of lengths")
    parser.add_argument("--peers", default=",".join(PEERS), help="which, by comma")
    parser.add_argument("--json", help="write the rows to a file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.cache_size_limit = 64
    peers = [name for name in PEERS if name in arguments.peers.split(",")]
    rows = big_table(arguments.device, arguments.quick, peers)
    small = small_table(arguments.device)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"big": rows, "small": small, "torch": torch.__version__}, file, indent=1)


if __name__ == "__main__":
    main()
