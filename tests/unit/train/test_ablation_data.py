"""What an arm, or `train` by its options, trains on: kinds of answers, and parts of them."""

from __future__ import annotations

import numpy as np
import pytest

from ddtree.errors import InvalidArgument
from ddtree.train.corpus import Sequences, answered, pack, part_of


@pytest.fixture
def sequences() -> Sequences:
    """Two hundred sequences that begin with their number; two of five are greedy."""
    random = np.random.default_rng(0)
    rows = [
        np.concatenate(([number], random.integers(300, 400, random.integers(8, 40)))) for number in range(200)
    ]
    temperatures = [0.0 if number % 5 < 2 else (0.3, 1.0)[number % 2] for number in range(200)]
    return pack(rows, [4] * 200, temperatures, [0] * 200, [True] * 200, 49152)


def numbers(sequences: Sequences) -> set[int]:
    return set(sequences.ids[sequences.starts].tolist())


def test_kinds_of_answers_are_told_by_their_temperature(sequences: Sequences) -> None:
    greedy, drawn = answered(sequences, "greedy"), answered(sequences, "drawn")
    assert numbers(greedy) == {number for number in range(200) if number % 5 < 2}
    assert set(greedy.temperatures.tolist()) == {0.0}
    assert numbers(greedy) | numbers(drawn) == numbers(sequences)
    assert len(greedy) + len(drawn) == 200
    assert answered(sequences, "all") is sequences


def test_a_kind_that_is_not_there_and_another_word_are_refused(sequences: Sequences) -> None:
    with pytest.raises(
        InvalidArgument, match="answers must be of a kind that the corpus holds, got 'greedy'"
    ):
        answered(answered(sequences, "drawn"), "greedy")
    with pytest.raises(InvalidArgument, match="answers must be one of all, greedy, drawn, got 'warm'"):
        answered(sequences, "warm")


def test_a_part_holds_the_tokens_asked_for_and_lies_within_larger_ones(sequences: Sequences) -> None:
    whole, longest = sequences.answer_tokens, int((sequences.lengths - sequences.answer_starts).max())
    parts = [part_of(sequences, whole // size, seed=5) for size in (2, 4, 8)]
    for part, size in zip(parts, (2, 4, 8), strict=True):
        assert whole // size <= part.answer_tokens < whole // size + longest
    half, quarter, eighth = map(numbers, parts)
    assert eighth < quarter < half < numbers(sequences)
    assert numbers(part_of(sequences, whole // 8, seed=6)) != eighth
    assert max(eighth) > 150, "from all over the corpus"


def test_all_there_is_stays_as_it_is_and_nothing_is_refused(sequences: Sequences) -> None:
    assert part_of(sequences, sequences.answer_tokens, seed=5) is sequences
    assert part_of(sequences, 10**9, seed=5) is sequences
    with pytest.raises(InvalidArgument, match="data share must leave a token"):
        part_of(sequences, 0, seed=5)
