"""Numbers against the answers they count, over a real engine; and that listening cannot hurt."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from ddtree.errors import Unavailable
from ddtree.events import (
    Event,
    Listeners,
    RequestArrived,
    RequestEnded,
    RequestWatch,
    StageCalled,
    watch_call,
)
from ddtree.params import GenerationParams
from tests.fakes.collecting_sink import CollectingSink
from tests.fakes.counted import Counted, answer
from tests.fakes.pipeline import make_oracle, make_verifier, running_engine
from tests.fakes.tiny_models import BLOCK_SIZE, make_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


async def test_every_number_of_a_mixed_load_agrees_with_the_answers(target: Path) -> None:
    counted = Counted()
    modes = [("tree", 1), ("tree", 16), ("tree", -1), ("chain", -1), ("off", -1), ("tree", 0)]
    work = [
        GenerationParams((n + 1, 2, 3), max_tokens=5 + 7 * n, draft_mode=mode, tree_budget=budget)  # type: ignore[arg-type]
        for n, (mode, budget) in enumerate(modes * 2)
    ]
    async with running_engine(
        make_verifier(target),
        make_oracle(target, noise=0.5),
        target,
        max_sequences=4,
        observe=counted.observe,
    ) as engine:
        sinks = await asyncio.gather(*(answer(engine, counted, params) for params in work))
    read = counted.read()
    stats = [sink.stats for sink in sinks if sink.stats is not None]
    assert read["requests.completed"] == len(work) == len(stats)
    assert read["prompt_tokens"] == 3 * len(work)
    assert read["emitted_tokens"] == sum(len(sink.token_ids) for sink in sinks)
    assert read["draft_tokens"] == sum(each.draft_tokens for each in stats) > 0
    assert read["accepted_tokens"] == sum(each.accepted_tokens for each in stats) > 0
    drafted = read["sequence_rounds.with"]
    assert drafted + read["sequence_rounds.without"] == sum(each.rounds for each in stats)
    assert read["tree_size_nodes.sum"] == read["draft_tokens"]
    assert read["tree_size_nodes.count"] == read["acceptance_length.count"] == drafted
    # Each drafted round emits what it accepts and a bonus token, unless the answer ended inside the path.
    missing = read["accepted_tokens"] + drafted - read["acceptance_length.sum"]
    assert 0 <= missing <= len(work)
    depths = [read.get(f"accepted_at_depth.{depth}", 0) for depth in range(1, BLOCK_SIZE)]
    assert sum(depths) == read["accepted_tokens"]
    assert depths == sorted(depths, reverse=True)
    assert read["inter_token_seconds.count"] == read["emitted_tokens"] - len(work)
    assert read["time_to_first_token_seconds.count"] == read["request_seconds.count"] == len(work)
    rounds = read["rounds"]
    assert all(read[f"stage_seconds.{name}.count"] == rounds for name in ("verify", "commit", "cache_commit"))
    assert read["budget_nodes.request.count"] > 0 < read["budget_nodes.auto.count"]
    assert read["stage_up.drafter"] == read["stage_up.target_verifier"] == 1
    for gauge in ("active_requests", "queued_requests", "sequences.running", "sequences.waiting"):
        assert read[gauge] == 0, gauge


async def test_a_perfect_oracle_has_the_full_acceptance_length_and_gains(target: Path) -> None:
    counted = Counted()
    async with running_engine(
        make_verifier(target), make_oracle(target, noise=0), target, observe=counted.observe
    ) as engine:
        params = GenerationParams(
            (5, 6), max_tokens=1 + 4 * BLOCK_SIZE, tree_budget=BLOCK_SIZE - 1, ignore_eos=True
        )
        await answer(engine, counted, params)
    read = counted.read()
    assert (read["acceptance_length.sum"], read["acceptance_length.count"]) == (4 * BLOCK_SIZE, 4)
    assert read[f"accepted_at_depth.{BLOCK_SIZE - 1}"] == 4
    assert read["fallbacks.not_paying"] == 0


async def test_gauges_while_requests_run_wait_and_go(target: Path) -> None:
    counted = Counted()
    full: list[dict[str, float]] = []  # what was read whenever both places were taken and three waited

    def read_when_full(_: Event) -> None:
        read = counted.read()
        if (read["sequences.running"], read["sequences.waiting"]) == (2, 3):
            full.append(dict(read))

    async with running_engine(
        make_verifier(target),
        make_oracle(target, noise=0.5),
        target,
        max_sequences=2,
        observe=Listeners([counted.observe, read_when_full]),
    ) as engine:
        patience = [3] * 2 + [2] * 3
        params = GenerationParams((1, 2, 3), max_tokens=200, draft_mode="off", ignore_eos=True)
        await asyncio.gather(*(answer(engine, counted, params, after) for after in patience))
    assert full
    assert {(read["active_requests"], read["queued_requests"]) for read in full} == {(2, 3)}
    after = counted.read()
    assert after["requests.cancelled"] == after["cancellations.client_gone"] == 5
    assert after["request_seconds.count"] == 0
    assert after["active_requests"] == after["queued_requests"] == after["sequences.running"] == 0


async def test_losses_recoveries_and_giving_up_drafts_are_told(target: Path) -> None:
    counted = Counted()
    verifier, oracle = make_verifier(target), make_oracle(target, noise=0.5)
    losing = itertools.cycle([False, True])

    def lose(event: Event) -> None:
        if isinstance(event, StageCalled) and event.operation == "verify":
            oracle.lose_next = next(losing)
        if isinstance(event, StageCalled) and event.operation == "draft" and counted.read()["rounds"] == 1:
            verifier.release([session.session_id for session in verifier.sessions])

    async with running_engine(verifier, oracle, target, observe=Listeners([counted.observe, lose])) as engine:
        params = GenerationParams((1, 2, 3), max_tokens=60, tree_budget=4, ignore_eos=True)
        await answer(engine, counted, params)
    read = counted.read()
    assert read["session_recoveries.target_verifier"] == 1
    assert read["session_recoveries.drafter"] == 3
    assert read["fallbacks.drafter_lost"] == 1
    assert read["sequence_rounds.without"] > 0


async def test_a_request_of_two_rows_has_one_first_token(target: Path) -> None:
    counted, request = Counted(), RequestWatch()
    counted.observe(RequestArrived(request))
    async with running_engine(
        make_verifier(target), make_oracle(target, noise=0.5), target, observe=counted.observe
    ) as engine:
        rows = [GenerationParams((row + 1, 2), max_tokens=6, ignore_eos=True) for row in range(2)]
        await asyncio.gather(*(engine.generate(row, CollectingSink(), request) for row in rows))
    counted.observe(RequestEnded(request, "completed"))
    read = counted.read()
    assert read["time_to_first_token_seconds.count"] == read["requests.completed"] == 1
    assert read["emitted_tokens"] == 12


async def test_waiting_for_pages_is_told(target: Path) -> None:
    counted = Counted()
    verifier = make_verifier(target, kv_cache_bytes=1 << 18)
    slots = verifier.pool.total_slots
    async with running_engine(
        verifier, make_oracle(target, noise=0.5), target, observe=counted.observe
    ) as engine:
        params = GenerationParams((1, 2, 3), max_tokens=slots * 2 // 3, draft_mode="off", ignore_eos=True)
        await asyncio.gather(*(answer(engine, counted, params, cancel_after=20) for _ in range(2)))
    assert counted.read()["preemptions"] == 1


# --- listening must not hurt


async def test_a_failing_listener_is_heard_of_once_and_no_request_notices(
    target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def fail(_: Event) -> None:
        nonlocal calls
        calls += 1
        raise ZeroDivisionError

    counted = Counted()
    async with running_engine(
        make_verifier(target),
        make_oracle(target, noise=0.5),
        target,
        observe=Listeners([fail, counted.observe]),
    ) as engine:
        sink = await answer(engine, counted, GenerationParams((1, 2), max_tokens=12))
    assert len(sink.token_ids) == counted.read()["emitted_tokens"] == 12
    assert calls == 1
    assert sum("hears nothing more" in record.message for record in caplog.records) == 1


async def test_a_call_that_fails_is_told_and_raised() -> None:
    told: list[Event] = []

    async def fail() -> None:
        raise Unavailable("gone")

    with pytest.raises(Unavailable):
        await watch_call(told.append, "drafter", "draft", fail(), lambda _: 0.0)
    (event,) = told
    assert isinstance(event, StageCalled)
    assert event.has_failed
