"""How rounds on the device choose the size of their trees, and what they note of the drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ddtree.device.messages import NO_DRAFTER, RoundResult, RoundSizes
from ddtree.events import Event, FellBack
from ddtree.live import Live
from ddtree.resident import FinishedTrees, ResidentRounds, RoundChoice
from ddtree.types import Status
from tests.fakes.lives import make_live

NODES = (0, 7, 15, 31)
OPEN = 31  # most nodes of a sequence that leaves it open


def choice(ms: tuple[float, ...], places: tuple[int, ...] = (1, 4)) -> RoundChoice:
    times = {(place, nodes): each for place in places for nodes, each in zip(NODES, ms, strict=True)}
    return RoundChoice(RoundSizes(places, NODES, times))


def tree(first: float, nodes: int) -> NDArray[np.float32]:
    """Path log-probabilities, best first: each half as probable as the one before."""
    return np.asarray(np.log(first * 0.5 ** np.arange(nodes)), dtype=np.float32)


def learn(chooser: RoundChoice, session: int, log_probs: NDArray[np.float32], accepted: int) -> None:
    """Let a round of one sequence pass."""
    counts, accepted_counts = np.array([len(log_probs)]), np.array([accepted])
    chooser.learn(FinishedTrees([session], log_probs[None], counts, accepted_counts))


def test_the_first_round_drafts() -> None:
    assert choice((5.0, 6.0, 7.0, 9.0)).nodes([1], 0, 1, OPEN) > 0


def test_what_pays_is_chosen() -> None:
    """Nodes of 0.9, 0.45, … promise 1.79 tokens beside the bonus with 7 nodes, 1.80 with 15."""
    chooser = choice((5.0, 6.0, 7.0, 9.0))
    for _ in range(30):
        learn(chooser, 1, tree(0.9, 15), 2)
    assert chooser.nodes([1], 0, 1, OPEN) == 7
    flat = choice((5.0, 5.1, 5.2, 5.3))
    for _ in range(30):
        learn(flat, 1, np.log(np.full(31, 0.2)).astype(np.float32), 6)
    assert flat.nodes([1], 0, 1, OPEN) == 31


def test_hopeless_drafts_rest_and_are_tried_again() -> None:
    chooser = choice((5.0, 9.0, 12.0, 20.0))
    for _ in range(30):
        learn(chooser, 1, tree(0.05, 7), 0)
    chosen = [chooser.nodes([1], 0, 1, OPEN) for _ in range(100)]
    assert chosen.count(0) >= 96
    assert chosen.count(7) == 3


def test_drafts_are_tried_only_in_a_size_that_is_prepared() -> None:
    """With many sequences only rounds without drafts are, as a round's nodes are limited in all."""
    ms = {(1, nodes): 5.0 for nodes in NODES} | {(4, 0): 5.0}
    chooser = RoundChoice(RoundSizes((1, 4), NODES, ms))
    assert not any(chooser.nodes([1, 2, 3], 0, 3, OPEN) for _ in range(100))


def test_what_is_accepted_beyond_promise_counts() -> None:
    """Promised 0.3 tokens for 40 % more time it does not pay; four times as many are accepted."""
    doubting, trusting = choice((5.0, 7.0, 20.0, 40.0)), choice((5.0, 7.0, 20.0, 40.0))
    for turn in range(60):
        learn(doubting, 1, tree(0.15, 7), turn % 3 == 0)
        learn(trusting, 1, tree(0.15, 7), 1 + turn % 2)
    assert doubting.nodes([1], 0, 1, OPEN) == 0
    assert trusting.nodes([1], 0, 1, OPEN) == 7


def test_costs_follow_what_rounds_take() -> None:
    chooser = choice((5.0, 6.0, 7.0, 9.0))
    for _ in range(30):
        learn(chooser, 1, tree(0.5, 7), 1)
    assert chooser.nodes([1], 0, 1, OPEN) == 7
    for _ in range(60):
        for nodes in NODES[1:]:
            chooser.observe(1, nodes, device_ms=30.0, wall_ms=31.0)
    assert chooser.nodes([1], 0, 1, OPEN) == 0
    assert chooser.host_ms == pytest.approx(1.0, abs=0.01)
    assert chooser.plain_ms(1) == pytest.approx(6.0, abs=0.01)
    assert chooser.sizes.ms[1, 7] == 6.0, "what the stages measured stays theirs"


def test_a_fixed_budget_of_another_sequence_makes_nodes_cheap() -> None:
    """The round is as large as that one asks anyway, so the other may draft as much for nothing."""
    chooser = choice((5.0, 9.0, 12.0, 20.0))
    for _ in range(30):
        learn(chooser, 1, tree(0.05, 7), 0)
    assert chooser.nodes([1], 15, 2, OPEN) == 15


def test_no_more_than_a_sequence_may_have() -> None:
    chooser = choice((5.0, 5.0, 5.0, 5.0))
    for _ in range(5):
        learn(chooser, 1, np.log(np.full(31, 0.2)).astype(np.float32), 6)
    assert chooser.nodes([1], 0, 1, 20) == 15


def test_larger_trees_are_expected_to_give_less_than_they_could() -> None:
    """The last of seven has 1/128, so eight more promise less than eight times that."""
    chooser = choice((5.0, 6.0, 7.0, 9.0))
    for _ in range(60):
        learn(chooser, 1, tree(0.5, 7), 1)
    tokens = chooser.forecasts[1].tokens
    assert tokens is not None
    assert 0 < tokens[2] - tokens[1] < 8 / 128
    assert tokens[2] < tokens[3] < tokens[1] + 24 / 128


def test_sequences_of_a_round_learn_each_from_its_own_tree() -> None:
    """Trees of different sizes stand in one array."""
    together, alone = choice((5.0, 6.0, 7.0, 9.0)), choice((5.0, 6.0, 7.0, 9.0))
    trees = {1: tree(0.9, 15), 2: tree(0.3, 3), 3: tree(0.5, 7)}
    accepted = {1: 4, 2: 0, 3: 1}
    log_probs = np.full((3, 15), -np.inf, dtype=np.float32)
    for row, one in zip(log_probs, trees.values(), strict=True):
        row[: len(one)] = one
    counts = np.array([len(one) for one in trees.values()])
    for _ in range(5):
        together.learn(FinishedTrees([*trees], log_probs, counts, np.array([*accepted.values()])))
        for session, one in trees.items():
            alone.typical.trust = 1.0
            learn(alone, session, one, accepted[session])
    for session in trees:
        assert together.forecasts[session].tokens == pytest.approx(alone.forecasts[session].tokens)
        assert together.forecasts[session].trust == pytest.approx(alone.forecasts[session].trust)
    own = [forecast.tokens[1] for forecast in together.forecasts.values() if forecast.tokens is not None]
    assert own[0] == pytest.approx(float(np.exp(trees[1][:7]).sum()))
    assert own[2] == pytest.approx(float(np.exp(trees[3]).sum()))
    assert together.typical.tokens is not None
    assert together.typical.tokens[1] == pytest.approx(sum(own) / 3)


def test_only_what_is_prepared() -> None:
    sizes = RoundSizes((1, 4), NODES, {(1, n): 1.0 for n in NODES} | {(4, 0): 1.0, (4, 7): 1.0})
    assert sizes.nodes_for(1, 8) == 15
    assert sizes.nodes_for(2, 8) is None
    assert sizes.nodes_for(2, 5) == 7
    assert sizes.nodes_for(5, 0) is None
    assert sizes.places_for(2) == 4


def test_sequences_that_ended_are_forgotten() -> None:
    chooser = choice((5.0, 6.0, 7.0, 9.0))
    for session in range(200):
        learn(chooser, session, tree(0.5, 7), 1)
    chooser.forget([make_live(3), make_live(4)])
    assert set(chooser.forecasts) == {3, 4}


def test_a_drafter_that_is_behind_stays_so_and_knows_how_far() -> None:
    behind, in_step = make_live(1), make_live(2)
    for live in (behind, in_step):
        live.committed = 40
        live.draft.is_wanted = True
    behind.draft.behind_until, behind.draft.length = 40, 16
    in_step.draft.length = 40
    ResidentRounds._follow(behind, False, 3)
    ResidentRounds._follow(in_step, True, 3)
    assert (behind.draft.length, behind.draft.behind_until) == (16, 43)
    assert in_step.draft.length == 43


class OneRound:
    """Stages whose round is written down, and the planner that asks for it."""

    def __init__(self, sizes: RoundSizes, result: RoundResult) -> None:
        self.sizes, self.result = sizes, result
        self.epochs: list[int] = []

    def resident(
        self, batch: Sequence[Live], budgets: Sequence[int], epochs: Sequence[int], nodes: int
    ) -> RoundSizes:
        """No stage reads what it is asked here."""
        del batch, budgets, nodes
        self.epochs += epochs
        return self.sizes

    async def round(self, request: object) -> RoundResult:
        """What is written down."""
        del request
        return self.result


class HopelessRounds:
    """Stages whose trees promise little and give nothing, and the planner that asks for them."""

    def __init__(self, sizes: RoundSizes) -> None:
        self.sizes = sizes

    def resident(
        self, batch: Sequence[Live], budgets: Sequence[int], epochs: Sequence[int], nodes: int
    ) -> tuple[Sequence[int], int]:
        """What matters here."""
        del batch, epochs
        return budgets, nodes

    async def round(self, request: tuple[Sequence[int], int]) -> RoundResult:
        """As many nodes as were asked for, in the time that so many take."""
        budgets, nodes = request
        none = torch.zeros(len(budgets), dtype=torch.int32)
        paths = np.full((len(budgets), OPEN), -np.inf, dtype=np.float32)
        for row, budget in zip(paths, budgets, strict=True):
            row[:budget] = tree(0.05, budget)
        device_ms = self.sizes.ms[self.sizes.places_for(len(budgets)) or 0, nodes]
        counts, log_probs = torch.tensor(budgets, dtype=torch.int32), torch.from_numpy(paths)
        return RoundResult(none, none, none[:, None], none, none, counts, log_probs, {"verify": device_ms})


async def test_who_begins_to_go_on_without_drafts_is_told_once_each_time() -> None:
    """Of two that leave it open, beside one that asked for seven nodes; a try of theirs ends no rest."""
    lives = [make_live(number) for number in range(1, 4)]
    lives[2].sequence.params = replace(lives[2].sequence.params, tree_budget=7)
    for live, most in zip(lives, (OPEN, OPEN, 7), strict=True):
        live.node_cap = most
    stages = HopelessRounds(choice((5.0, 9.0, 12.0, 20.0)).sizes)
    told: list[Event] = []
    rounds = ResidentRounds(stages, stages, lambda _: None, lambda: 0.0, told.append)  # type: ignore[arg-type]

    async def run(batch: list[Live], count: int) -> int:
        """Gives how many of the rounds drafted."""
        drafted = 0
        for _ in range(count):
            drafted += bool((await rounds.run(batch)).drafting)
            for live in batch:
                live.committed += 1
        return drafted

    assert await run(lives, 60) == 60
    assert not told, "the round is as large as the third asks anyway, so theirs cost nothing"
    assert await run(lives[:2], 100) == 3, "tries"
    assert told == [FellBack("not_paying")] * 2
    for session in (1, 2):
        for _ in range(40):
            learn(rounds.choice, session, tree(0.9, 7), 5)
    await run(lives[:2], 1)
    assert not any(live.outlook.is_resting for live in lives)
    await run(lives[:2], 100)
    assert told == [FellBack("not_paying")] * 4


def test_trees_that_are_too_large_for_a_sequence_do_not_say_that_drafts_do_not_pay() -> None:
    chooser = choice((5.0, 5.1, 5.2, 5.3))
    assert chooser.nodes([1], 0, 1, most_nodes=4) == 0
    assert not chooser.is_resting


async def test_a_round_is_learnt_from_where_its_size_was_chosen_and_followed_where_it_was_held() -> None:
    lives = [make_live(number) for number in range(1, 6)]
    for live in lives:
        live.committed = live.draft.length = 5
    lives[1].sequence.params = replace(lives[1].sequence.params, tree_budget=7)  # asked for by its caller
    lives[4].draft.is_wanted = False
    ints = partial(torch.tensor, dtype=torch.int32)
    lost, no_trees = Status.SESSION_LOST, np.full((3, 7), -np.inf, dtype=np.float32)
    result = RoundResult(
        status=ints([0, 0, 0, lost, 0]),
        draft_status=ints([0, 0, lost, 0, 0]),
        accepted_tokens=torch.zeros((5, 7), dtype=torch.int32),
        accepted_counts=ints([2, 3, 0, 0, 0]),
        bonus_tokens=ints([9] * 5),
        node_counts=ints([7, 7, 0, 0, 0]),
        path_log_probs=torch.from_numpy(np.stack([tree(0.9, 7), tree(0.5, 7), *no_trees])),
        stage_ms={"draft": 1.0, "build_tree": 0.0, "verify": 5.0},
    )
    stages = OneRound(choice((5.0, 6.0, 7.0, 9.0), places=(1, 8)).sizes, result)
    told: list[Live] = []
    rounds = ResidentRounds(stages, stages, told.append)  # type: ignore[arg-type]
    done = await rounds.run(lives)
    assert done.result is result
    assert stages.epochs == [0, 0, 0, 0, NO_DRAFTER]
    assert set(rounds.choice.forecasts) == {1}
    assert rounds.choice.forecasts[1].tokens == rounds.choice.typical.tokens
    assert told == [lives[2]]
    assert [live.draft.length for live in lives] == [8, 9, 5, 5, 5]
    assert rounds.choice.device_ms == stages.sizes.ms, "a round that lost a sequence is none of its size"
