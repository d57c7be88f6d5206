"""Makes the stages of one process fast on their GPU, once all of them are loaded.

In this order: fused layers and products of our own in place, the fastest product for every shape, then
captured steps and rounds. Nothing of it is needed for a right answer. This module knows what the stages are,
not how a request is served.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from ddtree.config import ServingConfig
from ddtree.device.accelerate import accelerate_linears, accelerate_target, chooser_for
from ddtree.device.buffers import CacheSize, StepSize
from ddtree.device.draft_steps import DraftSteps
from ddtree.device.drafting import MOST_CANDIDATES
from ddtree.device.graphs import GraphMaker
from ddtree.device.keeping import TargetCache
from ddtree.device.load_check import check_calls, check_rounds, check_steps
from ddtree.device.rounds import DeviceRounds
from ddtree.device.steps import TargetSteps, sizes_for
from ddtree.device.verify_calls import VerifyCalls
from ddtree.draft import Drafter
from ddtree.kv_cache import KvPool
from ddtree.models.target import TargetModel
from ddtree.verify import TargetVerifier

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preparation:
    """What to prepare, and whom to tell."""

    sizes: tuple[StepSize, ...]
    context_length: int  # of the longest sequence
    max_nodes: int  # most draft nodes a request may ask for: pages are held for them, prepared or not
    on_progress: Callable[[StepSize], None] | None = None
    depth: int = 15  # of the deepest tree that a verifier in a process of its own is prepared for
    repeats: int = 5  # of every size's timing

    def reach(self, pool: KvPool, block_size: int) -> CacheSize:
        """How far a sequence's pages may reach in a pool."""
        nodes = max(self.max_nodes, *(size.nodes for size in self.sizes))
        slots = self.context_length + nodes + block_size + 1
        return CacheSize(min(pool.num_pages, -(-slots // pool.page_size)), pool.page_size)


def prepare_steps(
    verifier: TargetVerifier, target: TargetModel, wanted: Preparation, maker: GraphMaker
) -> TargetSteps:
    """Capture the target's steps and what follows them in a verify call, and let the verifier use them."""
    cache = wanted.reach(verifier.pool, 0)
    steps = _steps(verifier, target, wanted, (cache, cache), maker)
    kept_in = TargetCache(verifier.pool, verifier.projection)
    verifier.use(steps, wanted.repeats)
    calls = VerifyCalls(steps, kept_in, wanted.depth, maker)
    check_calls(verifier, steps, calls)
    verifier.use_calls(calls)
    return steps


def prepare_rounds(
    verifier: TargetVerifier, drafter: Drafter, target: TargetModel, wanted: Preparation, maker: GraphMaker
) -> DeviceRounds:
    """Capture the target's steps, and whole rounds over them."""
    block = drafter.block_size
    caches = (wanted.reach(verifier.pool, block), wanted.reach(drafter.pool, block))
    steps = _steps(verifier, target, wanted, caches, maker)
    rounds = DeviceRounds(verifier, drafter, steps, maker)
    try:
        rounds.prepare(wanted.on_progress, wanted.repeats)
        check_rounds(verifier, drafter, steps, rounds)
    finally:
        # Not before: what rounds leave in the cache is held to what the packed forward leaves there. But also
        # where they are off: steps were checked by themselves.
        verifier.use(steps, wanted.repeats)
    return rounds


def _steps(
    verifier: TargetVerifier,
    target: TargetModel,
    wanted: Preparation,
    caches: tuple[CacheSize, CacheSize],
    maker: GraphMaker,
) -> TargetSteps:
    steps = TargetSteps(target, verifier.pool, wanted.sizes, caches, maker)
    steps.prepare(wanted.on_progress)
    check_steps(verifier, steps)
    return steps


class Acceleration:
    """Works on the stages of one process and one device; `finish` comes last."""

    def __init__(self, config: ServingConfig, device: torch.device, depth: int) -> None:
        """Take the settings, where the stages are, and the drafter's positions."""
        self._config, self._depth = config, depth
        self._chooser = chooser_for(device)
        self._maker = GraphMaker(device)

    def take_target(self, target: TargetModel) -> None:
        """Fuse a target's layers."""
        fused = accelerate_target(target, self._chooser)
        _LOG.info("%d decoder layers are fused", fused)

    def finish(self, verifier: TargetVerifier | None, drafter: Drafter | None) -> DeviceRounds | None:
        """Choose products and capture; gives whole rounds where both stages are here and can do them."""
        if verifier is not None:
            accelerate_linears(verifier.projection, self._chooser)
        if drafter is not None:
            drafter.choose_products(self._chooser.linear)
        with tqdm(desc="choosing matrix products", disable=None) as bar:
            self._chooser.tune(lambda done, total: _show(bar, done, total))
        rounds = None
        try:
            rounds = self._capture(verifier, drafter)
        except Exception as error:  # noqa: BLE001 - whatever a compiler or a card says, there is another way
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            _LOG.warning("not everything is captured, so the GPU works more slowly: %s", reason)
        _LOG.info("captured %s", self._maker.report())
        return rounds

    def _capture(self, verifier: TargetVerifier | None, drafter: Drafter | None) -> DeviceRounds | None:
        config = self._config
        sizes = sizes_for(config.max_sequences, config.max_nodes, config.max_step_nodes)
        target = None if verifier is None else verifier.target
        if drafter is not None:
            _capture_drafts(drafter, sorted({size.places for size in sizes}), self._maker)
        if verifier is None or not isinstance(target, TargetModel):
            return None
        if (most_rows := verifier.pool.most_rows) is not None:
            # Where recurrent layers leave room for fewer rows, larger batches of trees take several steps.
            sizes = tuple(size for size in sizes if size.rows <= most_rows)
        with tqdm(desc="capturing", total=len(sizes) * (1 if drafter is None else 2), disable=None) as bar:
            wanted = Preparation(
                sizes, target.context_length, config.max_nodes, lambda _: _advance(bar), self._depth
            )
            if drafter is None:
                prepare_steps(verifier, target, wanted, self._maker)
                return None
            return prepare_rounds(verifier, drafter, target, wanted, self._maker)


def _capture_drafts(drafter: Drafter, places: list[int], maker: GraphMaker) -> None:
    cache = CacheSize(drafter.pool.num_pages, drafter.pool.page_size)
    steps = DraftSteps(
        drafter.on_device(), places, cache, block_size=drafter.block_size, width=MOST_CANDIDATES, maker=maker
    )
    drafter.use(steps)


def _show(bar: Any, done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)


def _advance(bar: Any) -> None:
    bar.update()
