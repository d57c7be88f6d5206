"""Verify calls over trees that the host built, captured: one copy there, two launches, one copy back.

    sent: roots, lengths, pages, trees                                   fetched: paths, bonus tokens
      │                                                                              ▲
      └─▶ [target's step] ─▶ walk ─▶ move rows ─▶ features ──────────────────────────┘

A verifier in a process of its own does this where every sequence takes the most probable token; what follows
the step, launched one by one, took longer than some steps do. This module knows sessions' pages and lengths;
neither requests nor what a session table says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddtree.device.buffers import StepBuffers, StepSize
from ddtree.device.graphs import Captured, GraphMaker
from ddtree.device.keeping import TargetCache
from ddtree.device.laps import Laps
from ddtree.device.mailbox import Mailbox, Section
from ddtree.device.steps import StepOutput, TargetSteps
from ddtree.device.trees import DeviceAcceptance
from ddtree.sessions import Session
from ddtree.types import TreeBatch


@dataclass(frozen=True)
class KeptPaths:
    """The accepted paths of a call, kept in the target's cache."""

    accepted_counts: NDArray[np.int32]  # [S]
    accepted_tokens: NDArray[np.int32]  # [S, D], zeros behind a path's end
    bonus_tokens: NDArray[np.int32]  # [S]
    features: torch.Tensor  # [S, D + 1, H] of root and path, on the device; valid until the next call
    keep_ms: float  # what keeping them took on the device

    def lists(self) -> list[list[int]]:
        """The accepted draft tokens of each sequence."""
        rows = zip(self.accepted_tokens.tolist(), self.accepted_counts.tolist(), strict=True)
        return [tokens[:count] for tokens, count in rows]


class _Parts:
    """What a call of one size plays back."""

    def __init__(
        self,
        buffers: StepBuffers,
        step: Captured[StepOutput],
        cache: TargetCache,
        depth: int,
        maker: GraphMaker,
    ) -> None:
        self.buffers, self._step, self._cache = buffers, step, cache
        places, depth = buffers.size.places, min(depth, buffers.size.nodes)
        self._outbox = Mailbox({"paths": Section((places * (2 * depth + 3),))}, buffers.token_ids.device)
        self._walked = DeviceAcceptance.over(self._outbox.device["paths"], places, depth)
        self.paths = DeviceAcceptance.over(torch.from_numpy(self._outbox.host["paths"]), places, depth)
        self._output = step()
        # A graph reads where the step's output stood then: a step without one leaves it elsewhere each time.
        self._keep = maker.capture(self._kept) if step.is_still else Captured(self._kept)

    def play(self, laps: Laps) -> torch.Tensor:
        """Enqueue the call and fetch the paths; gives their features."""
        self.buffers.box.send()
        laps.start()
        self._output = self._step()
        laps.lap("step")
        features = self._keep()
        laps.lap("keep")
        self._outbox.fetch()
        return features

    def _kept(self) -> torch.Tensor:
        return self._cache.keep(self.buffers, self._output, self._walked)


class VerifyCalls:
    """Calls of all sizes that the target's steps are prepared for. One at a time."""

    def __init__(self, steps: TargetSteps, cache: TargetCache, depth: int, maker: GraphMaker) -> None:
        """Capture; the steps are captured already.

        Args:
            steps: the target's, over the pool of `cache`.
            cache: where accepted paths are kept.
            depth: D, the deepest node of a tree that is taken: the drafter's positions.
            maker: captures on the target's device.
        """
        self.depth = depth
        self._steps = steps
        self._laps = Laps(cache.pool.features.device)
        self._parts: dict[StepSize, _Parts] = {
            size: _Parts(steps.buffers[size], steps.captured(size), cache, depth, maker)
            for size in sorted(steps.sizes, key=lambda size: -size.rows)
        }

    @torch.inference_mode()
    def run(self, sessions: Sequence[Session], trees: TreeBatch, roots: Sequence[int]) -> KeptPaths | None:
        """Check trees that are on the host and keep their accepted paths; the sessions are the caller's.

        Returns:
            None where no prepared size holds the trees.
        """
        size = self._steps.size_for(len(sessions), trees.tokens.shape[1])
        if size is None or (trees.depths.numel() and int(trees.depths.max()) > self.depth):
            return None
        parts, count = self._parts[size], len(sessions)
        parts.buffers.fill(sessions, roots, trees)
        features = parts.play(self._laps)
        paths = parts.paths

        def first(values: torch.Tensor) -> NDArray[Any]:
            return values[:count].numpy().copy()

        return KeptPaths(
            first(paths.accepted_counts), first(paths.accepted_tokens), first(paths.bonus_tokens),
            features[:count], self._laps.ms()["keep"],
        )  # fmt: skip
