"""The target's rows of a batch of trees, staged behind what their sessions have committed.

`stage` packs them anew each time and works everywhere; prepared steps do the same for some sizes. This module
knows sessions, trees and the target; neither acceptance nor how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch.nn import functional

from ddtree.attention.plan import Segment, StepPlan
from ddtree.budget import CostCurve
from ddtree.kv_cache import KvPool
from ddtree.models.target import Target, TargetStep
from ddtree.recurrent.step import RecurrentStep
from ddtree.sessions import Session
from ddtree.tree_mask import ancestor_bits, expand
from ddtree.types import TreeBatch


@dataclass(frozen=True)
class Staged:
    """Trees whose rows went through the target."""

    step: TargetStep
    starts: Sequence[int]  # row of each sequence's root
    slots: torch.Tensor  # [rows] int64 pool slot of each row
    trees: TreeBatch  # on the target's device
    recurrent: RecurrentStep | None = None


class Steps(Protocol):
    """Steps of the target that were prepared for some sizes."""

    def stage(self, sessions: Sequence[Session], trees: TreeBatch, roots: Sequence[int]) -> Staged | None:
        """Run the target over trees that are on the host; None when no size holds them."""
        ...

    def cost(self, repeats: int) -> CostCurve:
        """Time a sequence's steps of every size; nothing of them stays in the pool."""
        ...


def stage(
    target: Target, pool: KvPool, sessions: Sequence[Session], trees: TreeBatch, roots: Sequence[int]
) -> Staged:
    """Run the target over one tree per session, packed without padding."""
    device = target.device
    counts = trees.counts.tolist()
    trees = TreeBatch(*(getattr(trees, each.name).to(device) for each in fields(trees)))
    sees = expand(ancestor_bits(trees.parents, trees.counts))
    root_rows = torch.tensor(roots, device=device)
    segments, token_rows, start = [], [], 0
    for index, (session, count) in enumerate(zip(sessions, counts, strict=True)):
        rows = count + 1
        depths = functional.pad(trees.depths[index, :count].long(), (1, 0))
        segments.append(segment_of(session, start, rows, depths, sees[index, :rows, :rows]))
        token_rows += [root_rows[index, None], trees.tokens[index, :count].long()]
        start += rows
    plan = StepPlan.build(pool, tuple(segments))
    step = target.forward(torch.cat(token_rows), plan, torch.arange(start, device=device))
    return Staged(step, [segment.start for segment in segments], plan.slots, trees, plan.recurrent)


def segment_of(
    session: Session,
    start: int,
    count: int,
    depths: torch.Tensor | None = None,
    sees: torch.Tensor | None = None,
) -> Segment:
    """A session's rows in a packed step; without depths and sight they are a chain."""
    if depths is None:
        depths = torch.arange(count, device=session.pages.slots.device)
    return Segment(start, count, session.pages, session.length, depths, sees, session.keys is not None)
