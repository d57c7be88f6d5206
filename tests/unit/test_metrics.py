"""Numbers against the answers they count, over a real engine; and how they are kept, handed over and lost."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.budget import CostCurve
from ddtree.errors import Unavailable
from ddtree.events import (
    Event,
    FellBack,
    Listeners,
    Preempted,
    PrefixHit,
    RequestArrived,
    RequestEnded,
    RequestWatch,
    StageCalled,
    watch_call,
)
from ddtree.metrics import Counter, Gauge, Histogram, Metrics, Tally
from ddtree.metrics_listener import MetricsListener
from ddtree.metrics_publisher import MetricsPublisher
from ddtree.params import GenerationParams
from ddtree.round_cost import RoundCost
from ddtree.stages.base import StageInfo
from ddtree.stages.in_process import InProcessStages
from tests.fakes.collecting_sink import CollectingSink
from tests.fakes.pipeline import make_oracle, make_verifier, running_engine
from tests.fakes.tiny_models import BLOCK_SIZE, make_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


# --- keeping and handing over


def test_a_counter_gives_what_it_grew_by_once() -> None:
    counter = Counter()
    counter.add()
    counter.add(2.5)
    assert (counter.take(), counter.take()) == (3.5, 0.0)
    with pytest.raises(AssertionError, match="cannot shrink"):
        counter.add(-1)


def test_a_gauge_gives_its_value_only_when_it_changed() -> None:
    gauge = Gauge()
    assert gauge.take() is None
    gauge.set(0)
    assert (gauge.take(), gauge.take()) == (0, None)
    gauge.set(0)
    assert gauge.take() is None
    gauge.set(1)
    gauge.set(0)
    assert gauge.take() == 0  # it may have been published in between


def test_a_histogram_keeps_every_value_but_not_without_end() -> None:
    histogram = Histogram()
    for _ in range(20_000):
        histogram.observe(1.0)
    assert len(histogram.take()) == 10_000
    assert histogram.take() == []


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(1, 5)), max_size=30))
def test_a_tally_counts_like_a_cumulative_histogram(observations: list[tuple[float, int]]) -> None:
    buckets = (1, 2, 8, 32)
    tally = Tally(buckets)
    for value, count in observations:
        tally.observe(value, count)
    growth = tally.take()
    if not observations:
        assert growth is None
        return
    assert growth is not None
    every = [value for value, count in observations for _ in range(count)]
    expected = [sum(value <= bound for value in every) for bound in buckets]
    assert growth.at_most == (*expected, len(every))
    assert growth.total == pytest.approx(sum(every))
    assert tally.take() is None


def test_names_follow_the_conventions() -> None:
    units = ("_seconds", "_nodes")
    for family in Metrics().families():
        assert family.name.startswith("ddtree_")
        assert family.meaning
        assert not family.meaning.endswith(".")
        kinds = {type(series) for _, series in family.items()}
        assert (kinds == {Counter} or not kinds) == family.name.endswith("_total") or family.label
        if Histogram in kinds or family.buckets:
            assert family.name.endswith((*units, "_length"))
            assert list(family.buckets) == sorted(set(family.buckets))


# --- counting over a real engine


class _Counted:
    """An engine's numbers, added up over all publications."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.events: list[Event] = []
        self._listener = MetricsListener(self.metrics)
        self._totals: dict[str, float] = {}

    def observe(self, event: Event) -> None:
        self.events.append(event)
        self._listener(event)

    def read(self) -> dict[str, float]:
        """Values by name and label value; of a tally its sum and count."""
        self._listener.refresh()
        for family in self.metrics.families():
            for labels, series in family.items():
                name = ".".join(
                    [family.name.removeprefix("ddtree_").removesuffix("_total"), *labels.values()]
                )
                if isinstance(series, Counter):
                    self._add(name, series.take())
                elif isinstance(series, Gauge):
                    self._totals[name] = series._value if series._value is not None else -1
                elif isinstance(series, Tally):
                    growth = series.take()
                    self._add(f"{name}.sum", growth.total if growth else 0)
                    self._add(f"{name}.count", growth.count if growth else 0)
                else:
                    values = series.take()
                    self._add(f"{name}.sum", sum(values))
                    self._add(f"{name}.count", len(values))
        return self._totals

    def _add(self, name: str, growth: float) -> None:
        self._totals[name] = self._totals.get(name, 0) + growth


async def _answer(
    engine: object, counted: _Counted, params: GenerationParams, cancel_after: int | None = None
) -> CollectingSink:
    """One request of one row, as the orchestrator tells of it."""
    request = RequestWatch("id")
    counted.observe(RequestArrived(request))
    collected = CollectingSink(cancel_after)
    try:
        await engine.generate(params, collected, request)  # type: ignore[attr-defined]
        outcome = "cancelled" if collected.finish_reason == "cancelled" else "completed"
        counted.observe(RequestEnded(request, outcome))  # type: ignore[arg-type]
    except Unavailable:
        counted.observe(RequestEnded(request, "unavailable"))
    return collected


async def test_every_number_of_a_mixed_load_agrees_with_the_answers(target: Path) -> None:
    counted = _Counted()
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
        sinks = await asyncio.gather(*(_answer(engine, counted, params) for params in work))
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
    counted = _Counted()
    async with running_engine(
        make_verifier(target), make_oracle(target, noise=0), target, observe=counted.observe
    ) as engine:
        params = GenerationParams(
            (5, 6), max_tokens=1 + 4 * BLOCK_SIZE, tree_budget=BLOCK_SIZE - 1, ignore_eos=True
        )
        await _answer(engine, counted, params)
    read = counted.read()
    assert (read["acceptance_length.sum"], read["acceptance_length.count"]) == (4 * BLOCK_SIZE, 4)
    assert read[f"accepted_at_depth.{BLOCK_SIZE - 1}"] == 4
    assert read["fallbacks.not_paying"] == 0


async def test_gauges_while_requests_run_wait_and_go(target: Path) -> None:
    counted = _Counted()
    async with running_engine(
        make_verifier(target),
        make_oracle(target, noise=0.5),
        target,
        max_sequences=2,
        observe=counted.observe,
    ) as engine:
        patience = [3] * 2 + [2] * 3
        params = GenerationParams((1, 2, 3), max_tokens=200, draft_mode="off", ignore_eos=True)
        tasks = [asyncio.create_task(_answer(engine, counted, params, after)) for after in patience]
        for _ in range(400):
            await asyncio.sleep(0.005)
            if counted.read().get("sequences.running") == 2:
                break
        read = dict(counted.read())
        await asyncio.gather(*tasks)
    assert (read["active_requests"], read["queued_requests"]) == (2, 3)
    assert (read["sequences.running"], read["sequences.waiting"]) == (2, 3)
    after = counted.read()
    assert after["requests.cancelled"] == after["cancellations.client_gone"] == 5
    assert after["request_seconds.count"] == 0
    assert after["active_requests"] == after["queued_requests"] == after["sequences.running"] == 0


async def test_losses_recoveries_and_giving_up_drafts_are_told(target: Path) -> None:
    counted = _Counted()
    verifier, oracle = make_verifier(target), make_oracle(target, noise=0.5)
    losing = itertools.cycle([False, True])

    def lose(event: Event) -> None:
        if isinstance(event, StageCalled) and event.operation == "verify":
            oracle.lose_next = next(losing)
        if isinstance(event, StageCalled) and event.operation == "draft" and counted.read()["rounds"] == 1:
            verifier.release([session.session_id for session in verifier.sessions])

    async with running_engine(verifier, oracle, target, observe=Listeners([counted.observe, lose])) as engine:
        params = GenerationParams((1, 2, 3), max_tokens=60, tree_budget=4, ignore_eos=True)
        await _answer(engine, counted, params)
    read = counted.read()
    assert read["session_recoveries.target_verifier"] == 1
    assert read["session_recoveries.drafter"] == 3
    assert read["fallbacks.drafter_lost"] == 1
    assert read["sequence_rounds.without"] > 0


def test_events_that_only_count() -> None:
    counted = _Counted()
    for event in (FellBack("drafter_full"), FellBack("not_paying"), PrefixHit(48)):
        counted.observe(event)
    counted.observe(Preempted(None))  # type: ignore[arg-type]
    for has_failed in (False, True):
        counted.observe(StageCalled("drafter", "draft", 0.3, 0.25, has_failed=has_failed))
    read = counted.read()
    assert read["fallbacks.drafter_full"] == read["fallbacks.not_paying"] == read["preemptions"] == 1
    assert read["prefix_cache_hit_tokens"] == 48
    assert (read["stage_errors.drafter"], read["stage_up.drafter"]) == (1, 0)
    assert read["stage_seconds.hop.sum"] == pytest.approx(0.05)
    assert read["stage_seconds.draft.sum"] == pytest.approx(0.25)


def test_a_pause_of_drafting_is_told_once() -> None:
    cost = RoundCost(CostCurve((1, 64), (1.0, 64.0)), draft_ms=1.0)
    told = [cost.observe(sequences=1, rows=40, emitted=1, draft_ms=1.0, verify_ms=40.0) for _ in range(8)]
    assert told.count(True) == 1
    assert cost.plain_ms(1) == pytest.approx(1.0)


# --- listening must not hurt


async def test_a_failing_listener_is_heard_of_once_and_no_request_notices(
    target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def fail(_: Event) -> None:
        nonlocal calls
        calls += 1
        raise ZeroDivisionError

    counted = _Counted()
    async with running_engine(
        make_verifier(target),
        make_oracle(target, noise=0.5),
        target,
        observe=Listeners([fail, counted.observe]),
    ) as engine:
        sink = await _answer(engine, counted, GenerationParams((1, 2), max_tokens=12))
    assert len(sink.token_ids) == counted.read()["emitted_tokens"] == 12
    assert calls == 1
    assert sum("hears nothing more" in record.message for record in caplog.records) == 1


async def test_a_call_that_fails_is_told_and_raised() -> None:
    told: list[Event] = []

    async def fail() -> None:
        raise Unavailable("gone")

    with pytest.raises(Unavailable):
        await watch_call(told.append, "drafter", "draft", fail(), lambda _: 0.0)
    assert [type(event) for event in told] == [StageCalled]


# --- publishing


class _Board:
    """An exporter that remembers the last gauges and how often it was asked."""

    def __init__(self, fail_at: int = 0) -> None:
        self.gauges: dict[str, float] = {}
        self.publications = 0
        self._fail_at = fail_at

    def updates(self, metrics: Metrics) -> Iterator[None]:
        self.publications += 1
        if self.publications == self._fail_at:
            raise ZeroDivisionError("the port is gone")
        for family in metrics.families():
            for labels, series in family.items():
                taken = series.take()
                if isinstance(series, Gauge) and taken is not None:
                    self.gauges[".".join([family.name, *labels.values()])] = taken  # type: ignore[assignment]
                yield


class _CountingStages(InProcessStages):
    """Counts how often it is asked what it holds; fails to say at first, if told to."""

    asked = 0
    failures = 0

    async def describe(self) -> StageInfo:
        self.asked += 1
        if self.asked <= self.failures:
            raise Unavailable("not yet")
        return await super().describe()


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(400):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within 4 s")


@pytest.mark.parametrize("failures", [0, 2])
async def test_published_at_once_while_live_and_until_the_stages_are_empty_then_never(
    target: Path, failures: int
) -> None:
    board = _Board()
    publisher = MetricsPublisher(Metrics(), board, interval_s=0.02, usage_s=0.05)
    stages = _CountingStages(make_verifier(target), make_oracle(target, noise=0.5))
    stages.failures = failures
    is_idle = False
    task = asyncio.create_task(publisher.run(stages, lambda: is_idle))
    request = RequestWatch()
    publisher.listener(RequestArrived(request))
    await _until(lambda: board.gauges.get("ddtree_active_requests") == 1)
    publisher.listener(RequestEnded(request, "completed"))
    await _until(lambda: board.gauges["ddtree_active_requests"] == 0)
    is_idle = True
    await _until(lambda: publisher._is_settled)
    assert board.gauges["ddtree_kv_pages_capacity.target_verifier"] > 0
    assert board.gauges["ddtree_sessions.drafter"] == 0
    asked, published = stages.asked, board.publications
    await asyncio.sleep(0.2)
    assert (stages.asked, board.publications) == (asked, published)
    publisher.listener(RequestArrived(request))
    await _until(lambda: board.gauges["ddtree_active_requests"] == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await stages.close()


async def test_a_port_that_fails_ends_the_publishing_and_the_listening(target: Path) -> None:
    board = _Board(fail_at=2)
    publisher = MetricsPublisher(Metrics(), board, interval_s=0.01)
    stages = InProcessStages(make_verifier(target), make_oracle(target, noise=0.5))
    await asyncio.wait_for(publisher.run(stages, lambda: True), 4)
    publisher.listener(RequestArrived(RequestWatch()))
    assert not publisher.listener.has_requests
    await stages.close()
