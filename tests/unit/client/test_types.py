"""Numbers derived from an answer's statistics."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddtree_client.types import Stats

STATS = Stats(
    input_tokens=5,
    output_tokens=21,
    rounds=8,
    accepted_draft_tokens=12,
    draft_tokens=128,
    first_chunk_tokens=1,
    time_to_first_token_s=0.5,
    total_s=2.5,
)


def test_acceptance_length_leaves_the_first_token_out() -> None:
    assert STATS.acceptance_length == 20 / 8


def test_speed_is_that_of_the_tokens_after_the_first_chunk() -> None:
    assert STATS.tokens_per_second == 20 / 2.0
    assert replace(STATS, first_chunk_tokens=5).tokens_per_second == 16 / 2.0


def test_acceptance_rate() -> None:
    assert STATS.acceptance_rate == 12 / 128


@pytest.mark.parametrize(
    ("stats", "name"),
    [
        (replace(STATS, rounds=0), "acceptance_length"),
        (replace(STATS, draft_tokens=0), "acceptance_rate"),
        (replace(STATS, total_s=0.5), "tokens_per_second"),
        (replace(STATS, output_tokens=1), "tokens_per_second"),
    ],
)
def test_what_cannot_be_computed_is_none(stats: Stats, name: str) -> None:
    assert getattr(stats, name) is None
