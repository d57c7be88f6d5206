"""The engine when stages or sinks fail: only those concerned notice, and nothing is left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ddtree.errors import DDTreeError, ResourceExhausted, Unavailable
from ddtree.sequence import Delta, Stats
from tests.fakes.collecting_sink import CollectingSink
from tests.fakes.pipeline import (
    GreedyReference,
    generate_all,
    make_oracle,
    make_verifier,
    running_engine,
)
from tests.integration.stage_faults import LONG, SHORT, no_fault, reference_of, request, until, world_of


@pytest.mark.parametrize("error", [Unavailable("no answer"), RuntimeError("out of memory")], ids=repr)
@pytest.mark.parametrize("operation", ["prefill", "verify"])
async def test_a_stage_that_raises_fails_its_call_and_the_loop_lives(
    tiny_target: Path, tiny_reference: GreedyReference, operation: str, error: Exception
) -> None:
    async with world_of(tiny_target) as world:
        calls = 0

        def fail_once(name: str, _: Any) -> None:
            nonlocal calls
            calls += name == operation
            if name == operation and calls == 2:
                raise error

        world.stages.before = fail_once
        with pytest.raises(Unavailable, match=str(error)):
            await world.engine.generate(request(LONG), CollectingSink())
        (sink,) = await generate_all(world.engine, [request(SHORT)])
        assert sink.token_ids == reference_of(tiny_reference, request(SHORT))


@pytest.mark.parametrize("error", [Unavailable("no answer"), RuntimeError("out of memory")], ids=repr)
async def test_a_failed_prefill_does_not_touch_those_who_decode_or_wait(
    tiny_target: Path, tiny_reference: GreedyReference, error: Exception
) -> None:
    async with world_of(tiny_target, max_sequences=2) as world:
        decoding = CollectingSink()
        first = world.begin(request(SHORT, 60), decoding)
        await until(lambda: decoding.deltas)

        def fail_once(name: str, _: Any) -> None:
            if name == "prefill":
                world.stages.before = no_fault
                raise error

        world.stages.before = fail_once
        broken = world.begin(request(LONG), CollectingSink())
        waiting = CollectingSink()
        last = world.begin(request(SHORT), waiting)
        with pytest.raises(Unavailable, match=str(error)):
            await broken
        await asyncio.gather(first, last)
        assert decoding.token_ids == reference_of(tiny_reference, request(SHORT, 60))
        assert waiting.token_ids == reference_of(tiny_reference, request(SHORT))


class BrokenSink(CollectingSink):
    """Cannot be written to after some deltas."""

    def __init__(self, deltas: int) -> None:
        super().__init__()
        self._left = deltas

    def emit(self, delta: Delta, stats: Stats) -> None:
        """Keep a delta while there is room."""
        if not self._left:
            raise OSError("broken pipe")
        self._left -= 1
        super().emit(delta, stats)


@pytest.mark.parametrize("deltas", [0, 1, 3])
async def test_a_sink_that_raises_ends_its_sequence_only(
    tiny_target: Path, tiny_reference: GreedyReference, deltas: int
) -> None:
    async with world_of(tiny_target) as world:
        sink = CollectingSink()
        other = world.begin(request(SHORT), sink)
        with pytest.raises(Unavailable, match="could not be sent: broken pipe"):
            await world.engine.generate(request(LONG), BrokenSink(deltas))
        await other
        assert sink.token_ids == reference_of(tiny_reference, request(SHORT))


async def test_two_failures_in_one_step_touch_nobody_else(
    tiny_target: Path, tiny_reference: GreedyReference
) -> None:
    # The sink of a prefilled sequence breaks; then the verifier fails on the next chunk of another one.
    async with world_of(tiny_target, prefill_chunk=16) as world:
        sink = CollectingSink()
        bystander = world.begin(request(SHORT, 60), sink)
        await until(lambda: sink.deltas)

        def fail_prefill(name: str, message: Any) -> None:
            if name == "prefill" and bool((message.sessions.lengths > 0).any()):
                raise Unavailable("no answer")

        world.stages.before = fail_prefill
        broken = world.begin(request(SHORT), BrokenSink(0))
        chunked = world.begin(request(LONG), CollectingSink())
        outcomes = await asyncio.gather(broken, chunked, bystander, return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == [
            "UNAVAILABLE: the answer could not be sent: broken pipe", "UNAVAILABLE: no answer", "None",
        ]  # fmt: skip
        assert sink.token_ids == reference_of(tiny_reference, request(SHORT, 60))


@pytest.mark.parametrize("error", [Unavailable("no answer"), RuntimeError("out of memory")], ids=repr)
@pytest.mark.parametrize("failures", [1, 1000])
@pytest.mark.parametrize("operation", ["draft", "build_tree"])
async def test_a_drafter_or_tree_builder_that_fails_costs_drafts_and_no_answer(
    tiny_target: Path, tiny_reference: GreedyReference, operation: str, error: Exception, failures: int
) -> None:
    async with world_of(tiny_target) as world:
        left = failures

        def fail(name: str, _: Any) -> None:
            nonlocal left
            if name == operation and left:
                left -= 1
                raise error

        world.stages.before = fail
        sinks = await generate_all(world.engine, [request(LONG), request(SHORT)])
        for sink, params in zip(sinks, (request(LONG), request(SHORT)), strict=True):
            assert sink.token_ids == reference_of(tiny_reference, params)
            assert sink.stats is not None
            assert (sink.stats.draft_tokens > 0) == (failures == 1)


@pytest.mark.parametrize("failures", [1, 1000])
async def test_features_that_cannot_be_read_back_cost_drafts_and_no_answer(
    tiny_target: Path, tiny_reference: GreedyReference, failures: int
) -> None:
    async with world_of(tiny_target) as world:
        drafts = reads = 0

        def fail(name: str, _: Any) -> None:
            nonlocal drafts, reads
            drafts += name == "draft"
            reads += name == "read_features"
            if (name == "draft" and drafts == 1) or (name == "read_features" and reads <= failures):
                raise Unavailable("no answer")

        world.stages.before = fail
        sinks = await generate_all(world.engine, [request(LONG), request(SHORT)])
        for sink, params in zip(sinks, (request(LONG), request(SHORT)), strict=True):
            assert sink.token_ids == reference_of(tiny_reference, params)
        assert reads > 1
        assert sinks[0].stats is not None
        assert (sinks[0].stats.draft_tokens > 0) == (failures == 1)


async def test_a_release_that_fails_ends_nothing_but_itself(
    tiny_target: Path, tiny_reference: GreedyReference
) -> None:
    async with world_of(tiny_target) as world:

        def fail(name: str, _: Any) -> None:
            if name == "release":
                raise Unavailable("no answer")

        world.stages.before = fail
        for _ in range(2):
            (sink,) = await generate_all(world.engine, [request(SHORT)])
            assert sink.token_ids == reference_of(tiny_reference, request(SHORT))
        world.stages.before = no_fault
        assert len(world.verifier.sessions) == 2
        await generate_all(world.engine, [request(SHORT)])  # with its end the stages are told of all three


# --- too little room


async def test_a_pool_too_small_for_one_sequence_is_said(tiny_target: Path) -> None:
    small = make_verifier(tiny_target, kv_cache_bytes=25_000, max_nodes=8)  # 48 slots
    async with world_of(tiny_target, verifier=small) as world:
        with pytest.raises(ResourceExhausted, match=r"cannot hold 58 tokens; .* larger kv_cache_mib"):
            await world.engine.generate(request(LONG[:50], 8, budget=8), CollectingSink())


async def test_a_pool_too_small_for_all_serves_them_in_turn(
    tiny_target: Path, tiny_reference: GreedyReference
) -> None:
    small = make_verifier(tiny_target, kv_cache_bytes=60_000, max_nodes=8)  # room for two of them
    async with world_of(tiny_target, verifier=small) as world:
        requests = [request(LONG[: 5 + n], 20, budget=n % 9) for n in range(9)]
        began: list[int] = []
        sinks = [CollectingSink(on_emit=partial(began.append, number)) for number in range(len(requests))]
        await asyncio.gather(*(world.begin(*pair) for pair in zip(requests, sinks, strict=True)))
        for params, sink in zip(requests, sinks, strict=True):
            assert sink.token_ids == reference_of(tiny_reference, params)
        first = list(dict.fromkeys(began))
        assert first == sorted(first), "a waiting sequence never overtakes"


async def test_more_sequences_than_places_all_finish(
    tiny_target: Path, tiny_reference: GreedyReference
) -> None:
    async with world_of(tiny_target, max_sequences=3) as world:
        requests = [request(LONG[: 1 + 3 * n], 10 + n) for n in range(12)]
        for params, sink in zip(requests, await generate_all(world.engine, requests), strict=True):
            assert sink.token_ids == reference_of(tiny_reference, params)


async def test_a_full_queue_refuses(tiny_target: Path, tiny_reference: GreedyReference) -> None:
    async with world_of(tiny_target, max_sequences=2, max_waiting=3) as world:
        sinks = [CollectingSink() for _ in range(9)]
        outcomes = await asyncio.gather(
            *(world.begin(request(SHORT), sink) for sink in sinks), return_exceptions=True
        )
        refused = [outcome for outcome in outcomes if outcome is not None]
        assert [type(outcome) for outcome in refused] == [ResourceExhausted] * 4
        assert all("retry" in str(outcome) for outcome in refused)
        expected = reference_of(tiny_reference, request(SHORT))
        assert [sink.token_ids for sink in sinks] == [expected] * 5 + [[]] * 4


async def test_errors_are_ours(tiny_target: Path) -> None:
    async with world_of(tiny_target) as world:

        def fail(name: str, _: Any) -> None:
            if name == "verify":
                raise ZeroDivisionError("whatever")

        world.stages.before = fail
        with pytest.raises(DDTreeError, match=r"^UNAVAILABLE: .*whatever"):
            await world.engine.generate(request(SHORT), CollectingSink())


async def test_a_neighbour_that_ends_in_the_same_prefill_makes_room(
    tiny_target: Path, tiny_reference: GreedyReference
) -> None:
    """The pool holds one of two prompts; the first one ends with its first token."""
    page_bytes = make_verifier(tiny_target).pool.shape.bytes_per_slot * 16
    verifier = make_verifier(tiny_target, kv_cache_bytes=5 * page_bytes, max_nodes=8)
    async with running_engine(verifier, make_oracle(tiny_target, noise=0), tiny_target) as engine:
        requests = [replace(request(SHORT * 10, max_tokens=1), draft_mode="off") for _ in range(2)]
        for sink in await generate_all(engine, requests):
            assert sink.token_ids == reference_of(tiny_reference, requests[0])
