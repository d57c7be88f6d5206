"""Who drafts: the set with the most tokens per millisecond; tries lose a bounded share of the time."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.budget import CostCurve
from ddtree.draft_choice import DraftChoice, Outlook
from ddtree.round_cost import RoundCost

CURVE = CostCurve(rows=(1, 8, 64), ms=(10.0, 12.0, 60.0))


def make_cost(draft_ms: float = 4.0) -> RoundCost:
    return RoundCost(CURVE, draft_ms, block_size=8)


def outlook(tokens: float, nodes: float = 4.0) -> Outlook:
    return Outlook(tokens, nodes, drafted=1)


def begun(cost: RoundCost, tokens: float = 1.0, *, try_share: float = 0.0) -> DraftChoice:
    """A choice that has seen a draft, as after the first round; without tries."""
    choice = DraftChoice(cost, try_share)
    choice.choose([Outlook()], [], 1)
    choice.learn(Outlook(), tokens, 4)
    return choice


def rate(cost: RoundCost, drafting: list[Outlook], sequences: int) -> float:
    nodes = round(sum(each.nodes for each in drafting))
    tokens = sequences + sum(each.tokens for each in drafting)
    return tokens / float(
        cost.table(sequences, 0, nodes + 1)[sequences + nodes - 1] + cost.draft_table(len(drafting))[-1]
    )


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(st.floats(0, 6), st.integers(1, 12)), min_size=1, max_size=6),
    st.floats(0.5, 30),
    st.integers(0, 3),
)
def test_no_other_set_gives_much_more_tokens_per_millisecond(
    drafts: list[tuple[float, int]], draft_ms: float, plain: int
) -> None:
    cost = make_cost(draft_ms)
    choice = begun(cost)
    outlooks = [outlook(tokens, nodes) for tokens, nodes in drafts]
    sequences = len(outlooks) + plain
    chosen = choice.choose(outlooks, [], sequences)
    mine = rate(cost, [each for each, does in zip(outlooks, chosen, strict=True) if does], sequences)
    best = max(
        rate(cost, list(each), sequences)
        for count in range(len(outlooks) + 1)
        for each in combinations(outlooks, count)
    )
    assert mine >= 0.93 * best


def test_the_first_round_of_a_server_drafts() -> None:
    assert DraftChoice(make_cost(1000.0)).choose([Outlook(), Outlook()], [], 2) == [True, True]


@pytest.mark.parametrize(("tokens", "expected"), [(3.0, True), (0.05, False)])
def test_a_new_sequence_is_taken_for_a_typical_one(tokens: float, *, expected: bool) -> None:
    assert begun(make_cost(), tokens).choose([Outlook()], [], 1) == [expected]


def test_who_is_asked_to_draft_shares_the_drafts_cost() -> None:
    """Alone a draft of this sequence does not pay; beside one that drafts anyway it costs nearly nothing."""
    flat = RoundCost(CostCurve((1, 512), (10.0, 10.1)), 8.0, block_size=8)
    choice = begun(flat)
    assert choice.choose([outlook(0.5)], [], 2) == [False]
    assert choice.choose([outlook(0.5)], [outlook(0.5)], 2) == [True]


@pytest.mark.parametrize("draft_ms", [3.0, 40.0])
def test_tries_lose_a_bounded_share_of_the_time_and_never_end(draft_ms: float) -> None:
    cost = make_cost(draft_ms)
    choice = begun(cost, 0.02, try_share=0.02)
    outlooks = [outlook(0.02) for _ in range(6)]
    lost = passed = 0.0
    tries = np.zeros(6)
    for _ in range(4000):
        chosen = choice.choose(outlooks, [], 6)
        drafting = [each for each, does in zip(outlooks, chosen, strict=True) if does]
        tries += chosen
        for each in drafting:
            choice.learn(each, 0.02, 4)
        plain = cost.plain_ms(6)
        took = float(cost.table(6, len(drafting), 24)[5 + 4 * len(drafting)]) if drafting else plain
        lost += took - plain
        passed += took
    assert 0 < lost < 0.035 * passed
    assert tries.min() > 0
    assert tries.max() <= tries.min() + 1, "all in turn"


def test_a_sequence_whose_drafts_become_good_drafts_again() -> None:
    choice = begun(make_cost(), try_share=0.02)
    drafts = [outlook(0.0)]
    rounds = 0
    while not (choice.choose(drafts, [], 1)[0]):
        rounds += 1
        assert rounds < 200
    choice.learn(drafts[0], 4.0, 4)
    assert choice.choose(drafts, [], 1) == [True]
    assert not drafts[0].is_resting


@pytest.mark.parametrize(("tokens", "expected"), [(1.0, True), (6.0, False)])
def test_where_drafting_pays_little_a_plain_round_now_and_then_tells_what_it_takes(
    tokens: float, *, expected: bool
) -> None:
    choice = begun(make_cost(4.0), try_share=0.02)
    drafts = [outlook(tokens)]
    plain = [not choice.choose(drafts, [], 1)[0] for _ in range(100)]
    assert 2 <= sum(plain) <= 3 if expected else not any(plain)
    assert not drafts[0].is_resting, "it is no rest"


def test_as_many_positions_are_asked_for_as_trees_went_deep_and_three_more() -> None:
    outlook = Outlook()
    assert outlook.depth(15) == 15, "nothing is known before the first draft"
    outlook.drafted = 1
    outlook.reached(4)
    assert (outlook.depth(15), outlook.depth(5)) == (7, 5)
    asked = []
    for depth in (7, 10, 2, 2, 2, 2, 2, 2, 2, 2, 2, 13):
        outlook.reached(depth)
        asked.append(outlook.depth(15))
    assert asked == [10, 13, 12, 11, 10, 9, 8, 7, 6, 5, 5, 15]
