"""Compiles kernels for an H200 through the wrappers that launch them, and reports what became of each.

    python -m tests.fakes.compile_kernels report.json          what the tests look at
    python -m tests.fakes.compile_kernels report.json all      every form that the product may choose; minutes

Needs no GPU, and an environment without TRITON_INTERPRET. A case that fails says so in the report, and the
others go on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
import triton

from ddtree.device.matmul_candidates import BUCKETS, Config, ProductKind, bucket_of, candidates
from ddtree.device.rows import Sight
from tests.fakes import kernel_calls as calls
from tests.fakes.compile_only import CompileOnly
from tests.fakes.kernel_calls import Call, Family
from tests.fakes.recurrent_calls import recurrent_calls

_PROCESSORS = 132  # of an H200


def tested_calls() -> Iterator[Call]:
    """Every kernel, and of the hot ones the forms that differ most."""
    qwen, smol = calls.QWEN3_8B, calls.SMOLLM2
    yield from calls.attention_calls(qwen, (1, 16, 65))
    yield from calls.attention_calls(qwen, (65,), context=16384)
    yield from calls.attention_calls(smol, (65,), Sight.CAUSAL, places=4, context=256, page_size=16)
    yield from calls.attention_calls(calls.QWEN_27B, (65,))
    yield from calls.attention_calls(calls.GPT_OSS, (16,), Sight.BLOCK)
    for family in (qwen, smol, calls.QWEN_27B):
        yield from calls.layer_calls(family, 65)
    head = ProductKind(qwen.vocabulary, qwen.hidden, torch.bfloat16)
    merged, gated = calls.product_kinds(qwen)[0], calls.product_kinds(qwen)[2]
    for kind, rows, config in (
        (head, 1, Config("gemv", 4, 1024, 1, 4, 3)),
        (merged, 16, Config("dot", 64, 128, 2, 4, 4)),
        (gated, 65, Config("dot", 128, 64, 1, 8, 6)),
    ):
        bucket = bucket_of(rows)
        assert bucket is not None
        yield from calls.product_calls(kind, bucket, config, residual=kind is merged)
    yield from calls.tree_calls(64)
    yield from calls.tree_calls(16, edges=True, places=4)
    yield from calls.draft_calls(smol, 64)
    yield from recurrent_calls(65, 1)
    yield from calls.training_calls(smol)


def all_calls() -> Iterator[Call]:
    """Whatever is chosen on an H200 for the families, and for trees of up to 256 nodes."""
    counts = (1, 8, 16, 32, 33, 65, 128, 257)
    for family in calls.FAMILIES:
        for places, context in ((1, 2048), (1, 32768), (8, 4096), (32, 2048)):
            yield from calls.attention_calls(family, counts, places=places, context=context)
        yield from calls.attention_calls(family, (1, 65), page_size=16)
        yield from calls.attention_calls(family, (1, 16), Sight.BLOCK)
        yield from calls.attention_calls(family, (16, 257), Sight.CAUSAL)
        yield from calls.attention_calls(family, (1, 65), dtype=torch.float32)
        yield from calls.attention_calls(family, (1, 65), dtype=torch.float16)
        for dtype in (torch.bfloat16, torch.float32):
            for rows in (1, 65, 257 * 8):
                yield from calls.layer_calls(family, rows, dtype)
        yield from _all_products(family)
        for width in (1, 8, 16, 64, 128):
            for dtype in (torch.bfloat16, torch.float32):
                yield from calls.top_calls(family, width, 15, dtype)
        yield from calls.draft_calls(family, 8, places=4)
        yield from calls.training_calls(family)
    for nodes in (1, 7, 16, 31, 64, 128, 255, 256):
        for edges in (False, True):
            for places in (1, 32):
                yield from calls.tree_calls(nodes, edges, places)
    for count in (1, 16, 65, 129):
        for key_dim in (64, 128, 256):
            yield from recurrent_calls(count, 4, key_dim)


def _all_products(family: Family) -> Iterator[Call]:
    for kind in calls.product_kinds(family):
        for bucket in BUCKETS:
            for index, config in enumerate(candidates(kind, bucket, _PROCESSORS)):
                yield from calls.product_calls(kind, bucket, config, residual=index == 0 and not kind.gated)


def main() -> None:
    """Make the calls and write the report."""
    driver, problems = CompileOnly(), []
    driver.install()
    for call in all_calls() if sys.argv[2:] == ["all"] else tested_calls():
        driver.case = call.name
        try:
            call.make()
        except Exception as error:  # noqa: BLE001 - whatever the compiler says goes into the report
            problems.append({"case": call.name, "message": f"{type(error).__name__}: {error}"})
    report = {
        "triton": triton.__version__,
        "variants": [asdict(variant) for variant in driver.variants],
        "problems": problems,
    }
    Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
