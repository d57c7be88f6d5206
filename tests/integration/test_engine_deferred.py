"""When answers go out: in the middle while a stage is at work, first tokens and ends at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddtree import events
from ddtree.round_trace import SequenceTrace
from ddtree.text import TextCodec
from tests.fakes.collecting_sink import CollectingSink
from tests.fakes.pipeline import GreedyReference, idle, make_oracle, make_verifier, running_engine
from tests.integration.stage_faults import LONG, SHORT, World, reference_of, request, until, world_of


class Timeline:
    """What happened, in order: calls of stages by name, `answered` after each, and deltas."""

    def __init__(self, world: World) -> None:
        self.happened: list[str] = []
        self._world = world
        stages = world.stages
        ask = stages._ask

        async def noted(stage: str, operation: str, call: Callable[..., Any], *arguments: Any) -> Any:
            self.happened.append(operation)
            try:
                return await ask(stage, operation, call, *arguments)
            finally:
                self.happened.append("answered")

        stages._ask = noted  # type: ignore[method-assign]
        stages.before = self._wait_for_deltas

    def sink(self, trace: SequenceTrace | None = None) -> CollectingSink:
        """A sink whose deltas are noted."""
        return CollectingSink(on_emit=lambda: self.happened.append("delta"), trace=trace)

    def _wait_for_deltas(self, operation: str, _: Any) -> None:
        """The small models answer too soon to see anything: a stage works until all deltas have gone out."""
        deadline = time.monotonic() + 5
        rounds = self.happened.count("verify") - (operation == "verify")
        while 0 < self.happened.count("delta") < rounds + 1 and time.monotonic() < deadline:
            time.sleep(0.001)

    def at_work(self) -> list[str]:
        """Of each delta, the stage that was at work when it went out; empty: none was."""
        found, at_work = [], ""
        for happened in self.happened:
            if happened == "delta":
                found.append(at_work)
            else:
                at_work = "" if happened == "answered" else happened
        return found


@pytest.fixture(autouse=True)
def spare_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree.verify.takes_all_cores", lambda _: False)


async def test_deltas_in_the_middle_go_out_while_the_drafter_works(
    tiny_target: Path, tiny_reference: GreedyReference
) -> None:
    async with world_of(tiny_target) as world:
        timeline = Timeline(world)
        sink = timeline.sink()
        await world.engine.generate(request(LONG), sink)
        first, *middle, last = timeline.at_work()
        assert (first, last) == ("", "")  # nobody waits longer for them than before
        assert "draft" in middle
        assert "" not in middle
        assert sink.token_ids == reference_of(tiny_reference, request(LONG))


async def test_nothing_is_deferred_where_stages_take_all_cores(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddtree.verify.takes_all_cores", lambda _: True)
    async with world_of(tiny_target) as world:
        timeline = Timeline(world)
        await world.engine.generate(request(LONG), timeline.sink())
        assert set(timeline.at_work()) == {""}


async def test_nothing_is_deferred_where_the_drafter_takes_all_cores(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world_of(tiny_target) as world:
        info = replace(world.oracle.info(), takes_all_cores=True)
        monkeypatch.setattr(world.oracle, "info", lambda: info)
        await world.engine.start()
        timeline = Timeline(world)
        await world.engine.generate(request(LONG), timeline.sink())
        assert set(timeline.at_work()) == {""}


async def test_a_traced_sequence_is_answered_at_once(tiny_target: Path) -> None:
    async with world_of(tiny_target) as world:
        timeline = Timeline(world)
        trace = SequenceTrace(TextCodec.from_folder(tiny_target))
        await world.engine.generate(request(LONG), timeline.sink(trace=trace))
        assert set(timeline.at_work()) == {""}


async def test_deltas_go_out_while_somebody_elses_prompt_is_read(
    tiny_target: Path, tiny_reference: GreedyReference
) -> None:
    async with world_of(tiny_target, prefill_chunk=16) as world:
        timeline = Timeline(world)
        sink = timeline.sink()
        first = world.begin(request(SHORT, 60), sink)
        await until(lambda: len(sink.deltas) > 1)
        other = world.begin(request(LONG), CollectingSink())
        await first
        await other
        assert "prefill" in timeline.at_work()
        assert sink.token_ids == reference_of(tiny_reference, request(SHORT, 60))


async def test_a_round_is_told_before_the_end_of_its_request(tiny_target: Path) -> None:
    heard: list[events.Event] = []
    verifier, drafter = make_verifier(tiny_target), make_oracle(tiny_target, noise=0.6)
    async with running_engine(verifier, drafter, tiny_target, observe=heard.append) as engine:
        task = asyncio.ensure_future(engine.generate(request(LONG), CollectingSink()))
        rounds_at_end: list[int] = []
        task.add_done_callback(lambda _: rounds_at_end.append(_rounds(heard)))
        await task
        await idle(engine)
        assert rounds_at_end == [_rounds(heard)]
        deltas = [event for event in heard if isinstance(event, events.Emitted)]
        assert len(deltas) == 1 + _rounds(heard)  # the first is the prompt's


def _rounds(heard: list[events.Event]) -> int:
    return sum(isinstance(event, events.RoundDone) for event in heard)
