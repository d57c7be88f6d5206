"""The cost of a round follows what rounds took, and drafting pauses while it does not pay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddtree.budget import CostCurve
from ddtree.round_cost import RoundCost

CURVE = CostCurve(rows=(1, 10, 20), ms=(10.0, 20.0, 40.0))


def observe(cost: RoundCost, times: int = 1, **changes: Any) -> bool:
    """Rounds of one sequence; gives whether the last one began a pause."""
    last = False
    for _ in range(times):
        last = cost.observe(
            **{"sequences": 1, "rows": 10, "emitted": 4, "draft_ms": 5.0, "verify_ms": 20.0, **changes}
        )
    return last


def test_the_table_is_the_curve_and_a_draft() -> None:
    table = RoundCost(CURVE, draft_ms=5.0).table()
    assert table.shape == (20,)
    assert table.dtype == np.float32
    assert table[[0, 9, 14, 19]].tolist() == pytest.approx([15, 25, 35, 45])


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_the_table_follows_a_machine_that_is_faster_or_slower(factor: float) -> None:
    cost = RoundCost(CURVE, draft_ms=5.0)
    observe(cost, 100, verify_ms=20 * factor, draft_ms=5 * factor)
    assert cost.table()[[0, 9, 19]].tolist() == pytest.approx(
        [15 * factor, 25 * factor, 45 * factor], rel=1e-3
    )
    assert cost.plain_ms(1) == pytest.approx(10 * factor, rel=1e-3)


def test_a_single_slow_round_moves_it_a_little_and_an_interrupted_one_not_at_all() -> None:
    cost = RoundCost(CURVE, draft_ms=5.0)
    observe(cost, 50)
    before = cost.table()[0]
    observe(cost, verify_ms=40.0)
    assert before < cost.table()[0] < 1.2 * before
    now = cost.table().copy()
    observe(cost, verify_ms=20 * 9.0)
    observe(cost, verify_ms=20 / 9)
    assert np.array_equal(cost.table(), now)


def test_rounds_without_drafts_say_nothing_of_drafts() -> None:
    cost = RoundCost(CURVE, draft_ms=5.0)
    assert not observe(cost, 200, draft_ms=0.0, emitted=1, rows=1, verify_ms=10.0)
    assert cost.table()[0] == pytest.approx(15)
    assert cost.should_draft()


def test_drafting_that_pays_goes_on() -> None:
    cost = RoundCost(CURVE, draft_ms=5.0)
    for _ in range(100):
        assert cost.should_draft()
        assert not observe(cost)  # 4 tokens in 25 ms, plainly 2.5


def test_drafting_that_does_not_pay_pauses_and_is_tried_again() -> None:
    cost = RoundCost(CURVE, draft_ms=5.0)
    begins = [observe(cost, emitted=2) for _ in range(6)]  # 2 tokens in 25 ms, plainly 2.5
    assert begins == [False] * 5 + [True]
    pause = 0
    while not cost.should_draft():
        pause += 1
    assert pause == 24
    assert [observe(cost, emitted=2) for _ in range(6)][-1], "the trial begins anew and ends as before"


def test_more_sequences_must_emit_more() -> None:
    paying, losing = RoundCost(CURVE, draft_ms=1.0), RoundCost(CURVE, draft_ms=1.0)
    # Plainly 4 sequences emit 4 tokens in 13.3 ms, so 21 ms must give more than 6.3.
    assert not observe(paying, 50, sequences=4, emitted=7, draft_ms=1.0)
    assert any(observe(losing, sequences=4, emitted=6, draft_ms=1.0) for _ in range(6))
