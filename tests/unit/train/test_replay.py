"""Replaying answers: rounds and tokens counted by hand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from ddtree.train.replay import Acceptance, Answer, Candidates, replay, replay_each
from ddtree.types import DraftResult

PROMPT = 2
A, B, C, X, Y = 10, 11, 12, 90, 91


def answer(*tokens: int) -> Answer:
    return Answer(torch.tensor([1] * PROMPT + list(tokens)), PROMPT)


def candidates(count: int, rows: list[list[int]], log_probs: list[float]) -> Candidates:
    """The same candidates `rows[depth][rank]` at every anchor."""
    ids = torch.tensor(rows, dtype=torch.int32).expand(count, -1, -1)
    return Candidates(ids, torch.tensor(log_probs).expand(ids.shape))


def test_a_chain_that_is_right_twice_and_then_wrong() -> None:
    # The first A is prefill's. From it B C hit and X misses, so a round emits B, C and the bonus A; from that
    # A the same again, and the answer ends.
    drafted = candidates(6, [[B, X], [C, X], [X, Y]], [-0.1, -3.0])
    assert replay([answer(A, B, C, A, B, C, A)], [drafted], None) == Acceptance(6, 2)


def test_a_stop_inside_the_path_does_not_inflate_the_length() -> None:
    drafted = candidates(2, [[B, X], [C, X], [X, Y]], [-0.1, -3.0])
    assert replay([answer(A, B, C)], [drafted], None) == Acceptance(2, 1)


@pytest.mark.parametrize(
    ("budget", "expected"), [(1, Acceptance(6, 6)), (2, Acceptance(6, 3)), (6, Acceptance(6, 2))]
)
def test_a_tree_holds_second_choices_when_its_budget_reaches_them(budget: int, expected: Acceptance) -> None:
    # Best first: X (-0.5), B (-0.9), X-B (-1.0), then B-B and X-Y (-1.4), B-Y.
    drafted = candidates(6, [[X, B], [B, Y]], [-0.5, -0.9])
    assert replay([answer(A, B, B, B, B, B, B)], [drafted], budget) == expected


def test_answers_are_pooled_and_single_tokens_have_no_round() -> None:
    drafted = candidates(3, [[B, X], [C, X]], [-0.1, -3.0])
    none = candidates(0, [[B, X], [C, X]], [-0.1, -3.0])
    result = replay([answer(A, B, C), answer(A), answer(A, X, X)], [drafted, none, drafted], None)
    assert result == Acceptance(emitted=2 + 2, rounds=1 + 2)
    assert result.length == pytest.approx(4 / 3)


def test_drafts_are_asked_for_where_roots_stand_and_children_may_depend_on_parents() -> None:
    """Edges say that C follows B and Y follows X; whoever ignores them drafts C after X."""
    asked: list[dict[int, int]] = []

    def draft(at: Mapping[int, int]) -> DraftResult:
        asked.append(dict(at))
        ids = torch.tensor([[B, X], [C, Y]], dtype=torch.int32).expand(len(at), -1, -1)
        after_b, after_x = torch.tensor([-0.1, -9.0]), torch.tensor([-9.0, -0.1])
        edges = torch.stack([torch.tensor([[-0.7, -0.8]] * 2), torch.stack([after_b, after_x])])
        log_probs = torch.tensor([[-0.7, -0.8], [-0.1, -2.0]])
        return DraftResult(
            torch.zeros(len(at), dtype=torch.int32),
            ids,
            log_probs.expand(ids.shape),
            edges.expand(len(at), -1, -1, -1),
        )

    found = replay_each([answer(A), answer(A, X, Y, A, B, C, A), answer(A, C, X, Y)], draft, 4)
    assert found == [Acceptance(0, 0), Acceptance(6, 2), Acceptance(3, 2)]
    assert asked == [{1: 0, 2: 0}, {1: 3, 2: 1}]
