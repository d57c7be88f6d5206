"""Measures what verifying costs on this machine: steps of several sizes behind a prefix of some length.

Knows targets and pools; not sessions, and not what the curve is used for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ddtree.attention.plan import Segment, StepPlan
from ddtree.budget import CostCurve, measure
from ddtree.kv_cache import KvPool
from ddtree.models.target import Target
from ddtree.sampling import choose

# Verified rows whose cost is measured at load, and the committed prefix they are measured behind.
COST_ROWS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
COST_PREFIX = 256


def measure_verify(
    target: Target,
    pool: KvPool,
    max_nodes: int,
    *,
    repeats: int,
    on_progress: Callable[[int], None] | None = None,
) -> CostCurve:
    """Time chains of up to `max_nodes` draft nodes and their root; nothing of them stays in the pool."""
    prefix = min(COST_PREFIX, pool.total_slots // 2)
    rows = [r for r in COST_ROWS if prefix + r <= pool.total_slots and r <= max_nodes + 1]
    pages = pool.reserve(prefix + rows[-1])
    assert pages is not None, "the cost is measured before the first session"
    device = target.device

    def step(count: int) -> None:
        segment = Segment(0, count, pages, prefix, torch.arange(count, device=device), None)
        plan = StepPlan.build(pool, (segment,))
        tokens = torch.zeros(count, dtype=torch.int64, device=device)
        keep = torch.arange(count, device=device)
        choose(target.forward(tokens, plan, keep).logits).cpu()  # waits for an accelerator
        if on_progress is not None:
            on_progress(count)

    curve = measure(step, rows, repeats)
    pool.release(pages)
    return curve
