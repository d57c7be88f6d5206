"""The cost of a round follows what rounds took, by rows, by sequences and by those that draft."""

from __future__ import annotations

import numpy as np
import pytest

from ddtree.budget import CostCurve
from ddtree.round_cost import FinishedRound, RoundCost

CURVE = CostCurve(rows=(1, 10, 20), ms=(10.0, 20.0, 40.0))


def make_cost() -> RoundCost:
    return RoundCost(CURVE, draft_ms=5.0, block_size=4)


def done(
    sequences: int = 1,
    drafting: int = 1,
    nodes: int = 9,
    verify: float = 20.0,
    draft: float = 5.0,
    build: float = 1.0,
) -> FinishedRound:
    return FinishedRound(sequences, drafting, nodes, draft, build, verify)


def test_the_table_is_the_curve_and_a_draft() -> None:
    table = make_cost().table(1, 1, 19)
    assert table.shape == (20,)
    assert table.dtype == np.float32
    assert table[[0, 9, 14, 19]].tolist() == pytest.approx([16, 26, 36, 46])
    plain = make_cost().table(1, 0, 19)
    assert plain[[0, 9]].tolist() == pytest.approx([10, 20])
    assert make_cost().plain_ms(1) == pytest.approx(10)


def test_a_draft_of_several_grows_as_the_targets_rows_do() -> None:
    assert make_cost().draft_table(3).tolist() == pytest.approx(
        [0.0, 6.0, 1 + 5 * CURVE.at(8) / CURVE.at(4), 1 + 5 * CURVE.at(12) / CURVE.at(4)]
    )
    assert make_cost().draft_table(0).tolist() == [0.0]


@pytest.mark.parametrize("factor", [0.04, 0.5, 1.0, 3.0, 25.0])
def test_the_table_follows_a_machine_that_is_faster_or_slower(factor: float) -> None:
    cost = make_cost()
    for _ in range(100):
        cost.observe(done(verify=20 * factor, draft=5 * factor, build=factor))
    expected = [16 * factor, 26 * factor, 46 * factor]
    assert cost.table(1, 1, 19)[[0, 9, 19]].tolist() == pytest.approx(expected, rel=0.01)
    assert cost.plain_ms(1) == pytest.approx(10 * factor, rel=0.01)


def test_what_further_sequences_add_to_a_step_is_learnt() -> None:
    """Each sequence takes 3 ms of its own; both sizes of the batch were seen lately."""
    cost = make_cost()
    for _ in range(40):
        for sequences in (1, 4, 8):
            for nodes in (0, 6, 12):
                verify = CURVE.at(sequences + nodes) + 3 * sequences
                cost.observe(done(sequences, 0, nodes, verify=verify))
    for sequences in (1, 4, 8):
        assert cost.plain_ms(sequences) == pytest.approx(CURVE.at(sequences) + 3 * sequences, rel=0.12)
        assert cost.verify_ms(sequences, 18) == pytest.approx(CURVE.at(18) + 3 * sequences, rel=0.12)


def test_a_sequence_never_makes_a_step_cheaper() -> None:
    cost = make_cost()
    for _ in range(30):
        cost.observe(done(1, nodes=9, verify=60.0))
        cost.observe(done(8, nodes=2, verify=9.0))
    assert cost.verify_ms(16, 20) >= cost.verify_ms(1, 20)


def test_nodes_that_take_long_to_build_are_charged() -> None:
    cost = make_cost()
    for _ in range(60):
        for nodes in (4, 16):
            cost.observe(done(nodes=nodes, verify=CURVE.at(1 + nodes), build=1 + 0.5 * nodes))
    table = cost.table(1, 1, 19)
    for nodes in (0, 4, 16):
        assert table[nodes] == pytest.approx(5 + CURVE.at(1 + nodes) + 1 + 0.5 * nodes, rel=0.15)
    assert cost.table(1, 0, 19)[0] == pytest.approx(10, rel=0.05), "who does not draft builds nothing"


def test_a_single_slow_round_moves_it_a_little_and_an_interrupted_one_not_more() -> None:
    slow, interrupted = make_cost(), make_cost()
    for cost, verify in ((slow, 60.0), (interrupted, 6000.0)):
        for _ in range(50):
            cost.observe(done())
        before = cost.plain_ms(1)
        cost.observe(done(verify=verify))
        assert before < cost.plain_ms(1) < 1.2 * before
    assert interrupted.plain_ms(1) == pytest.approx(slow.plain_ms(1), rel=0.01)


def test_rounds_without_drafts_say_nothing_of_drafts() -> None:
    cost = make_cost()
    for _ in range(100):
        cost.observe(done(drafting=0, nodes=0, verify=10.0, draft=99.0, build=99.0))
    assert cost.draft_table(1)[1] == pytest.approx(6)


@pytest.mark.parametrize("factor", [0.4, 0.8, 1.0])
def test_plain_steps_are_known_from_plain_steps(factor: float) -> None:
    """Whatever drafted rounds make expect of them; a round of many nodes is not touched by that."""
    cost = make_cost()
    for _ in range(30):
        for _ in range(8):
            cost.observe(done(4, 4, 14, verify=CURVE.at(18), draft=9.0))
        cost.observe(done(4, 0, 0, verify=CURVE.at(4) * factor))
    assert cost.plain_ms(4) == pytest.approx(CURVE.at(4) * factor, rel=0.2)
    assert cost.table(4, 0, 14)[3] == pytest.approx(cost.plain_ms(4), rel=1e-5)
    assert cost.verify_ms(4, 18) == pytest.approx(CURVE.at(18), rel=0.2)
