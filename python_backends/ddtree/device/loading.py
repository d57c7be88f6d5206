"""Prepares rounds on a device for stages that were loaded there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ddtree.device.buffers import CacheSize, StepSize
from ddtree.device.graphs import GraphMaker
from ddtree.device.rounds import DeviceRounds
from ddtree.device.steps import TargetSteps
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
    on_progress: Callable[[StepSize], None] | None = None  # called twice per size
    repeats: int = 5  # of every size's timing


def prepare_rounds(
    verifier: TargetVerifier, drafter: Drafter, target: TargetModel, wanted: Preparation
) -> DeviceRounds:
    """Capture the target's steps and whole rounds, and say what that took."""
    maker = GraphMaker(target.device)
    slots = wanted.context_length + max(size.nodes for size in wanted.sizes) + drafter.block_size + 1
    caches = (_reach(verifier.pool, slots), _reach(drafter.pool, slots))
    steps = TargetSteps(target, verifier.pool, wanted.sizes, caches, maker)
    steps.prepare(wanted.on_progress)
    rounds = DeviceRounds(verifier, drafter, steps, maker)
    rounds.prepare(wanted.on_progress, wanted.repeats)
    _LOG.info("rounds of %d sizes are prepared: %s", len(wanted.sizes), maker.report())
    return rounds


def _reach(pool: KvPool, slots: int) -> CacheSize:
    return CacheSize(min(pool.num_pages, -(-slots // pool.page_size)), pool.page_size)
