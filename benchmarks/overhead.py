"""What a nested tensor costs over the dense operator on its values: njt beside torch's own jagged class.

The tensors are small, so that the time is the way to the kernel and not the kernel. All candidates take
turns in one process; a figure is the median over rounds, in microseconds a call.

    python benchmarks/overhead.py [--rounds 15] [--json overhead.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

import njt

Call = Callable[[], object]
D = 16


@dataclass(frozen=True)
class Row:
    """One operator three ways, and the limit: njt's overhead over torch's, or njt's time over dense."""

    name: str
    dense: Call
    torch: Call
    njt: Call
    limit: float = 1 / 3
    against: str = "torch"


def batch(count: int, tail: tuple[int, ...]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Components, their values and offsets."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
    parts = [torch.randn(n, *tail, generator=generator) for n in lengths]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return parts, torch.cat(parts), offsets


def both(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The same batch as torch's nested tensor and as ours; bounds are known."""
    theirs = torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=1, max_seqlen=8)
    ours = njt.nested_tensor_from_jagged(values, offsets.clone(), min_seqlen=1, max_seqlen=8)
    assert isinstance(ours, njt.NestedTensor)
    assert not isinstance(theirs, njt.NestedTensor)
    return theirs, ours


def operator_rows() -> list[Row]:
    """The same call on values, torch's nested tensor and ours."""
    _, values, offsets = batch(64, (D,))
    weight, bias = torch.randn(D, D), torch.randn(D)
    calls: dict[str, Callable[[Tensor], object]] = {
        "x + 1": lambda x: x + 1,
        "x + x": lambda x: x + x,
        "x * x": lambda x: x * x,
        "gelu": F.gelu,
        "linear": lambda x: F.linear(x, weight, bias),
        "layer_norm": lambda x: F.layer_norm(x, (D,), bias, bias),
        "detach": lambda x: x.detach(),
        ".shape": lambda x: x.shape,
    }
    rows = []
    for name, call in calls.items():
        theirs, ours = both(values, offsets)
        limit = 1.0 if name == ".shape" else 1 / 3
        rows.append(
            Row(
                name,
                lambda call=call: call(values),
                lambda call=call, x=theirs: call(x),
                lambda call=call, x=ours: call(x),
                limit,
            )
        )
    _, heads, offsets = batch(64, (4, D))
    theirs, ours = both(heads, offsets)
    rows.append(
        Row(
            "transpose(1, 2)",
            lambda: heads.transpose(0, 1),
            lambda: theirs.transpose(1, 2),
            lambda: ours.transpose(1, 2),
        )
    )
    return rows


def batch_rows(count: int) -> list[Row]:
    """What depends on the batch size: one component, all of them, and making the batch."""
    parts, values, offsets = batch(count, (D,))
    theirs, ours = both(values, offsets)
    lengths = [len(p) for p in parts]
    i = count // 2
    start, size = sum(lengths[:i]), lengths[i]
    return [
        Row(
            f"x[i], B {count}",
            lambda: values.narrow(0, start, size),
            lambda: theirs[i],
            lambda: ours[i],
            1 / 4,
        ),
        Row(
            f"unbind, B {count}",
            lambda: values.split_with_sizes(lengths),
            theirs.unbind,
            ours.unbind,
            1.3,
            "dense",
        ),
        Row(
            f"from a list, B {count}",
            lambda: (torch.cat(parts), torch.tensor([0, *map(len, parts)]).cumsum(0)),
            lambda: torch.nested.nested_tensor(parts, layout=torch.jagged),
            lambda: njt.nested_tensor(parts),
            1.4,
            "dense",
        ),
    ]


def per_call(call: Call, seconds: float = 0.004) -> Callable[[], float]:
    """A function that times as many calls as fit into about `seconds`; returns microseconds a call."""
    call()
    start = time.perf_counter()
    call()
    number = max(1, min(1000, int(seconds / (time.perf_counter() - start + 1e-7))))

    def timed() -> float:
        start = time.perf_counter()
        for _ in range(number):
            call()
        return (time.perf_counter() - start) / number * 1e6

    return timed


def measure(row: Row, rounds: int) -> dict[str, Any]:
    """Medians in microseconds, overheads over the dense call, and ours as a share of torch's."""
    timers = {way: per_call(getattr(row, way)) for way in ("dense", "torch", "njt")}
    times: dict[str, list[float]] = {way: [] for way in timers}
    for _ in range(rounds):
        for way, timer in timers.items():
            times[way].append(timer())
    dense, theirs, ours = (median(times[way]) for way in timers)
    of_torch = max(ours - dense, 0.0) / max(theirs - dense, 1e-3)
    of_dense = ours / dense
    return {
        "name": row.name,
        "dense": dense,
        "torch": theirs,
        "njt": ours,
        "torch_over": theirs - dense,
        "njt_over": ours - dense,
        "over_njt_to_torch": of_torch,
        "njt_to_dense": of_dense,
        "limit": row.limit,
        "against": row.against,
        "within": (of_torch if row.against == "torch" else of_dense) <= row.limit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [*operator_rows(), *batch_rows(64), *batch_rows(1024)]
    with torch.no_grad():
        figures = [measure(row, args.rounds) for row in rows]

    table = Table(title="Eager cost, µs a call (median); + is over the dense call on values")
    table.add_column("", no_wrap=True)
    for heading in ("dense", "torch", "njt", "torch +", "njt +", "+ njt/torch", "njt/dense"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("limit", no_wrap=True)
    for f in figures:
        numbers = [f"{f[k]:.1f}" for k in ("dense", "torch", "njt", "torch_over", "njt_over")]
        ratios = [f"{f[k]:.2f}" for k in ("over_njt_to_torch", "njt_to_dense")]
        at = 0 if f["against"] == "torch" else 1
        ratios[at] = f"[{'green' if f['within'] else 'red'}]{ratios[at]}[/]"
        table.add_row(escape(f["name"]), *numbers, *ratios, f"{f['limit']:.2f} of {f['against']}")
    Console(width=110).print(table)
    if args.json:
        about = {"torch": torch.__version__, "python": platform.python_version(), "threads": 1}
        with open(args.json, "w") as file:
            json.dump({"about": about, "rows": figures}, file, indent=2)


if __name__ == "__main__":
    main()
