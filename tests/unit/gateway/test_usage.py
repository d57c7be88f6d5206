"""What an answer cost, and how its rounds went, from chunks and results."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_client import Chunk, Result, Stats
from ddtree_gateway.usage import Rounds, usage_of


def result(output_tokens: int, accepted: int, drafted: int, rounds: int, input_tokens: int = 5) -> Result:
    stats = Stats(input_tokens, output_tokens, rounds, accepted, drafted, 1, 0.1, 1.0)
    return Result("x", (), "stop", stats)


def chunk(tokens: int, row: int = 0) -> Chunk:
    return Chunk("x", tuple(range(tokens)), row, False, "", 0.0)


def test_a_prompt_counts_once_for_all_its_sequences() -> None:
    usage = usage_of(
        [result(3, 1, 8, 1), result(4, 2, 9, 1), result(1, 0, 0, 0, 7), result(2, 0, 1, 1, 7)], 2
    )
    assert usage == {
        "prompt_tokens": 12,
        "completion_tokens": 10,
        "total_tokens": 22,
        "completion_tokens_details": {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 15},
    }


def test_every_chunk_after_the_first_is_a_round() -> None:
    rounds = Rounds()
    for sequence, tokens in ((0, 1), (1, 1), (0, 3), (1, 1), (0, 0), (0, 1), (0, 4)):
        rounds.add(sequence, chunk(tokens))
    found = rounds.speculative_decoding([result(9, 5, 20, 3), result(2, 0, 4, 1)])
    assert found == {
        "acceptance_histogram": [2, 0, 1, 1],
        "num_spec_steps": 4,
        "mean_acceptance_length": 1 + 5 / 4,
        "draft_acceptance_rate": 5 / 24,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 24,
    }


@pytest.mark.parametrize("chunks", [[], [1]])
def test_an_answer_without_rounds_has_numbers_too(chunks: list[Any]) -> None:
    rounds = Rounds()
    for tokens in chunks:
        rounds.add(0, chunk(tokens))
    found = rounds.speculative_decoding([result(len(chunks), 0, 0, 0)])
    assert (found["acceptance_histogram"], found["num_spec_steps"]) == ([0], 0)
    assert (found["mean_acceptance_length"], found["draft_acceptance_rate"]) == (0.0, 0.0)
