"""The target's rows of a batch of trees or of prompts' chunks, behind what their sessions have committed.

`stage` and `read` pack them anew each time and work everywhere; prepared steps do the same for some sizes.
To these a chunk is a tree too: a chain whose every row is kept. This module knows sessions, trees and the
target; neither acceptance nor how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
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

_STEP_ROWS = 64  # rows that another step costs as much as


@dataclass(frozen=True)
class Staged:
    """Trees whose rows went through the target."""

    step: TargetStep
    starts: Sequence[int]  # row of each sequence's root
    slots: torch.Tensor  # [rows] int64 pool slot of each row
    trees: TreeBatch  # on the target's device
    recurrent: RecurrentStep | None = None


@dataclass(frozen=True)
class Read:
    """Chunks of prompts whose ids went through the target."""

    step: TargetStep  # its logits are those after the last id of each chunk
    slots: torch.Tensor  # [ids] int64 pool slot of each id, chunk after chunk
    rows: torch.Tensor | None = None  # [ids] int64 rows of the step's taps; None: all of them


class Steps(Protocol):
    """Steps of the target that were prepared for some sizes."""

    def stage(self, sessions: Sequence[Session], trees: TreeBatch, roots: Sequence[int]) -> Staged | None:
        """Run the target over trees that are on the host; None when no size holds them."""
        ...

    def rows(self, sequences: int, nodes: int) -> int | None:
        """Rows of the smallest prepared size that holds a batch; None when there is none."""
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


def read(target: Target, pool: KvPool, sessions: Sequence[Session], chunks: Sequence[Sequence[int]]) -> Read:
    """Run the target over a chunk of each session, packed without padding; recurrent states move on."""
    segments, start = [], 0
    for session, chunk in zip(sessions, chunks, strict=True):
        segments.append(segment_of(session, start, len(chunk)))
        start += len(chunk)
    plan = StepPlan.build(pool, tuple(segments), keeps=True)
    ids = torch.tensor([token for chunk in chunks for token in chunk], device=target.device)
    last = torch.tensor([segment.stop - 1 for segment in segments], device=target.device)
    return Read(target.forward(ids, plan, last), plan.slots)


def grouped(rows: Callable[[int, int], int | None], lengths: Mapping[int, int]) -> list[list[int]]:
    """Which chunks are read together by a prepared step, by their places; those that none holds come last.

    `rows` is `Steps.rows`. A step has as many for each chunk as for its longest, so only chunks of about one
    length share one.
    """
    groups, rest = list[list[int]](), list[int]()
    for place in sorted(lengths, key=lengths.__getitem__):
        nodes = lengths[place] - 1
        alone = rows(1, nodes)
        if alone is None:
            rest.append(place)
            continue
        if groups:
            apart = (rows(len(groups[-1]), lengths[groups[-1][-1]] - 1) or 0) + alone + _STEP_ROWS
            together = rows(len(groups[-1]) + 1, nodes)
            if together is not None and together <= apart:
                groups[-1].append(place)
                continue
        groups.append([place])
    return [*groups, rest] if rest else groups


def read_prepared(steps: Steps, sessions: Sequence[Session], chunks: Sequence[Sequence[int]]) -> Read | None:
    """The same as chains of a prepared step, without recurrent states; None: no size holds them."""
    staged = steps.stage(sessions, *_chains(chunks))
    if staged is None:
        return None
    kept = [
        start + row for start, chunk in zip(staged.starts, chunks, strict=True) for row in range(len(chunk))
    ]
    last = [start + len(chunk) - 1 for start, chunk in zip(staged.starts, chunks, strict=True)]
    # From memory that is not pinned, so this waits for the step: its buffers may be filled anew afterwards.
    both = torch.tensor(kept + last, device=staged.slots.device)
    rows, last_rows = both[: len(kept)], both[len(kept) :]
    return Read(replace(staged.step, logits=staged.step.logits[last_rows]), staged.slots[rows], rows)


def _chains(chunks: Sequence[Sequence[int]]) -> tuple[TreeBatch, list[int]]:
    """A tree for each chunk, and its root: the first id; every other one hangs on the one before it."""
    counts = torch.tensor([len(chunk) - 1 for chunk in chunks], dtype=torch.int32)
    tokens = torch.zeros((len(chunks), int(counts.max())), dtype=torch.int32)
    for row, chunk in zip(tokens, chunks, strict=True):
        row[: len(chunk) - 1] = torch.tensor(chunk[1:], dtype=torch.int32)
    above = torch.arange(tokens.shape[1], dtype=torch.int32).expand_as(tokens)
    return TreeBatch(tokens, above, above + 1, counts), [chunk[0] for chunk in chunks]


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
