"""Deadlines and the bounded wait for a place, by a clock that goes when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddtree.errors import ResourceExhausted, Unavailable
from ddtree.events import RequestWatch
from ddtree.params import GenerationParams
from tests.fakes.clock import ManualClock
from tests.fakes.collecting_sink import CollectingSink
from tests.fakes.pipeline import GreedyReference, make_verifier
from tests.integration.stage_faults import LONG, SHORT, reference_of, request, until, world_of

ENDLESS = GenerationParams(LONG, max_tokens=400, tree_budget=4, ignore_eos=True)


def at_call(operation: str, count: int, act: Callable[[], None]) -> Callable[[str, Any], None]:
    """Do something at one call of a stage."""
    calls = 0

    def before(name: str, _: Any) -> None:
        nonlocal calls
        calls += name == operation
        if name == operation and calls == count:
            act()

    return before


@pytest.mark.parametrize("rounds", [1, 4])
async def test_a_running_sequence_ends_with_the_round_in_which_its_deadline_comes(
    tiny_target: Path, tiny_reference: GreedyReference, rounds: int
) -> None:
    clock = ManualClock()
    async with world_of(tiny_target, clock=clock) as world:
        world.stages.before = at_call("verify", rounds, lambda: clock.advance(5))
        sink = CollectingSink()
        await world.engine.generate(replace(ENDLESS, deadline_ms=5000), sink)
        assert sink.finish_reason == "deadline"
        assert sink.stats is not None
        assert sink.stats.rounds == rounds
        assert sink.token_ids == tiny_reference(LONG, len(sink.token_ids))


async def test_a_prefill_ends_at_the_deadline(tiny_target: Path) -> None:
    clock = ManualClock()
    async with world_of(tiny_target, clock=clock) as world:
        prefills: list[str] = []

        def before(name: str, _: Any) -> None:
            if name == "prefill":
                prefills.append(name)
                clock.advance(len(prefills) == 2)

        world.stages.before = before
        sink = CollectingSink()
        await world.engine.generate(replace(ENDLESS, deadline_ms=1000), sink)
        assert [(delta.token_ids, delta.finish_reason) for delta in sink.deltas] == [((), "deadline")]
        assert len(prefills) == 2


async def test_the_time_before_the_queue_counts(tiny_target: Path) -> None:
    clock = ManualClock()
    async with world_of(tiny_target, clock=clock) as world:
        arrived = RequestWatch()
        arrived.arrived_s -= 60
        with pytest.raises(Unavailable, match="its deadline came"):
            await world.engine.generate(replace(ENDLESS, deadline_ms=59_000), CollectingSink(), arrived)


async def test_a_waiting_sequence_is_refused_at_its_deadline_and_no_stage_hears_of_it(
    tiny_target: Path,
) -> None:
    clock = ManualClock()
    async with world_of(tiny_target, max_sequences=1, clock=clock) as world:
        first = CollectingSink()
        running = world.begin(ENDLESS, first)
        await until(lambda: first.deltas)
        opened: list[int] = []
        world.stages.before = lambda name, _: opened.append(1) if name == "prefill" else None
        waiting = world.begin(replace(ENDLESS, deadline_ms=3000), CollectingSink())
        await until(lambda: world.scheduler.num_waiting)
        clock.advance(3)
        with pytest.raises(
            Unavailable,
            match=r"its deadline came after 3\.0 s in the queue: all places are taken .*; retry in ",
        ):
            await waiting
        assert not opened
        running.cancel()


async def test_nobody_waits_longer_for_a_place_than_the_server_lets_them(
    tiny_target: Path, tiny_reference: GreedyReference
) -> None:
    clock = ManualClock()
    async with world_of(tiny_target, max_sequences=1, queue_timeout_ms=2000, clock=clock) as world:
        first, late = CollectingSink(), CollectingSink()
        running = world.begin(ENDLESS, first)
        early = world.begin(request(SHORT), CollectingSink())
        await until(lambda: first.deltas)
        clock.advance(1)
        later = world.begin(request(SHORT), late)
        await until(lambda: world.scheduler.num_waiting == 2)
        clock.advance(1)
        with pytest.raises(ResourceExhausted, match=r"after 2\.0 s in the queue: all places are taken"):
            await early
        assert not later.done(), "it came a second later"
        running.cancel()
        await later
        assert late.token_ids == reference_of(tiny_reference, request(SHORT))


async def test_who_waits_for_pages_is_told_so(tiny_target: Path) -> None:
    clock = ManualClock()
    page_bytes = make_verifier(tiny_target).pool.shape.bytes_per_slot * 16
    verifier = make_verifier(tiny_target, kv_cache_bytes=8 * page_bytes, max_nodes=8)
    async with world_of(tiny_target, verifier=verifier, queue_timeout_ms=2000, clock=clock) as world:
        first = CollectingSink()
        running = world.begin(replace(ENDLESS, prompt_ids=SHORT, max_tokens=80), first)
        await until(lambda: first.deltas)
        clock.advance(1)
        world.stages.before = lambda *_: clock.advance(0.05)
        with pytest.raises(ResourceExhausted, match="the KV pool has no room for it"):
            await world.engine.generate(replace(ENDLESS, prompt_ids=SHORT, max_tokens=80), CollectingSink())
        running.cancel()


async def test_the_hint_follows_the_pace_of_who_runs(tiny_target: Path) -> None:
    clock = ManualClock()
    async with world_of(tiny_target, max_sequences=1, max_waiting=0, clock=clock) as world:
        sink = CollectingSink()
        running = world.begin(replace(ENDLESS, tree_budget=0, max_tokens=101), sink)
        await until(lambda: sink.deltas)
        world.stages.before = lambda name, _: clock.advance(0.5) if name == "verify" else None
        await until(lambda: len(sink.deltas) > 60)
        expected = f"retry in {-(-(101 - len(sink.deltas)) // 2)} s"
        with pytest.raises(ResourceExhausted) as refused:
            await world.engine.generate(request(SHORT), CollectingSink())
        hint = int(str(refused.value).split("retry in ")[1].split(" s")[0])
        assert abs(hint - int(expected.split()[2])) <= 2, (str(refused.value), expected)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
