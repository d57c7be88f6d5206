"""How fast weights are read by products of few rows: PyTorch's and every config of ours, for real shapes.

`python -m benchmarks.gpu.matmul` prints a line for each weight and row count, then one for each config, with
how far it is from PyTorch's result; it is where the list of candidates is chosen from. Knows no model.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console

from ddtree.device.graph_timer import GraphTimer
from ddtree.device.kernels.matmul import multiply
from ddtree.device.matmul_candidates import BUCKETS, ProductKind, candidates
from ddtree.device.matmul_choice import eager_gate, library_product

SHAPES = {
    "qwen3-8b": [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)],
    "smollm2-135m": [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)],
    "tiny": [(48, 64)],
}


def host_timer(run: Callable[[], None]) -> float:
    """Microseconds of a call by the host's clock, for the rehearsal on a CPU."""
    start = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - start)


@torch.inference_mode()
def compare(console: Console, kind: ProductKind, buckets: list[int], device: torch.device) -> None:
    """Print one weight's times; copies of it are used in turn, so that none is found in L2."""
    is_cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if is_cuda else None
    processors, cold = (
        (properties.multi_processor_count, 2 * properties.L2_cache_size) if properties else (1, 0)
    )
    timer = GraphTimer(device) if is_cuda else host_timer
    weight = (kind.size**-0.5 * torch.randn(kind.weight_rows, kind.size, device=device)).to(kind.dtype)
    copies = [weight, *(weight.clone() for _ in range(min(cold // kind.weight_bytes, 191)))]
    launches = max(len(copies), 8 if is_cuda else 1)

    def line(name: object, product: Callable[[torch.Tensor], torch.Tensor], note: str = "") -> None:
        def turn() -> None:
            for launch in range(launches):
                product(copies[launch % len(copies)])

        micros = timer(turn) / launches
        console.print(f"{name!s:>44} {micros:9.1f} us {kind.weight_bytes / micros / 1e3:6.0f} GB/s {note}")

    for bucket in (bucket for bucket in BUCKETS if bucket.most in buckets):
        rows = torch.randn(bucket.timed, kind.size, device=device).to(kind.dtype)
        usual = partial(library_product, rows, gate=eager_gate if kind.gated else None)
        line(f"{kind.name}, {bucket.timed} rows: PyTorch", usual)
        expected = usual(weight).float()
        for config in candidates(kind, bucket, processors):
            label = (
                f"{config.kind} n{config.block_n} k{config.block_k} split {config.split_k} "
                f"warps {config.warps} stages {config.stages}"
            )
            ours = partial(multiply, rows, config=config, gated=kind.gated)
            try:
                far = (ours(weight).float() - expected).abs().max() / expected.abs().max()
                line(label, ours, f"off by {float(far):.1e}")
            except Exception as error:  # noqa: BLE001 - a config that does not run is a result too
                console.print(f"{label:>44} {type(error).__name__}: {str(error).splitlines()[0][:60]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cpu: one tiny shape, with TRITON_INTERPRET=1")
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--buckets", type=int, nargs="*", default=[bucket.most for bucket in BUCKETS])
    parser.add_argument("--gated", action="store_true", help="only the third shape, with its gate")
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("on a CPU kernels run in Triton's interpreter only: set TRITON_INTERPRET=1")
    shapes = SHAPES["tiny" if device.type == "cpu" else chosen.model]
    console = Console(width=120, highlight=False)
    for weight_rows, size in shapes[2:3] or shapes if chosen.gated else shapes:
        kind = ProductKind(weight_rows, size, torch.bfloat16, gated=chosen.gated)
        compare(console, kind, chosen.buckets, device)


if __name__ == "__main__":
    main()
