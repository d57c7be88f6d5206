"""The target's step on the device, captured for a few sizes; trees come from the host or from the device.

A step lays out rows for its trees, runs the target over them and chooses the most probable token after every
row. This module knows the target and its pool; not sessions, acceptance or the drafter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass

import torch

from ddtree.budget import CostCurve, measure
from ddtree.device.buffers import CacheSize, StepBuffers, StepSize
from ddtree.device.graphs import Captured, GraphMaker
from ddtree.device.kernels.layout import lay_out
from ddtree.device.plan import DevicePlan
from ddtree.kv_cache import KvPool
from ddtree.models.target import TargetModel, TargetStep
from ddtree.recurrent.step import RecurrentStep
from ddtree.sessions import Session
from ddtree.staging import Staged
from ddtree.types import TreeBatch
from ddtree.verify_cost import COST_PREFIX

_LOG = logging.getLogger(__name__)

# Draft nodes of a sequence that steps are prepared for. With the root most fill a matrix product's tiles; 64
# is what benchmarks ask for, and 256 what a request may, unless set otherwise.
NODE_SIZES = (0, 7, 15, 31, 64, 127, 256)


@dataclass(frozen=True)
class StepOutput:
    """What one step gives; valid until the next step of any size."""

    next_tokens: torch.Tensor  # [S, T] int64
    logits: torch.Tensor  # [S * T, V]
    taps: torch.Tensor  # [S * T, taps * H]
    recurrent: RecurrentStep | None  # waits for its commit


def sizes_for(max_sequences: int, max_nodes: int, most_rows: int) -> tuple[StepSize, ...]:
    """The sizes to prepare: powers of two of places, and trees as large as a step may be."""
    places, every = 1, []
    while places < max_sequences:
        every.append(places)
        places *= 2
    every.append(max_sequences)
    nodes = sorted({min(size, max_nodes) for size in NODE_SIZES})
    return tuple(StepSize(p, n) for p in every for n in nodes if not n or p * n <= most_rows)


class TargetSteps:
    """The target's steps by size."""

    def __init__(
        self,
        target: TargetModel,
        pool: KvPool,
        sizes: Sequence[StepSize],
        caches: tuple[CacheSize, CacheSize],
        maker: GraphMaker,
    ) -> None:
        """Allocate what steps read and write.

        Args:
            target: the model; its decoder layers may be fused.
            pool: where its keys and values go.
            sizes: what to prepare.
            caches: pages of the target and of the drafter.
            maker: captures on the target's device.
        """
        self.sizes = tuple(sizes)
        self._target, self._pool, self._maker = target, pool, maker
        self.buffers: Mapping[StepSize, StepBuffers] = {
            size: StepBuffers(size, *caches, target.device, pool.state_of) for size in sizes
        }
        rows = max(size.rows for size in sizes)
        self._logits = torch.empty((rows, target.vocab_size), dtype=target.dtype, device=target.device)
        self._steps: dict[StepSize, Captured[StepOutput]] = {}

    def prepare(self, on_progress: Callable[[StepSize], None] | None = None) -> None:
        """Capture every size, the largest first: the others then fit into its memory."""
        for size in sorted(self.sizes, key=lambda size: -size.rows):
            try:
                self._steps[size] = self._maker.capture(self._work(self.buffers[size]))
            except Exception as error:  # noqa: BLE001 - a kernel that does not fit the card, for one
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                _LOG.warning("%d sequences of %d nodes take the general way: %s", *astuple(size), reason)
            if on_progress is not None:
                on_progress(size)
        self.sizes = tuple(size for size in self.sizes if size in self._steps)
        if not self.sizes:
            raise RuntimeError("no step can be captured here")

    def size_for(self, sequences: int, nodes: int) -> StepSize | None:
        """The smallest prepared size that holds a batch; None when there is none."""
        fitting = (size for size in self.sizes if size.places >= sequences and size.nodes >= nodes)
        return min(fitting, key=lambda size: (size.rows, size.places), default=None)

    def rows(self, sequences: int, nodes: int) -> int | None:
        """Rows of the smallest prepared size that holds a batch; None when there is none."""
        size = self.size_for(sequences, nodes)
        return None if size is None else size.rows

    def run(self, size: StepSize) -> StepOutput:
        """Enqueue the step over what its buffers hold on the device."""
        return self._steps[size]()

    def captured(self, size: StepSize) -> Captured[StepOutput]:
        """The step of one size."""
        return self._steps[size]

    @torch.inference_mode()
    def stage(self, sessions: Sequence[Session], trees: TreeBatch, roots: Sequence[int]) -> Staged | None:
        """Run the target over trees that are on the host; None when no size holds them."""
        size = self.size_for(len(sessions), trees.tokens.shape[1])
        if size is None:
            return None
        buffers = self.buffers[size]
        buffers.fill(sessions, roots, trees)
        buffers.box.send()
        output, count = self.run(size), len(sessions)
        starts = [place * (size.nodes + 1) for place in range(count)]
        made = buffers.trees
        own = TreeBatch(made.tokens[:count], made.parents[:count], made.depths[:count], made.counts[:count])
        recurrent = None if output.recurrent is None else output.recurrent.first(count)
        step = TargetStep(output.logits, (output.taps,))
        return Staged(step, starts, buffers.rows.slots.view(-1), own, recurrent)

    def cost(self, repeats: int) -> CostCurve:
        """Time a sequence's steps of every size; nothing of them stays in the pool."""
        sizes = {size.nodes + 1: size for size in self.sizes if size.places == 1}
        reach = min(buffers.reach for buffers in self.buffers.values())
        prefix = max(0, min(COST_PREFIX, reach - max(sizes)))
        pages = self._pool.reserve(prefix + max(sizes))
        assert pages is not None, "the cost is measured before the first session"
        session = Session(0, 0, pages, prefix)

        def step(rows: int) -> None:
            parents = torch.arange(rows - 1, dtype=torch.int32)[None]
            counts = torch.tensor([rows - 1], dtype=torch.int32)
            staged = self.stage([session], TreeBatch(parents, parents, parents + 1, counts), [0])
            assert staged is not None, "every size is prepared"
            staged.trees.counts.cpu()  # waits for the device

        curve = measure(step, sorted(sizes), repeats)
        self._pool.release(pages)
        return curve

    def _work(self, buffers: StepBuffers) -> Callable[[], StepOutput]:
        rows, views, states = buffers.rows, buffers.box.device, self._pool.states

        def step() -> StepOutput:
            lay_out(buffers.trees, views["roots"], views["active"], rows, buffers.token_ids)
            recurrent = None if states is None else RecurrentStep.of_rows(states, rows, views["states"])
            plan = DevicePlan(rows, self._pool, recurrent=recurrent)
            output = self._target.device_forward(buffers.token_ids, plan)
            logits = self._logits[: buffers.size.rows]
            logits.copy_(output.logits)
            tokens = output.logits.argmax(dim=-1).view(buffers.token_ids.shape)
            return StepOutput(tokens, logits, torch.cat(output.taps, dim=-1), recurrent)

        return step
