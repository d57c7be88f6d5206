"""Tree builder against all paths there are, and at its edges."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.budget import choose
from ddtree.errors import InvalidArgument
from ddtree.tree import build_trees, useful_width
from ddtree.types import AUTO_BUDGET, TreeBatch, TreeRequest
from tests.oracles.brute_tree import all_nodes, best_nodes

no_deadline = settings(deadline=None)  # the machine may be busy with other things


def make_request(
    log_probs: list[list[list[float]]],
    budgets: list[int],
    chains: list[bool] | None = None,
    costs: list[float] | None = None,
) -> TreeRequest:
    """Candidate ids tell position and rank: 100 d + r, with id 0 for the very first candidate."""
    width = max((len(row) for rows in log_probs for row in rows), default=0)
    probs = torch.tensor(log_probs, dtype=torch.float32).reshape(len(log_probs), len(log_probs[0]), width)
    ids = torch.arange(len(log_probs[0])).unsqueeze(1) * 100 + torch.arange(width)
    return TreeRequest(
        top_ids=ids.expand(len(log_probs), -1, -1).to(torch.int32),
        top_log_probs=probs,
        budgets=torch.tensor(budgets, dtype=torch.int32),
        is_chain=torch.tensor(chains or [False] * len(budgets)),
        round_cost_ms=torch.tensor(costs or [], dtype=torch.float32),
    )


def as_float32(log_probs: list[list[float]]) -> list[list[float]]:
    """What the builder sees: the request carries float32."""
    return np.asarray(log_probs, dtype=np.float32).astype(np.float64).tolist()  # type: ignore[no-any-return]


def ranks_of(trees: TreeBatch, sequence: int) -> list[tuple[int, ...]]:
    """Read the nodes back as rank vectors, through tokens and parents only."""
    paths: list[tuple[int, ...]] = [()]
    count = int(trees.counts[sequence])
    for column in range(count):
        parent = int(trees.parents[sequence, column])
        assert parent <= column, "a parent must precede its children"
        depth, rank = divmod(int(trees.tokens[sequence, column]), 100)
        assert depth == len(paths[parent])
        assert int(trees.depths[sequence, column]) == depth + 1
        paths.append((*paths[parent], rank))
    return paths[1:]


@st.composite
def candidate_lists(draw: st.DrawFn, max_depth: int = 4, max_candidates: int = 4) -> list[list[float]]:
    """Descending log-probs per position; a coarse grid makes ties common, -inf closes some rows early."""
    depth_count = draw(st.integers(1, max_depth))
    width = draw(st.integers(1, max_candidates))
    value = st.one_of(st.sampled_from([0.0, -0.5, -1.0, -2.0, -inf]), st.floats(-20, 0, width=32))
    return [
        sorted(draw(st.lists(value, min_size=width, max_size=width)), reverse=True)
        for _ in range(depth_count)
    ]


@no_deadline
@given(candidate_lists(), st.integers(0, 400))
def test_tree_is_the_best_nodes_of_all_paths_in_order(log_probs: list[list[float]], budget: int) -> None:
    trees = build_trees(make_request([log_probs], [budget]))
    assert ranks_of(trees, 0) == [node.ranks for node in best_nodes(as_float32(log_probs), budget)]


@no_deadline
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 30)), min_size=1, max_size=5))
def test_a_batch_gives_each_sequence_the_tree_it_gets_alone(cases: list[tuple[int, int]]) -> None:
    lists = [np.random.default_rng(seed).uniform(-8, 0, (3, 4)) for seed, _ in cases]
    log_probs = [(-np.sort(-values, axis=1)).tolist() for values in lists]
    together = build_trees(make_request(log_probs, [budget for _, budget in cases]))
    for index, (rows, (_, budget)) in enumerate(zip(log_probs, cases, strict=True)):
        alone = build_trees(make_request([rows], [budget]))
        count = int(alone.counts[0])
        assert int(together.counts[index]) == count
        for name in ("tokens", "parents", "depths"):
            packed = getattr(together, name)[index]
            assert packed[:count].tolist() == getattr(alone, name)[0].tolist()
            assert not packed[count:].any(), "padding must hold zeros"


@no_deadline
@given(candidate_lists(max_depth=5, max_candidates=5), st.integers(0, 12))
def test_candidates_beyond_the_useful_width_change_nothing(log_probs: list[list[float]], budget: int) -> None:
    width = useful_width(budget, len(log_probs))
    narrow = [row[:width] for row in log_probs[:budget]]
    whole = build_trees(make_request([log_probs], [budget]))
    cut = build_trees(make_request([narrow], [budget]))
    assert ranks_of(whole, 0) == ranks_of(cut, 0)
    assert all(sum(np.cumprod(np.asarray(ranks) + 1)) <= budget for ranks in ranks_of(whole, 0)), (
        "the bound the width comes from"
    )


def test_useful_width_is_tight() -> None:
    flat = [[-1.0, -1.0, -1.0, -1.0]]
    assert ranks_of(build_trees(make_request([flat], [4])), 0)[-1] == (3,)
    assert useful_width(4, 1) == 4
    assert useful_width(4, 0) == 0


@no_deadline
@given(candidate_lists(), st.integers(0, 6))
def test_chain_takes_the_first_candidate_of_each_position(log_probs: list[list[float]], budget: int) -> None:
    trees = build_trees(make_request([log_probs], [budget], chains=[True]))
    reachable = next((d for d, row in enumerate(log_probs) if row[0] == -inf), len(log_probs))
    assert ranks_of(trees, 0) == [(0,) * d for d in range(1, min(reachable, budget) + 1)]


def test_equal_nodes_come_in_dictionary_order_of_their_ranks() -> None:
    log_probs = [[-1.0, -1.0], [0.0, 0.0]]
    trees = build_trees(make_request([log_probs], [6]))
    assert ranks_of(trees, 0) == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]


@pytest.mark.parametrize("budget", [1, 14, 15, 16, 64])
def test_budgets_around_the_block_size(budget: int) -> None:
    log_probs = np.log(np.full((15, 3), 0.3) ** np.arange(1, 4)).tolist()
    trees = build_trees(make_request([log_probs], [budget]))
    assert trees.counts.tolist() == [budget]
    pairs = list(zip(trees.parents[0].tolist(), trees.tokens[0].tolist(), strict=True))
    assert len(set(pairs)) == budget, "one child per parent and token"


def test_budget_beyond_all_nodes_gives_all_nodes() -> None:
    log_probs = [[-0.1, -2.0], [-0.2, -1.0], [-0.3, -inf]]
    trees = build_trees(make_request([log_probs], [1000]))
    assert trees.counts.tolist() == [2 + 4 + 4]
    assert all(t.dtype == torch.int32 for t in (trees.tokens, trees.parents, trees.depths, trees.counts))


def test_nothing_to_draft() -> None:
    assert build_trees(make_request([[[-0.1]]], [0])).tokens.shape == (1, 0)
    assert build_trees(make_request([[[-inf, -inf]]], [5])).counts.tolist() == [0]
    assert build_trees(make_request([[]], [5])).counts.tolist() == [0]
    assert build_trees(make_request([[[float("nan")]]], [5])).counts.tolist() == [0]


def test_automatic_budget_is_shared_over_the_batch_by_probability() -> None:
    sure, unsure = [[-0.01, -5.0]] * 4, [[-2.0, -2.1]] * 4
    costs = [10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.5, 40.0, 80.0, 160.0]
    request = make_request([sure, unsure, unsure], [AUTO_BUDGET, AUTO_BUDGET, 0], costs=costs)
    trees = build_trees(request)
    joint = sorted((node.log_prob for rows in (sure, unsure) for node in all_nodes(rows)), reverse=True)
    chosen = choose(np.exp(joint), 3, np.asarray(costs))
    assert int(trees.counts.sum()) == chosen == 4
    assert trees.counts.tolist() == [4, 0, 0], "the sure sequence gets what the unsure one would waste"


@no_deadline
@given(
    st.lists(candidate_lists(max_depth=3), min_size=1, max_size=3),
    st.lists(st.floats(0.1, 10), min_size=1, max_size=60),
    st.data(),
)
def test_automatic_budget_spends_what_choose_says_and_leaves_others_alone(
    lists: list[list[list[float]]], steps: list[float], data: st.DataObject
) -> None:
    lists = [[(row * 4)[:4] for row in (rows * 3)[:3]] for rows in lists]
    lists = [[sorted(row, reverse=True) for row in rows] for rows in lists]
    budgets = [data.draw(st.sampled_from([AUTO_BUDGET, 0, 3])) for _ in lists]
    costs = np.cumsum(np.asarray(steps, dtype=np.float32))
    trees = build_trees(make_request(lists, budgets, costs=costs.tolist()))
    wanted, open_nodes = [], []
    for index, (rows, budget) in enumerate(zip(lists, budgets, strict=True)):
        if budget == AUTO_BUDGET:
            open_nodes += [node.log_prob for node in all_nodes(as_float32(rows))]
        else:
            wanted += [(-node.log_prob, index, node.ranks) for node in best_nodes(as_float32(rows), budget)]
    kept = sorted(wanted)[: max(0, len(costs) - len(lists))]  # no more rows than there are costs for
    for index, budget in enumerate(budgets):
        if budget != AUTO_BUDGET:
            assert ranks_of(trees, index) == [ranks for _, owner, ranks in kept if owner == index]
    fixed = [-cost for cost, _, _ in kept]
    ordered = np.exp(np.sort(np.asarray(open_nodes))[::-1])
    chosen = choose(ordered, len(lists), costs, np.exp(np.asarray(fixed))) if open_nodes else 0
    assert int(trees.counts.sum()) == len(fixed) + chosen


def test_fixed_nodes_take_rows_before_the_automatic_ones() -> None:
    # Six rows cost nothing extra, the seventh a fortune: what is fixed leaves that much less to choose.
    sure, costs = [[-0.01, -9.0]] * 5, [10.0] * 6 + [1000.0] * 9
    for fixed in range(5):
        trees = build_trees(make_request([sure, sure], [fixed, AUTO_BUDGET], costs=costs))
        assert trees.counts.tolist() == [fixed, 4 - fixed]


def test_budgets_that_are_more_than_a_round_holds_share_what_it_holds() -> None:
    sure, unsure = [[-0.01, -5.0]] * 4, [[-2.0, -2.1]] * 4
    for rows, counts in ((2, [0, 0]), (5, [3, 0]), (6, [4, 0]), (9, [4, 3]), (20, [4, 4])):
        request = make_request([sure, unsure], [4, 4], costs=[1.0] * rows)
        assert build_trees(request).counts.tolist() == counts
    assert build_trees(make_request([sure, unsure], [4, 4])).counts.tolist() == [4, 4], (
        "without costs, no limit"
    )


def test_sequences_without_candidates_have_a_row_and_a_token_each() -> None:
    sure, costs = [[-0.01, -9.0]] * 5, [10.0] * 6 + [1000.0] * 9
    for others in range(5):
        request = replace(make_request([sure], [AUTO_BUDGET], costs=costs), others=others)
        assert build_trees(request).counts.tolist() == [5 - others]
        limited = replace(make_request([sure], [4], costs=costs[:6]), others=others)
        assert build_trees(limited).counts.tolist() == [min(4, 5 - others)]
    # Beside three tokens that come anyway, half a token is worth less than what it costs.
    costs = [10.0, 10.0, 10.0, 10.0, 12.0]
    assert build_trees(make_request([[[-0.7]]], [AUTO_BUDGET], costs=[10.0, 12.0])).counts.tolist() == [1]
    request = replace(make_request([[[-0.7]]], [AUTO_BUDGET], costs=costs), others=3)
    assert build_trees(request).counts.tolist() == [0]


def test_automatic_tree_grows_as_long_as_it_pays() -> None:
    wide = np.log(np.full((4, 5), 0.2)).tolist()
    trees = build_trees(make_request([wide], [AUTO_BUDGET], costs=[10.0] * 600))
    assert trees.counts.tolist() == [599]


def test_no_automatic_tree_outgrows_its_limit() -> None:
    wide, sure = [[-1.6, -1.7]] * 9, [[-0.01, -inf]] * 9
    request = make_request([wide, sure, sure], [AUTO_BUDGET, AUTO_BUDGET, 9], costs=[10.0] * 600)
    assert build_trees(replace(request, auto_limit=7)).counts.tolist() == [7, 7, 9]


def test_automatic_chain_stays_a_chain() -> None:
    log_probs = [[-0.5, -0.9]] * 4
    trees = build_trees(make_request([log_probs], [AUTO_BUDGET], chains=[True], costs=[10.0] * 20))
    assert ranks_of(trees, 0) == [(0,) * d for d in (1, 2, 3, 4)]


def test_bad_budgets_are_refused_with_field_rule_and_value() -> None:
    with pytest.raises(InvalidArgument, match=r"budgets\[1\] must be 0 or more, got -2"):
        build_trees(make_request([[[-1.0]], [[-1.0]]], [0, -2]))
    with pytest.raises(InvalidArgument, match="round_cost_ms must not be empty"):
        build_trees(make_request([[[-1.0]]], [AUTO_BUDGET]))


def test_nodes_of_a_large_tree_come_best_first() -> None:
    values = np.log(np.random.default_rng(0).dirichlet(np.full(64, 0.2), 15))
    request = make_request([(-np.sort(-values, axis=1)).tolist()], [64])
    trees = build_trees(request)
    assert trees.counts.tolist() == [64]
    assert all(a >= b for a, b in pairwise(_path_log_probs(request, trees)))


def _path_log_probs(request: TreeRequest, trees: TreeBatch) -> list[float]:
    return [
        sum(float(request.top_log_probs[0, depth, rank]) for depth, rank in enumerate(ranks))
        for ranks in ranks_of(trees, 0)
    ]
