"""What counts as draft trees when another model says that it built some."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddtree.errors import Unavailable
from ddtree.tree import build_trees
from ddtree.tree_check import check_trees
from ddtree.types import TreeBatch, TreeRequest

# The first sequence's nodes 1 and 2 hang from the root, 3 from node 2; the second has one node.
TREES = TreeBatch(
    tokens=torch.tensor([[5, 6, 7], [8, 0, 0]], dtype=torch.int32),
    parents=torch.tensor([[0, 0, 2], [0, 0, 0]], dtype=torch.int32),
    depths=torch.tensor([[1, 1, 2], [1, 0, 0]], dtype=torch.int32),
    counts=torch.tensor([3, 1], dtype=torch.int32),
)


def ints(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_trees_are_trees() -> None:
    check_trees(TREES, 2, 2)
    check_trees(TreeBatch.empty(3), 3, 15)
    check_trees(TreeBatch.empty(0), 0, 15)


def test_padding_may_hold_anything() -> None:
    check_trees(
        replace(TREES, parents=ints([0, 0, 2], [0, 77, -3]), depths=ints([1, 1, 2], [1, 9, -1])), 2, 2
    )


@pytest.mark.parametrize(("field", "value", "said"), [
    ("counts", torch.tensor([3], dtype=torch.int32), r"counts must have the shape \[2\], got \[1\]"),
    ("counts", torch.tensor([4, 1], dtype=torch.int32), "counts must be between 0 and 3"),
    ("counts", torch.tensor([-1, 1], dtype=torch.int32), "counts must be between 0 and 3"),
    ("tokens", ints([5, 6], [8, 0]), r"parents must have the shape \[2, 2\], got \[2, 3\]"),
    ("parents", ints([0, 0], [0, 0]), r"parents must have the shape \[2, 3\]"),
    ("depths", ints([1, 1, 2]), r"depths must have the shape \[2, 3\]"),
    ("parents", ints([0, 0, 3], [0, 0, 0]), r"parents must stand before their children, got \[3\]"),
    ("parents", ints([0, 0, 5000], [0, 0, 0]), "parents must stand before"),
    ("parents", ints([0, -1, 2], [0, 0, 0]), "parents must stand before"),
    ("depths", ints([1, 1, 3], [1, 0, 0]), "depths must be one more than the parent's and at most 2"),
    ("depths", ints([2, 1, 2], [1, 0, 0]), "depths must be one more"),
    ("depths", ints([1, 1, 2], [0, 0, 0]), "depths must be one more"),
])  # fmt: skip
def test_what_is_none_is_said(field: str, value: torch.Tensor, said: str) -> None:
    with pytest.raises(Unavailable, match=f"tree_builder answered no draft trees: {said}"):
        check_trees(replace(TREES, **{field: value}), 2, 2)


def test_only_some_of_what_is_wrong_is_shown() -> None:
    counts = torch.full((2000,), 9, dtype=torch.int32)
    with pytest.raises(Unavailable, match=r"got \[9, 9, 9, 9, …\]; repair it"):
        check_trees(replace(TreeBatch.empty(2000), counts=counts), 2000, 5)


def test_none_is_deeper_than_was_asked() -> None:
    with pytest.raises(Unavailable, match="at most 1"):
        check_trees(TREES, 2, 1)


@given(st.integers(0, 4), st.integers(1, 5), st.integers(1, 4), st.integers(0, 30), st.integers(0, 2**30))
def test_ours_are(sequences: int, depth: int, width: int, budget: int, seed: int) -> None:
    torch.manual_seed(seed)
    log_probs = torch.randn(sequences, depth, width).log_softmax(-1).sort(dim=-1, descending=True).values
    request = TreeRequest(
        top_ids=torch.arange(width, dtype=torch.int32).expand(sequences, depth, width).contiguous(),
        top_log_probs=log_probs,
        budgets=torch.full((sequences,), budget, dtype=torch.int32),
        is_chain=torch.arange(sequences) % 2 == 1,
        round_cost_ms=torch.zeros(0),
    )
    check_trees(build_trees(request), sequences, depth)
