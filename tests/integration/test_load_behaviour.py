"""Tokens per second of `auto` against chains and plain decoding, over machines, loads and kinds of drafts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from ddtree import events
from ddtree.engine import Engine
from ddtree.params import DraftMode, GenerationParams
from ddtree.scheduler import Scheduler
from ddtree.types import DraftRequest, DraftResult
from tests.fakes.collecting_sink import CollectingSink
from tests.fakes.lives import NoText
from tests.fakes.virtual_stages import BLOCK_SIZE, Machine, VirtualClock, VirtualStages

_CPU_ROWS, _CPU_MS = (1, 4, 8, 17, 33, 65), (19.4, 19.6, 25.3, 34.4, 51.0, 87.5)
_GPU_ROWS, _GPU_MS = (1, 17, 65, 129, 257, 513), (6.5, 8.4, 8.9, 9.8, 12.6, 21.0)


def _cpu_ms(sequences: int, rows: int) -> float:
    """A small target on two cores: it computes from eight rows on."""
    inside = float(np.interp(rows, _CPU_ROWS, _CPU_MS))
    return inside + 1.14 * max(0, rows - _CPU_ROWS[-1]) + 1.0 * (sequences - 1)


def _gpu_ms(sequences: int, rows: int) -> float:
    """An 8B target on an H200: two hundred rows cost half as much again as one."""
    return float(np.interp(rows, _GPU_ROWS, _GPU_MS)) + 0.02 * (sequences - 1)


CPU = Machine(_cpu_ms, lambda sequences: 13 + 6.0 * (sequences - 1))
GPU = Machine(_gpu_ms, lambda sequences: 1.5 + 0.05 * (sequences - 1))
MACHINES = {
    "cpu": CPU,
    "gpu": GPU,
    "gpu, busy while loading": replace(GPU, load_factor=6.0),
    "gpu, a slow drafter": replace(GPU, draft_ms=lambda sequences: 9.0 + 0.3 * (sequences - 1)),
}
DRAFTS = {"good": (80,), "bad": (25,), "mixed": (85, 20)}  # how sure, in percent


PARAMS = GenerationParams((60, 1, 2), max_tokens=60, ignore_eos=True)


async def engine_of(stages: VirtualStages, observe: events.Observe = events.ignore, **options: int) -> Engine:
    """A started engine on the stages' clock."""
    scheduler = Scheduler(max_sequences=32, max_waiting=0, prefill_chunk=10_000)
    engine = Engine(stages, NoText(), scheduler=scheduler, observe=observe, timer=stages.clock, **options)
    engine._next_session = 1  # the same texts in every run
    await engine.start()
    return engine


async def tokens_per_s(
    machine: Machine,
    mode: DraftMode,
    sure: tuple[int, ...],
    streams: int,
    stages: VirtualStages | None = None,
    observe: events.Observe = events.ignore,
) -> float:
    """Decode on so many streams, two answers each; `sure` is how sure their drafts are, in turn."""
    stages = stages or VirtualStages(machine)
    engine = await engine_of(stages, observe)

    async def stream(number: int) -> None:
        for turn in range(2):
            prompt = (sure[(number + turn * (streams + 1)) % len(sure)], 1, 2)
            await engine.generate(replace(PARAMS, prompt_ids=prompt, draft_mode=mode), CollectingSink())

    await asyncio.gather(*(stream(number) for number in range(streams)))
    await engine.stop()
    return 2 * streams * PARAMS.max_tokens / stages.clock()


@pytest.mark.parametrize(
    ("machine", "drafts", "streams"),
    [
        *(("cpu", drafts, streams) for drafts in DRAFTS for streams in (1, 4, 16)),
        ("cpu", "mixed", 32),
        *(("gpu", drafts, 4) for drafts in DRAFTS),
        *(("gpu, busy while loading", drafts, 16) for drafts in DRAFTS),
        *(("gpu, a slow drafter", drafts, 16) for drafts in ("bad", "mixed")),
    ],
)
async def test_auto_is_never_much_below_the_better_of_chains_and_plain_decoding(
    machine: str, drafts: str, streams: int
) -> None:
    modes: tuple[DraftMode, ...] = ("tree", "chain", "off")
    speeds = [await tokens_per_s(MACHINES[machine], mode, DRAFTS[drafts], streams) for mode in modes]
    assert speeds[0] >= 0.93 * max(speeds[1:]), speeds


async def test_a_sequence_that_drafts_badly_rests_and_the_others_draft_on() -> None:
    """Of sixteen every second one drafts well enough for what its draft takes."""
    stages = VirtualStages(replace(GPU, draft_ms=lambda sequences: 2.0 + 0.6 * sequences))
    rounds = {90: [0, 0], 20: [0, 0]}  # by how sure its drafts are: all, and those in which it rested

    def observe(event: events.Event) -> None:
        if isinstance(event, events.RoundDone) and len(event.batch) == 16:
            for live in event.batch:
                counts = rounds[live.sequence.params.prompt_ids[0]]
                counts[0] += 1
                counts[1] += live.outlook.is_resting

    await tokens_per_s(stages.machine, "tree", (90, 20), 16, stages, observe)
    assert rounds[90][1] < 0.25 * rounds[90][0]
    assert rounds[20][1] > 0.5 * rounds[20][0]


async def test_who_begins_to_rest_is_told_once() -> None:
    stages = VirtualStages(MACHINES["gpu, a slow drafter"])
    told: list[events.Event] = []
    await tokens_per_s(stages.machine, "tree", (5,), 4, stages, told.append)
    pauses = [event for event in told if isinstance(event, events.FellBack)]
    assert [event.reason for event in pauses] == ["not_paying"] * len(pauses)
    assert 4 <= len(pauses) <= 16, "eight sequences; a try may let one begin again"


@pytest.mark.parametrize("mode", ["tree", "chain"])
async def test_a_round_never_verifies_more_nodes_than_a_step_may(mode: DraftMode) -> None:
    """Thirty-two streams that ask for 64 nodes each, and as many that leave it open."""
    for budget in (64, -1):
        stages = VirtualStages(GPU)
        params = replace(PARAMS, draft_mode=mode, tree_budget=budget)
        engine = await engine_of(stages, max_step_nodes=100)
        await asyncio.gather(*(engine.generate(params, CollectingSink()) for _ in range(32)))
        await engine.stop()
        assert max(stages.rows) <= 132
        assert max(stages.rows) > 100, "and it does use them"


@pytest.mark.parametrize(("sure", "usual"), [(95, BLOCK_SIZE - 1), (30, 5)])
async def test_few_positions_are_asked_for_where_trees_stay_low_and_all_where_they_are_deep(
    sure: int, usual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs a row of the drafter's head."""
    asked: list[int] = []
    stages = VirtualStages(CPU)
    draft = stages.draft

    async def noted(request: DraftRequest) -> DraftResult:
        asked.append(request.depth)
        return await draft(request)

    monkeypatch.setattr(stages, "draft", noted)
    await tokens_per_s(CPU, "tree", (sure,), 1, stages)
    assert np.median([depth for depth in asked if depth]) == usual


def _growing_ms(clock: VirtualClock, _: int) -> float:
    return 1.5 * min(50.0, 1 + 20 * clock())


async def test_a_drafter_that_becomes_slow_with_the_context_is_left_alone() -> None:
    """A public report: slower than plain decoding from some context on. Here a draft grows fifty-fold."""
    speeds = []
    modes: tuple[DraftMode, ...] = ("tree", "off")
    for mode in modes:
        stages = VirtualStages(GPU)
        stages.machine = replace(GPU, draft_ms=partial(_growing_ms, stages.clock))
        engine = await engine_of(stages)
        params = replace(PARAMS, prompt_ids=(50, 1, 2), draft_mode=mode, max_tokens=600)
        await engine.generate(params, CollectingSink())
        await engine.stop()
        speeds.append(600 / stages.clock())
    assert speeds[0] >= 0.95 * speeds[1], speeds


@pytest.mark.parametrize("mode", ["tree", "chain", "off"])
async def test_as_many_sequences_decode_together_as_there_are_places(mode: DraftMode) -> None:
    """Public reports: speculation silently caps how many run at once, or falls back to one at a time."""
    sizes: list[int] = []

    def observe(event: events.Event) -> None:
        if isinstance(event, events.RoundDone):
            sizes.append(len(event.batch))

    await tokens_per_s(GPU, mode, (60,), 32, observe=observe)
    assert sizes[0] == 32
    assert np.median(sizes) >= 30
