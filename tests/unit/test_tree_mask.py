"""Bit rows against the walk from each node to the root."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.tree_mask import WORD_BITS, ancestor_bits, expand
from tests.oracles.tree_walks import ancestors_and_self

no_deadline = settings(deadline=None)  # the machine may be busy with other things

T, F = True, False


@st.composite
def parent_lists(draw: st.DrawFn) -> list[int]:
    count = draw(st.integers(0, 24))
    return [draw(st.integers(0, column)) for column in range(count)]


def naive_mask(parents: list[int], size: int) -> list[list[bool]]:
    """Rows and columns up to `size`; padding sees the root and itself."""
    rows = []
    for row in range(size):
        seen = ancestors_and_self(parents, row) if row <= len(parents) else {0, row}
        rows.append([column in seen for column in range(size)])
    return rows


def test_the_example_on_paper() -> None:
    # root ├── 1 ── 3
    #      └── 2
    bits = ancestor_bits(torch.tensor([[0, 0, 1]]), torch.tensor([3]))
    assert expand(bits)[0].tolist() == [
        [T, F, F, F],
        [T, T, F, F],
        [T, F, T, F],
        [T, T, F, T],
    ]
    assert bits[0, :, 0].tolist() == [0b0001, 0b0011, 0b0101, 0b1011]


def test_padding_sees_root_and_itself_and_nobody_sees_it() -> None:
    # One real node; the two padding columns hold what an earlier tree left there.
    bits = ancestor_bits(torch.tensor([[0, 1, 2]]), torch.tensor([1]))
    assert expand(bits)[0].tolist() == [
        [T, F, F, F],
        [T, T, F, F],
        [T, F, T, F],
        [T, F, F, T],
    ]


@no_deadline
@given(st.lists(parent_lists(), min_size=1, max_size=4))
def test_batch_equals_naive_walks(trees: list[list[int]]) -> None:
    width = max(len(parents) for parents in trees)
    padded = [parents + [0] * (width - len(parents)) for parents in trees]
    parents = torch.tensor(padded, dtype=torch.int32).reshape(len(trees), width)
    bits = ancestor_bits(parents, torch.tensor([len(parents) for parents in trees]).int())
    assert bits.dtype == torch.int64
    assert expand(bits).tolist() == [naive_mask(parents, width + 1) for parents in trees]


@pytest.mark.parametrize("count", [62, 63, 64, 65, 127, 128, 200])
@pytest.mark.parametrize("shape", ["chain", "star", "binary"])
def test_trees_around_a_word_boundary(count: int, shape: str) -> None:
    shapes = {"chain": range(count), "star": [0] * count, "binary": [c // 2 for c in range(count)]}
    parents = list(shapes[shape])
    bits = ancestor_bits(torch.tensor([parents], dtype=torch.int32), torch.tensor([count]))
    assert bits.shape == (1, count + 1, count // WORD_BITS + 1)
    assert expand(bits)[0].tolist() == naive_mask(parents, count + 1)


def test_no_nodes_leave_the_root_alone() -> None:
    bits = ancestor_bits(torch.zeros(2, 0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    assert expand(bits).tolist() == [[[T]], [[T]]]
