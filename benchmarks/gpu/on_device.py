"""Whole rounds on the device, as the `in_process` topology runs them: captured steps, one look at the end."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from benchmarks.gpu.opened import ROOT, OpenedStages, batch_of, ints, made_up_trees, rewind
from benchmarks.gpu.placement import Placement
from benchmarks.gpu.shapes import RandomPair
from ddtree.device.accelerate import accelerate_linears, accelerate_target
from ddtree.device.buffers import CacheSize, StepSize
from ddtree.device.graphs import GraphMaker
from ddtree.device.messages import NO_DRAFTER, RoundRequest
from ddtree.device.rounds import DeviceRounds
from ddtree.device.steps import TargetSteps, sizes_for

_TUNING_SECONDS = 60.0


def fuse_target(pair: RandomPair) -> None:
    """Fuse the target's layers and let its weights use the products that are fastest here, as in serving."""
    accelerate_target(pair.target, pair.chooser)
    accelerate_linears(pair.projection, pair.chooser)
    pair.chooser.tune(limit_s=_TUNING_SECONDS)


class DeviceRound:
    """See `RoundBench`. Steps have the sizes that are prepared when serving: a smaller tree is padded."""

    def __init__(self, pair: RandomPair, place: Placement, *, is_fused: bool = False) -> None:
        """Capture all sizes, then open a session of `place.context` tokens for each sequence.

        Args:
            pair: the models; `fuse_target` comes before if they are to be fused.
            place: where.
            is_fused: whether the drafter uses the products that are fastest here, measured the first time.
        """
        self._pair, self._place = pair, place
        self._stages = OpenedStages.over(pair, place)
        verifier, drafter = self._stages.verifier, self._stages.drafter
        if is_fused:
            drafter.choose_products(pair.chooser.linear)
            pair.chooser.tune(limit_s=_TUNING_SECONDS)
        sizes = tuple(
            size
            for size in sizes_for(place.batch, place.most_nodes, place.batch * (place.most_nodes + 1))
            if size.places == place.batch
        )
        maker = GraphMaker(pair.target.device)
        reach = CacheSize(verifier.pool.num_pages // place.batch, verifier.pool.page_size)
        self._steps = TargetSteps(pair.target, verifier.pool, sizes, (reach, reach), maker)
        self._steps.prepare()
        self._rounds = DeviceRounds(verifier, drafter, self._steps, maker)
        self._rounds.prepare(repeats=1)
        self._sessions = self._stages.open(verifier.sessions, verifier.pool, place.batch, place.context)
        self._draft_sessions = self._stages.open(drafter.sessions, drafter.pool, place.batch, place.context)
        self._filled: tuple[int, StepSize] | None = None  # the tree that stands in the buffers of its size

    def plain(self) -> Mapping[str, float]:
        """A round without a tree and without a drafter."""
        return {"verify": self._run(0, NO_DRAFTER)["verify"]}

    @torch.inference_mode()
    def verify(self, nodes: int) -> torch.Tensor:
        """The captured step alone, over a tree that stands in its buffers already."""
        if self._filled is None or self._filled[0] != nodes:
            self._filled = (nodes, self._fill(nodes))
        return self._steps.run(self._filled[1]).next_tokens[:, : nodes + 1]

    def round(self, nodes: int) -> Mapping[str, float]:
        """A round of one call."""
        ms = self._run(nodes, 0)
        return {"draft": ms["draft"], "build": ms["build_tree"], "verify": ms["verify"]}

    def _run(self, nodes: int, epoch: int) -> Mapping[str, float]:
        batch, context = self._place.batch, self._place.context
        size = self._rounds.sizes.nodes_for(batch, nodes)
        assert size is not None, "every size up to the place's is prepared"
        result = self._rounds.run(
            RoundRequest(
                sessions=batch_of(batch, context),
                draft_epochs=ints(batch, epoch),
                root_tokens=ints(batch, ROOT),
                budgets=ints(batch, nodes),
                depths=ints(batch, self._pair.shape.draft.draft_positions),
                is_chain=torch.zeros(batch, dtype=torch.bool),
                nodes=size,
            )
        )
        assert not result.status.any(), "the sessions are there"
        rewind(self._sessions, context)
        rewind(self._draft_sessions, context)
        self._filled = None
        return result.stage_ms

    def _fill(self, nodes: int) -> StepSize:
        size = self._steps.size_for(self._place.batch, nodes)
        assert size is not None, "every size up to the place's is prepared"
        buffers = self._steps.buffers[size]
        trees = made_up_trees(self._pair, self._place.batch, nodes)
        buffers.fill(self._sessions, [ROOT] * len(self._sessions), trees)
        buffers.box.send()
        return size
