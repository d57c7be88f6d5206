"""Trees whose children are scored given their parent, against all paths there are."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.budget import choose
from ddtree.errors import InvalidArgument
from ddtree.tree import build_trees
from ddtree.types import AUTO_BUDGET, TreeBatch, TreeRequest
from tests.oracles.brute_tree import conditioned_nodes

no_deadline = settings(deadline=None, max_examples=60)


def make_request(
    edges: torch.Tensor,  # [S, D, K, K]
    budgets: list[int],
    *,
    absent: torch.Tensor | None = None,  # [S, D, K] bool
    chain: bool = False,
    costs: list[float] | None = None,
) -> TreeRequest:
    """Candidate ids tell position and candidate: 100 d + c."""
    size, depth, width, _ = edges.shape
    ids = torch.arange(depth).unsqueeze(1) * 100 + torch.arange(width)
    unary = torch.zeros(size, depth, width)
    return TreeRequest(
        top_ids=ids.expand(size, -1, -1).int(),
        top_log_probs=unary if absent is None else unary.masked_fill(absent, -inf),
        budgets=torch.tensor(budgets).int(),
        is_chain=torch.full((size,), chain),
        round_cost_ms=torch.tensor(costs or [], dtype=torch.float32),
        edge_log_probs=edges,
    )


def random_edges(seed: int, size: int, depth: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(size, depth, width, width, generator=generator)).log_softmax(-1)


def paths_of(trees: TreeBatch, sequence: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for column in range(int(trees.counts[sequence])):
        parent = int(trees.parents[sequence, column])
        assert parent <= column, "a parent must precede its children"
        depth, candidate = divmod(int(trees.tokens[sequence, column]), 100)
        assert depth == len(paths[parent]) == int(trees.depths[sequence, column]) - 1
        paths.append((*paths[parent], candidate))
    assert len(set(paths)) == len(paths), "one child per parent and token"
    return paths[1:]


@no_deadline
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 4), st.integers(0, 120), st.floats(0, 0.6))
def test_the_tree_is_the_best_nodes_of_all_paths_in_order(
    seed: int, depth: int, width: int, budget: int, share_absent: float
) -> None:
    edges = random_edges(seed, 1, depth, width)
    generator = torch.Generator().manual_seed(seed + 1)
    absent = torch.rand(1, depth, width, generator=generator) < share_absent
    trees = build_trees(make_request(edges, [budget], absent=absent))
    expected = conditioned_nodes(edges[0].tolist(), (~absent[0]).tolist())[:budget]
    assert paths_of(trees, 0) == [node.ranks for node in expected]


@no_deadline
@given(st.integers(0, 10_000))
def test_a_batch_gives_each_sequence_the_tree_it_gets_alone(seed: int) -> None:
    edges = random_edges(seed, 3, 3, 4)
    together = build_trees(make_request(edges, [5, 0, 17]))
    for index, budget in enumerate((5, 0, 17)):
        alone = build_trees(make_request(edges[index : index + 1], [budget]))
        assert paths_of(together, index) == paths_of(alone, 0)


def test_a_chain_follows_the_best_child_of_each_parent() -> None:
    edges = random_edges(7, 1, 5, 4)
    (path,) = [paths_of(build_trees(make_request(edges, [9], chain=True)), 0)[-1]]
    parent, expected = 0, []
    for position in range(5):
        parent = int(edges[0, position, parent].argmax())
        expected.append(parent)
    assert list(path) == expected


def test_a_poor_candidate_may_follow_its_parent_best() -> None:
    """The case that factorised marginals cannot say: which of two words comes depends on the one before."""
    sure, never = -0.01, -9.0
    edges = torch.full((1, 2, 3, 3), never)
    edges[0, 0, 0, 0], edges[0, 0, 0, 1] = -0.6, -0.9
    edges[0, 1, 0, 2], edges[0, 1, 1, 0] = sure, sure
    assert paths_of(build_trees(make_request(edges, [4])), 0) == [(0,), (0, 2), (1,), (1, 0)]


def test_edges_that_do_not_depend_on_the_parent_are_marginals() -> None:
    marginals = torch.randn(1, 4, 5).log_softmax(-1).sort(-1, descending=True).values
    edges = marginals.unsqueeze(2).expand(-1, -1, 5, -1).contiguous()
    conditioned = make_request(edges, [40])
    plain = TreeRequest(
        conditioned.top_ids, marginals, conditioned.budgets, conditioned.is_chain, conditioned.round_cost_ms
    )
    assert paths_of(build_trees(conditioned), 0) == paths_of(build_trees(plain), 0)


def test_equal_children_come_in_their_candidates_order() -> None:
    edges = torch.full((1, 2, 2, 2), -1.0)
    assert paths_of(build_trees(make_request(edges, [6])), 0) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]


def test_an_automatic_budget_takes_the_best_nodes_of_the_batch() -> None:
    edges = random_edges(5, 2, 3, 3)
    costs = [10.0] * 7 + [11.0, 14.0, 30.0, 60.0]
    trees = build_trees(make_request(edges, [AUTO_BUDGET, AUTO_BUDGET], costs=costs))
    everything = [conditioned_nodes(rows, [[True] * 3] * 3) for rows in edges.tolist()]
    joint = sorted((node.log_prob for nodes in everything for node in nodes), reverse=True)
    chosen = choose(np.exp(joint), 2, np.asarray(costs, dtype=np.float32))
    assert int(trees.counts.sum()) == chosen > 3
    for index, nodes in enumerate(everything):
        count = int(trees.counts[index])
        assert paths_of(trees, index) == [node.ranks for node in nodes[:count]]


def test_edges_of_another_shape_are_refused() -> None:
    request = make_request(random_edges(0, 1, 2, 3), [4])
    odd = TreeRequest(
        request.top_ids, request.top_log_probs, request.budgets, request.is_chain, request.round_cost_ms,
        request.edge_log_probs[:, :, :2],
    )  # fmt: skip
    with pytest.raises(InvalidArgument, match=r"edge_log_probs must have the shape \[1, 2, 3, 3\]"):
        build_trees(odd)
