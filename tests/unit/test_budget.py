"""The choice of a node count against trying every one, and the cost curve it rests on."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ddtree.budget import CostCurve, choose, may_pay, measure
from ddtree.errors import ConfigError

no_deadline = settings(deadline=None)  # the machine may be busy with other things

Floats = NDArray[np.float64]
Costs = NDArray[np.float32]

probabilities = st.lists(st.floats(0, 1), max_size=30).map(
    lambda values: np.array(sorted(values, reverse=True))
)
cost_tables = st.lists(st.floats(0.5, 100, width=32), min_size=1, max_size=40).map(
    lambda values: np.array(values, dtype=np.float32)
)
sequence_counts = st.integers(1, 4)
fixed_nodes = st.lists(st.floats(0, 1), max_size=5).map(np.array)


def rate(path_probs: Floats, count: int, num_sequences: int, costs: Costs, fixed: Floats) -> float:
    """Expected tokens per millisecond, where more rows are taken to cost at least what fewer do."""
    rows = num_sequences + len(fixed) + count
    tokens = num_sequences + float(fixed.sum()) + float(path_probs[:count].sum())
    return tokens / float(costs[:rows].max())


@no_deadline
@given(probabilities, sequence_counts, cost_tables, fixed_nodes)
def test_no_other_count_gives_more_tokens_per_millisecond(
    path_probs: Floats, num_sequences: int, costs: Costs, fixed: Floats
) -> None:
    chosen = choose(path_probs, num_sequences, costs, fixed)
    most = min(len(path_probs), len(costs) - num_sequences - len(fixed))
    if most < 0:
        assert chosen == 0
        return
    assert 0 <= chosen <= most
    rates = [rate(path_probs, count, num_sequences, costs, fixed) for count in range(most + 1)]
    assert rates[chosen] == pytest.approx(max(rates))
    assert all(value < rates[chosen] * (1 + 1e-12) for value in rates[:chosen])


@no_deadline
@given(probabilities, probabilities, sequence_counts, cost_tables, fixed_nodes)
def test_when_growing_cannot_pay_it_does_not(
    path_probs: Floats, rest: Floats, num_sequences: int, costs: Costs, fixed: Floats
) -> None:
    if may_pay(path_probs, num_sequences, costs, fixed):
        return
    last = path_probs[-1] if len(path_probs) else 1.0
    grown = np.concatenate([path_probs, rest * last])
    stopped = choose(path_probs, num_sequences, costs, fixed)
    assert choose(grown, num_sequences, costs, fixed) == stopped


def test_growing_may_pay_until_costs_say_otherwise() -> None:
    flat, steep = np.array([10, 10, 10], dtype=np.float32), np.array([10, 10, 100], dtype=np.float32)
    assert may_pay(np.array([0.9]), 1, flat)
    assert not may_pay(np.array([0.9]), 1, steep)
    assert not may_pay(np.array([0.9, 0.8]), 1, flat)


@pytest.mark.parametrize(
    ("path_probs", "num_sequences", "costs", "chosen"),
    [
        ([0.9, 0.5, 0.1], 1, [10, 10, 10, 10], 3),  # rows that cost nothing are all worth having
        ([0.9, 0.5, 0.1], 1, [10, 20, 30, 40], 0),  # nothing beats plain decoding
        ([0.9, 0.5, 0.1], 1, [10, 12, 14, 16], 2),
        ([0.9, 0.5, 0.1], 1, [10, 12], 1),  # nothing is known about more rows
        ([0.9, 0.5, 0.1], 1, [10, 30, 30, 8], 0),  # a fall is noise, not a gift
        ([1.0, 1.0], 1, [10, 20, 30], 0),  # equal rates: the smallest
        ([0.9, 0.9], 3, [1, 1, 9, 9, 9], 2),  # the roots' rows come first
        ([0.9], 3, [1, 1], 0),
        ([], 2, [1, 1, 1], 0),
        ([0.0, 0.0], 1, [10, 10, 10], 0),
    ],
)
def test_examples(path_probs: list[float], num_sequences: int, costs: list[float], chosen: int) -> None:
    assert choose(np.array(path_probs), num_sequences, np.array(costs, dtype=np.float32)) == chosen


@no_deadline
@given(st.lists(st.floats(0.5, 100), min_size=1, max_size=12))
def test_a_curve_never_falls_and_is_the_nearest_such_to_the_measurements(ms: list[float]) -> None:
    curve = CostCurve(tuple(range(1, len(ms) + 1)), tuple(ms))
    fitted = [curve.at(rows) for rows in curve.rows]
    # The max-min formula of isotonic regression.
    expected = [
        max(min(np.mean(ms[i : j + 1]) for j in range(at, len(ms))) for i in range(at + 1))
        for at in range(len(ms))
    ]
    assert fitted == pytest.approx(expected)
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(fitted))


def test_a_curve_is_straight_between_and_beyond_its_measurements() -> None:
    curve = CostCurve((2, 4, 8), (10.0, 20.0, 24.0))
    assert [curve.at(rows) for rows in (1, 2, 3, 4, 6, 8, 12)] == [10.0, 10.0, 15.0, 20.0, 22.0, 24.0, 28.0]
    table = curve.table(12)
    assert table.dtype == np.float32
    assert table.tolist() == pytest.approx([curve.at(rows) for rows in range(1, 13)])
    assert CostCurve((4,), (7.0,)).table(6).tolist() == [7.0] * 6


@pytest.mark.parametrize(
    ("rows", "ms", "message"),
    [
        ((), (), "one cost per row count and at least one, got 0 rows and 0 costs"),
        ((1, 2), (3.0,), "got 2 rows and 1 costs"),
        ((0, 2), (3.0, 4.0), r"rows must be positive and ascending, got \(0, 2\)"),
        ((2, 2), (3.0, 4.0), r"rows must be positive and ascending, got \(2, 2\)"),
        ((1, 2), (3.0, 0.0), r"ms must be positive, got \(3.0, 0.0\)"),
        ((1,), (float("nan"),), r"ms must be positive, got \(nan,\)"),
        ((1,), (float("inf"),), r"ms must be positive, got \(inf,\)"),
    ],
)
def test_a_curve_that_cannot_be_is_refused(
    rows: tuple[int, ...], ms: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        CostCurve(rows, ms)


class SlowStep:
    """Takes a millisecond per row, and far longer on the calls (of a row count) in `slow_calls`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow_calls: tuple[int, ...] = ()) -> None:
        self.calls: list[int] = []
        self._slow_calls = slow_calls
        self._now_s = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self._now_s)

    def __call__(self, rows: int) -> None:
        self.calls.append(rows)
        is_slow = self.calls.count(rows) in self._slow_calls
        self._now_s += rows * 1e-3 + (0.2 if is_slow else 0)


@pytest.mark.parametrize(
    ("repeats", "slow_calls"),
    [
        pytest.param(1, (1,), id="the first call does not count"),
        pytest.param(3, (2, 4), id="hiccups do not, though they are most calls"),
    ],
)
def test_measuring_takes_the_fastest_of_warm_calls(
    monkeypatch: pytest.MonkeyPatch, repeats: int, slow_calls: tuple[int, ...]
) -> None:
    step = SlowStep(monkeypatch, slow_calls)
    curve = measure(step, (1, 8), repeats)
    assert curve.rows == (1, 8)
    assert step.calls == [1, 8] * (repeats + 1), "row counts take turns"
    assert curve.ms == pytest.approx((1, 8))


def test_what_computes_for_long_is_not_measured_with_still_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    step = SlowStep(monkeypatch)
    assert measure(step, (1, 64, 128, 256), 1, enough_ms=100).rows == (1, 64, 128)
    assert measure(step, (1, 64, 128, 256), 1, enough_ms=50).rows == (1, 64)
    assert measure(step, (1, 32, 48, 64), 1, enough_ms=0).rows == (1, 32, 48, 64), "few rows may cost nothing"
