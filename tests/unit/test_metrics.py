"""How numbers are kept and handed over, and what single events do to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.events import (
    FellBack,
    Preempted,
    PrefixHit,
    RoundDone,
    RoundRecord,
    StageCalled,
)
from ddtree.metrics import Counter, Gauge, Histogram, Metrics, Tally
from ddtree.metrics_listener import MetricsListener
from ddtree.types import Usage
from tests.fakes.counted import Counted

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


# --- single events


def test_events_that_only_count() -> None:
    counted = Counted()
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


def test_states_are_told_only_where_there_are_any() -> None:
    metrics = Metrics()
    listener = MetricsListener(metrics)
    families = (metrics.states_used, metrics.states_capacity, metrics.snapshots)
    listener.note_usage("drafter", Usage(1, 2, 9))
    assert not any(family.items() for family in families)
    listener.note_usage("target_verifier", Usage(1, 2, 9, states_used=3, states_total=20, snapshots=5))
    assert [[(labels, one.take()) for labels, one in family.items()] for family in families] == [
        [({"stage": "target_verifier"}, value)] for value in (3, 20, 5)
    ]


def round_done(*, nodes: int, emitted: int) -> RoundDone:
    """A round of two sequences in 12 ms, 3 of them the cache's commit; a plain one would have taken 4 ms."""
    stage_ms = {"draft": 2.0, "build_tree": 1.0, "verify": 8.0, "commit": 1.0}
    record = RoundRecord(2, nodes, emitted, cache_commit_ms=3.0, plain_ms=4.0, stage_ms=stage_ms)
    return RoundDone((), (), (), record)


def test_the_time_of_verify_is_without_its_commit() -> None:
    counted = Counted()
    counted.observe(StageCalled("target_verifier", "verify", 0.008, 0.0075))
    counted.observe(round_done(nodes=30, emitted=7))
    read = counted.read()
    assert read["stage_seconds.verify.sum"] == pytest.approx(0.0045)
    assert read["stage_seconds.cache_commit.sum"] == pytest.approx(0.003)
    assert read["stage_seconds.commit.sum"] == pytest.approx(0.001)
    assert read["stage_seconds.hop.sum"] == pytest.approx(0.0005)


def test_a_round_of_one_call_is_told_by_its_own_parts() -> None:
    """What an earlier verify took stays out of it, and parts that were not done are not counted."""
    counted = Counted()
    counted.observe(StageCalled("target_verifier", "verify", 0.9, 0.9))
    counted.observe(StageCalled("target_verifier", "round", 0.011, 0.011))
    done = round_done(nodes=30, emitted=7)
    counted.observe(replace(done, record=replace(done.record, cache_commit_ms=0.0, is_whole=True)))
    read = counted.read()
    parts = {"draft": 0.002, "build_tree": 0.001, "verify": 0.008, "commit": 0.001}
    assert {name: read[f"stage_seconds.{name}.sum"] for name in parts} == pytest.approx(parts)
    plain = replace(done.record, stage_ms={"draft": 0.0, "build_tree": 0.0, "verify": 4.0, "commit": 1.0})
    counted.observe(replace(done, record=replace(plain, is_whole=True)))
    read = counted.read()
    assert (read["stage_seconds.draft.count"], read["stage_seconds.verify.count"]) == (1, 2)
    assert "stage_seconds.cache_commit.count" not in read


def test_plain_decoding_would_have_given_a_token_a_sequence_in_each_plain_rounds_time() -> None:
    counted = Counted()
    counted.observe(round_done(nodes=30, emitted=7))
    assert counted.read()["plain_equivalent_tokens"] == pytest.approx(2 * 12 / 4)
    counted.observe(round_done(nodes=0, emitted=2))  # this one was plain: it gave what it gave
    assert counted.read()["plain_equivalent_tokens"] == pytest.approx(2 * 12 / 4 + 2)
