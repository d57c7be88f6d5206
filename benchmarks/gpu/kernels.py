"""Where a step's time goes, kernel by kernel: `python -m benchmarks.gpu.kernels` prints a table a step.

What stands between the sum of the kernels and the whole step is gaps: a launch that waits for the one before
it to end. Knows the shapes and ways of the benchmark, and no kernel by name.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.placement import Placement
from benchmarks.gpu.seam import WAYS, RoundBench
from benchmarks.gpu.shapes import (
    PairShape,
    make_pair,
    qwen3_8b,
    qwen36_27b,
    smollm2_135m,
    tiny_hybrid,
    tiny_qwen3,
)
from benchmarks.gpu.timing import time_ms

_REPLAYS = 5
_NAME_WIDTH = 78
SHAPES: Mapping[str, Callable[[], PairShape]] = {
    "qwen3-8b": qwen3_8b,
    "qwen3.6-27b": qwen36_27b,
    "smollm2-135m": smollm2_135m,
    "tiny": tiny_qwen3,
    "tiny-hybrid": tiny_hybrid,
}


@dataclass
class Share:
    """What one kernel takes of a step."""

    launches: float = 0.0
    ms: float = 0.0


def shares_of(work: Callable[[], object], device: torch.device) -> dict[str, Share]:
    """Launches and milliseconds of one call by kernel; by operator on a CPU."""
    for _ in range(2):
        work()
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind], acc_events=True) as seen:
        for _ in range(_REPLAYS):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    shares: dict[str, Share] = defaultdict(Share)
    for event in seen.events():
        if event.device_type.name == device.type.upper():
            share = shares[event.name]
            share.launches += 1 / _REPLAYS
            share.ms += event.time_range.elapsed_us() / 1e3 / _REPLAYS
    return shares


def table_of(title: str, shares: Mapping[str, Share], whole_ms: float, most: int) -> Table:
    """The longest kernels first, then the rest and the gaps in one line each."""
    table = Table("kernel", "launches", "ms", "us each", title=title)
    ordered = sorted(shares.items(), key=lambda item: -item[1].ms)
    for name, share in ordered[:most]:
        each = 1e3 * share.ms / share.launches
        table.add_row(name[:_NAME_WIDTH], f"{share.launches:.0f}", f"{share.ms:.3f}", f"{each:.1f}")
    rest = [share for _, share in ordered[most:]]
    table.add_row(
        "others", f"{sum(share.launches for share in rest):.0f}", f"{sum(s.ms for s in rest):.3f}", ""
    )
    busy = sum(share.ms for share in shares.values())
    launches = sum(share.launches for share in shares.values())
    table.add_row("gaps", f"{launches:.0f} in all", f"{whole_ms - busy:.3f}", "")
    table.add_row("whole", "", f"{whole_ms:.3f}", "")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--way", choices=sorted(WAYS), default="fused")
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 65])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--kernels", type=int, default=24, help="lines of a table")
    parser.add_argument("--no-round", action="store_true", help="the target's steps alone")
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    console = Console(width=130, highlight=False)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pair, way = make_pair(SHAPES[chosen.shape](), device, dtype), WAYS[chosen.way]
    if way.prepare is not None:
        way.prepare(pair)
    for context in chosen.contexts:
        place = Placement(context, most_nodes=max(*chosen.rows, 65) - 1, batch=chosen.batch)
        bench: RoundBench = way.open(pair, place)
        works: dict[str, Callable[[], object]] = {
            f"verify {rows}": partial(bench.verify, rows - 1) for rows in chosen.rows
        }
        if not chosen.no_round:
            works["round 65"] = partial(bench.round, 64)
        for name, work in works.items():
            whole = time_ms(work, device, seconds=0.5).ms
            title = f"{chosen.shape}, {chosen.way}, context {context}, batch {chosen.batch}: {name}"
            console.print(table_of(title, shares_of(work, device), whole, chosen.kernels))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
