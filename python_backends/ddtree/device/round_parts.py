"""The parts of a round of one size, captured: what comes before and after the target's step.

    draft ─▶ build ─▶ [target's step] ─▶ walk ─▶ move rows ─▶ features ─▶ drafter's context ─▶ outbox

They read the step's buffers and write there and into both caches. This module knows no sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ddtree.device.buffers import StepBuffers
from ddtree.device.drafting import MOST_CANDIDATES, DeviceDraft
from ddtree.device.graphs import Captured, GraphMaker
from ddtree.device.keeping import TargetCache
from ddtree.device.kernels.build import build
from ddtree.device.laps import Laps
from ddtree.device.mailbox import Mailbox, Section
from ddtree.device.rows import DeviceRows
from ddtree.device.steps import StepOutput
from ddtree.device.trees import DeviceAcceptance


@dataclass(frozen=True)
class RoundStages:
    """What all sizes of rounds work on."""

    draft: DeviceDraft
    block_size: int
    cache: TargetCache
    step: Callable[[StepBuffers], Captured[StepOutput]]  # the target's step of a size


class RoundParts:
    """Plays a round over what its buffers hold."""

    def __init__(self, buffers: StepBuffers, stages: RoundStages, maker: GraphMaker) -> None:
        """Capture; the target's step of this size is captured already."""
        self._buffers, self._stages = buffers, stages
        size, device = buffers.size, buffers.token_ids.device
        self.depth = min(stages.block_size - 1, size.nodes)
        self.outbox = Mailbox(
            {
                "paths": Section((size.places * (2 * self.depth + 3),)),
                "counts": Section((size.places,)),
                "log_probs": Section((size.places, size.nodes), torch.float32),
            },
            device,
        )
        views = buffers.box.device
        self._block = DeviceRows.blocks(
            views["draft_table"], views["lengths"], stages.block_size, buffers.draft_page_size
        )
        self._drafts = self._capture_draft(maker) if size.nodes else None
        self._step = stages.step(buffers)
        self._output = self._step()
        # A graph reads where the step's output stood then: a step without one leaves it elsewhere each time.
        self._finish = maker.capture(self._finished) if self._step.is_still else Captured(self._finished)

    def play(self, laps: Laps) -> None:
        """Enqueue a round and fetch what came of it."""
        buffers = self._buffers
        buffers.box.send()
        laps.start()
        if self._drafts is not None:
            propose, grow = self._drafts
            propose()
            laps.lap("draft")
            grow()
            laps.lap("build_tree")
        self._output = self._step()
        self._finish()
        laps.lap("verify")
        self.outbox.fetch()

    def _capture_draft(self, maker: GraphMaker) -> tuple[Captured[None], Captured[None]]:
        buffers, draft, block = self._buffers, self._stages.draft, self._block
        views, places, nodes = buffers.box.device, buffers.size.places, buffers.size.nodes
        width = draft.width(min(MOST_CANDIDATES, nodes))
        device = buffers.token_ids.device
        positions = self._stages.block_size - 1
        ids = torch.zeros((places, positions, width), dtype=torch.int32, device=device)
        log_probs = torch.zeros((places, positions, width), device=device)
        edges = torch.zeros((places, positions, width, width), device=device) if draft.has_edges else None

        def propose() -> None:
            block.counts.copy_(views["has_drafter"].int() * self._stages.block_size)
            best = draft.draft(views["roots"], block, width)
            ids.copy_(best.ids)
            log_probs.copy_(best.log_probs)
            if edges is not None and best.edge_log_probs is not None:
                edges.copy_(best.edge_log_probs)

        def grow() -> None:
            build(
                ids, log_probs, views["budgets"], views["limits"], views["is_chain"], nodes, edges,
                into=buffers.trees,
            )  # fmt: skip

        return maker.capture(propose), maker.capture(grow)

    def _finished(self) -> None:
        """Walk the trees, keep the paths in both caches, and put what the host must know into the outbox."""
        buffers, stages = self._buffers, self._stages
        out, views = self.outbox.device, buffers.box.device
        paths = DeviceAcceptance.over(out["paths"], buffers.size.places, self.depth)
        features = stages.cache.keep(buffers, self._output, paths)
        counts = (paths.accepted_counts + 1) * views["has_drafter"]
        stages.draft.extend(features, counts.int(), self._block)
        out["counts"].copy_(buffers.trees.counts)
        out["log_probs"].copy_(buffers.trees.log_probs)
