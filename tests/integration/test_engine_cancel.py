"""A caller goes away while waiting, prefilling or decoding, by its sink or its task; and a stop of it all."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ddtree.errors import Cancelled
from ddtree.params import GenerationParams
from tests.fakes.collecting_sink import CollectingSink
from tests.fakes.pipeline import GreedyReference, idle
from tests.fakes.tiny_models import EOS_ID
from tests.integration.stage_faults import until, world_of

PROMPT = tuple(b"a prompt of several chunks, each of sixteen tokens at most")
LONG = GenerationParams(PROMPT, max_tokens=100, tree_budget=4, stop_ids=frozenset({EOS_ID}))
ENDLESS = GenerationParams(PROMPT, max_tokens=400, tree_budget=4, ignore_eos=True)
SHORT = GenerationParams(PROMPT[:9], max_tokens=20, tree_budget=4, stop_ids=frozenset({EOS_ID}))


class Impatient(CollectingSink):
    """A caller who goes away when told."""

    has_gone = False

    def is_cancelled(self) -> bool:
        """Whether it was told."""
        return self.has_gone


@pytest.mark.parametrize("after", [1, 2, 5])
async def test_while_decoding(tiny_target: Path, tiny_reference: GreedyReference, after: int) -> None:
    async with world_of(tiny_target) as world:
        sink = CollectingSink(cancel_after=after)
        await world.engine.generate(ENDLESS, sink)
        assert sink.finish_reason == "cancelled"
        assert after < len(sink.deltas) <= after + 2  # the first token's step has a round as well
        assert sink.token_ids == tiny_reference(PROMPT, len(sink.token_ids))


async def test_while_prefilling(tiny_target: Path) -> None:
    async with world_of(tiny_target) as world:
        sink, prefills = Impatient(), 0

        def go_after_two_chunks(operation: str, _: Any) -> None:
            nonlocal prefills
            prefills += operation == "prefill"
            sink.has_gone = prefills == 2

        world.stages.before = go_after_two_chunks
        await world.engine.generate(ENDLESS, sink)
        assert prefills == 2
        assert [(delta.token_ids, delta.finish_reason) for delta in sink.deltas] == [((), "cancelled")]


async def test_while_waiting(tiny_target: Path, tiny_reference: GreedyReference) -> None:
    async with world_of(tiny_target, max_sequences=1) as world:
        first, second, third = CollectingSink(), Impatient(), CollectingSink()
        tasks = [world.begin(LONG, first), world.begin(ENDLESS, second), world.begin(SHORT, third)]
        await until(lambda: first.deltas)
        second.has_gone = True
        await tasks[1]
        assert (second.finish_reason, second.token_ids, first.finish_reason) == ("cancelled", [], "")
        assert await asyncio.gather(*tasks) == [None] * 3
        assert first.token_ids == tiny_reference(PROMPT, 100)
        assert third.token_ids == tiny_reference(PROMPT[:9], 20)


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding"])
async def test_the_task_of_generate_is_cancelled(tiny_target: Path, state: str) -> None:
    async with world_of(tiny_target, max_sequences=1) as world:
        blocker = world.begin(ENDLESS, CollectingSink()) if state == "waiting" else None
        await asyncio.sleep(0)
        sink = CollectingSink()
        begun = {
            "waiting": lambda: world.scheduler.num_waiting == 1,
            "prefilling": lambda: world.verifier.usage().sessions == 1,
            "decoding": lambda: bool(sink.deltas),
        }
        task = world.begin(ENDLESS, sink)
        await until(begun[state])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        deltas = len(sink.deltas)
        if blocker is not None:
            await until(lambda: world.scheduler.num_waiting == 0)
            blocker.cancel()
        await idle(world.engine)
        world.assert_empty()
        assert len(sink.deltas) <= deltas + 3, "nobody waits for the rest"


async def test_a_page_freed_by_a_cancel_is_used_by_who_waits(
    tiny_target: Path, tiny_reference: GreedyReference
) -> None:
    async with world_of(tiny_target, max_sequences=1) as world:
        gone, stays = Impatient(), CollectingSink()
        tasks = [world.begin(ENDLESS, gone), world.begin(SHORT, stays)]
        await until(lambda: len(gone.deltas) > 3)
        gone.has_gone = True
        await asyncio.gather(*tasks)
        assert stays.token_ids == tiny_reference(PROMPT[:9], 20)
        assert gone.finish_reason == "cancelled"


async def test_stop_ends_everybody_and_leaves_nothing(tiny_target: Path) -> None:
    async with world_of(tiny_target, max_sequences=2) as world:
        sinks = [CollectingSink() for _ in range(4)]
        tasks = [world.begin(ENDLESS, sink) for sink in sinks]
        await until(lambda: sinks[0].deltas and sinks[1].deltas)
        await world.engine.stop()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Cancelled] * 4
        assert all("shutting down" in str(outcome) for outcome in outcomes)
        assert world.engine.is_idle
        world.assert_empty()


async def test_stop_of_an_idle_engine(tiny_target: Path) -> None:
    async with world_of(tiny_target) as world:
        await world.engine.generate(SHORT, CollectingSink())
        await world.engine.stop()


async def test_the_end_comes_though_a_cancellation_gets_lost(tiny_target: Path) -> None:
    """As in `asyncio.wait_for` of Python 3.11, when it comes together with the answer."""
    async with world_of(tiny_target) as world:
        stages = world.stages
        ask, lost = stages._ask, 0

        async def loses_one(*arguments: Any) -> Any:
            nonlocal lost
            answer = asyncio.ensure_future(ask(*arguments))
            try:
                return await asyncio.shield(answer)
            except asyncio.CancelledError:
                lost += 1
                if lost > 1:
                    raise
                return await answer

        stages._ask = loses_one  # type: ignore[assignment]
        sink = CollectingSink()
        call = world.begin(ENDLESS, sink)
        await until(lambda: sink.deltas)
        loop_task = world.engine._loop_task
        assert loop_task is not None
        await asyncio.wait_for(world.engine.stop(), 20)
        assert lost >= 1
        assert loop_task.done()
        with pytest.raises(Cancelled):
            await call
