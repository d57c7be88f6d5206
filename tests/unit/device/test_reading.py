"""Which prompts a prepared step reads together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.device.steps import sizes_for
from ddtree.staging import grouped

SIZES = sizes_for(32, 256, 512)  # as when serving
MOST = 257  # ids of the longest chunk that a size holds


def rows(sequences: int, nodes: int) -> int | None:
    fitting = [size.rows for size in SIZES if size.places >= sequences and size.nodes >= nodes]
    return min(fitting, default=None)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([64], [[0]]),
        ([64, 64], [[0, 1]]),
        ([1] * 30 + [33, 64], [[*range(30)], [30, 31]]),  # thirty-two sequences that begin at once
        ([64, 1, 1, 58, 1, 1], [[1, 2, 4, 5], [3, 0]]),
        ([400, 5, 300], [[1], [2, 0]]),  # too long for every size: the general way, together
    ],
)
def test_chunks_of_about_one_length_share_a_step(lengths: list[int], expected: list[list[int]]) -> None:
    assert grouped(rows, dict(enumerate(lengths))) == expected


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_every_chunk_is_read_once_and_fits(lengths: list[int]) -> None:
    groups = grouped(rows, dict(enumerate(lengths)))
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    for group in groups:
        longest, shortest = (pick(lengths[place] for place in group) for pick in (max, min))
        assert rows(len(group), longest - 1) is not None or shortest > MOST
