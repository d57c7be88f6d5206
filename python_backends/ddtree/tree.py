"""Builds draft trees from a drafter's candidates: exactly the most probable nodes, best first.

The probability of a node is the product of the drafter's probabilities along its path from the root. Under
factorised marginals the `N` most probable nodes form a tree, and that tree has the greatest expected number
of accepted tokens of all trees with `N` nodes (DDTree, arXiv 2604.12989, section 3). A heap finds them one by
one: a node enters it when its parent or its better sibling leaves it, so nothing is scored that is not at the
edge of the tree.

A drafter that scores a token given its parent (DFlash 2) changes which candidates follow a node and in which
order, not the search: every node's children are still looked at best first, and none is more probable than
its parent. What cannot be said then is how few candidates suffice: a poor one may follow its parent best.

This module does not know who drafted, who verifies, or what a verified row costs: `budget` decides how many
nodes pay when a request leaves that open.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ddtree import budget
from ddtree.errors import InvalidArgument
from ddtree.types import AUTO_BUDGET, TreeBatch, TreeRequest

_Value = TypeVar("_Value")
_Table = list[list[list[_Value]]]  # [position][parent][rank]
_AUTO_STEP = 16  # nodes grown before the first look at whether growing on can still pay; then twice as many


def useful_width(nodes: int, depth_count: int) -> int:
    """Say how many candidates per draft position can matter for a tree of at most `nodes` nodes.

    A node with candidate ranks r_1..r_d (0 = best) is no more probable than any node whose ranks are
    component-wise at most its own, nor than the prefixes of those, so it can be among the best `nodes` only
    if Σ_{j≤d} Π_{i≤j} (r_i + 1) ≤ nodes. Position d therefore needs at most nodes - d + 1 candidates, and
    position 1 the most of all `depth_count` positions. With edges there is no such bound.
    """
    return nodes if depth_count > 0 else 0


def build_trees(request: TreeRequest) -> TreeBatch:
    """Build one tree per sequence, nodes in best-first order, so that parents precede children.

    Among equally probable nodes the one whose ranks come first in dictionary order is taken, a path before
    its continuations: the same request always gives the same trees, and a narrower candidate list gives the
    same tree as long as it is at least `useful_width` wide. Candidates of probability zero are never drafted,
    and a tree ends early when nothing else is left. Sequences with `AUTO_BUDGET` share one budget, spent
    where it is most probable to be accepted; so do all others when their budgets are more than a round holds.

    Args:
        request: candidates best first in each position, distinct unless their probability is zero.

    Returns:
        int32 tensors on the CPU, as wide as the largest tree.

    Raises:
        InvalidArgument: a budget below -1, an automatic one without round costs, or edges of another shape.
    """
    budgets: list[int] = request.budgets.tolist()
    _check(request, budgets)
    width = request.top_ids.shape[2]
    trees = [
        _Tree(children, order, width=1 if chain else width)
        for (children, order), chain in zip(_tables(request), request.is_chain.tolist(), strict=True)
    ]
    fixed = [index for index, nodes in enumerate(budgets) if nodes != AUTO_BUDGET]
    automatic = [index for index, nodes in enumerate(budgets) if nodes == AUTO_BUDGET]
    round_cost_ms = request.round_cost_ms.cpu().numpy()
    sequences = len(trees) + request.others
    most_nodes = max(0, len(round_cost_ms) - sequences) if len(round_cost_ms) else sum(budgets)
    frontier = _Frontier(trees, fixed, budgets)
    frontier.grow(most_nodes)
    if automatic:
        limits = [request.auto_limit or len(round_cost_ms)] * len(trees)
        open_frontier = _Frontier(trees, automatic, limits)
        _grow_while_it_pays(open_frontier, automatic, sequences, frontier.costs, round_cost_ms)
    return _pack(trees, request.top_ids.cpu().numpy())


def _check(request: TreeRequest, budgets: list[int]) -> None:
    for index, nodes in enumerate(budgets):
        if nodes < AUTO_BUDGET:
            raise InvalidArgument.of(
                f"budgets[{index}]", "must be 0 or more", nodes, f"or {AUTO_BUDGET} to have it chosen"
            )
    if AUTO_BUDGET in budgets and request.round_cost_ms.numel() == 0:
        raise InvalidArgument.of(
            "round_cost_ms", f"must not be empty with a budget of {AUTO_BUDGET}", [], "give measured costs"
        )
    size, depth, width = request.top_ids.shape
    edges, wanted = tuple(request.edge_log_probs.shape), (size, depth, width, width)
    if request.edge_log_probs.numel() and edges != wanted:
        raise InvalidArgument.of(
            "edge_log_probs", f"must have the shape {list(wanted)}", list(edges), "or no elements"
        )


def _tables(request: TreeRequest) -> list[tuple[_Table[float], _Table[int] | None]]:
    """Give each sequence's children per position and parent, best first: log-probabilities and candidates.

    Without edges one entry stands for all parents, and its candidates already stand in order.
    """
    if request.edge_log_probs.numel() == 0:
        return [(rows, None) for rows in request.top_log_probs.unsqueeze(2).tolist()]
    is_absent = (request.top_log_probs == -inf).unsqueeze(2)
    edges = request.edge_log_probs.masked_fill(is_absent, -inf)
    order = edges.neg().argsort(dim=-1, stable=True)  # negated: equals keep the candidates' order
    return list(zip(edges.gather(-1, order).tolist(), order.tolist(), strict=True))


class _Tree:
    """One growing tree; entry 0 of `costs` and `rows` is the root."""

    __slots__ = ("candidates", "children", "costs", "depths", "order", "parents", "rows", "width")

    def __init__(self, children: _Table[float], order: _Table[int] | None, width: int) -> None:
        self.children = children  # [D][parents][K]
        self.order = order
        self.width = width
        self.costs: list[float] = [0.0]  # minus the path's log-probability
        self.rows: list[int] = [0]  # which entry of a position's parents the node is to its children
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.candidates: list[int] = []

    def __len__(self) -> int:
        return len(self.parents)

    def cut(self, count: int) -> None:
        """Keep the first `count` nodes; a prefix of a best-first order is a tree."""
        del self.costs[count + 1 :], self.rows[count + 1 :]
        del self.parents[count:], self.depths[count:], self.candidates[count:]


class _Frontier:
    """The nodes just outside the trees of some sequences, and the joint order in which those trees grew."""

    def __init__(self, trees: Sequence[_Tree], members: Sequence[int], budgets: Sequence[int]) -> None:
        """Begin at the roots of `members`; `budgets` are the most nodes of each tree."""
        self._budgets = budgets
        self.owners: list[int] = []  # sequence of each node taken
        self.costs: list[float] = []  # minus log-probability of each node taken, ascending
        self.trees = trees
        # An entry is (cost, sequence, ranks, parent): ranks are unique within a sequence, so the comparison
        # never gets to the parent, and their order is the documented one among equals.
        self._heap: list[tuple[float, int, tuple[int, ...], int]] = []
        for index in members:
            children = trees[index].children
            if children and trees[index].width and children[0][0][0] > -inf:
                heappush(self._heap, (-children[0][0][0], index, (0,), 0))

    def grow(self, limit: int) -> bool:
        """Take nodes until `limit` are taken; say whether any are left."""
        heap = self._heap
        while heap and len(self.owners) < limit:
            cost, index, ranks, parent = heappop(heap)
            tree = self.trees[index]
            if len(tree) == self._budgets[index]:
                continue
            children, depth, rank = tree.children, len(ranks), ranks[-1]
            row = tree.rows[parent]
            candidate = rank if tree.order is None else tree.order[depth - 1][row][rank]
            own_row = 0 if tree.order is None else candidate
            siblings = children[depth - 1][row]
            tree.costs.append(cost)
            tree.rows.append(own_row)
            tree.parents.append(parent)
            tree.depths.append(depth)
            tree.candidates.append(candidate)
            self.owners.append(index)
            self.costs.append(cost)
            rank += 1
            if rank < tree.width and siblings[rank] > -inf:
                heappush(heap, (tree.costs[parent] - siblings[rank], index, (*ranks[:-1], rank), parent))
            if depth < len(children) and children[depth][own_row][0] > -inf:
                heappush(heap, (cost - children[depth][own_row][0], index, (*ranks, 0), len(tree)))
        return bool(heap)


def _grow_while_it_pays(
    frontier: _Frontier,
    automatic: Sequence[int],
    sequences: int,
    fixed_costs: list[float],
    round_cost_ms: NDArray[np.float32],  # [R]
) -> None:
    """Grow the automatic sequences' trees in their joint order to the node count `budget` chooses."""
    trees = frontier.trees
    fixed_probs = np.exp(-np.asarray(fixed_costs, dtype=np.float64))
    path_probs, some_left, step = np.empty(0), True, _AUTO_STEP
    while some_left and budget.may_pay(path_probs, sequences, round_cost_ms, fixed_probs):
        some_left = frontier.grow(len(frontier.owners) + step)
        step *= 2
        path_probs = np.exp(-np.asarray(frontier.costs, dtype=np.float64))
    count = budget.choose(path_probs, sequences, round_cost_ms, fixed_probs)
    kept = np.bincount(np.asarray(frontier.owners[:count], dtype=np.int64), minlength=len(trees))
    for index in automatic:
        trees[index].cut(int(kept[index]))


def _pack(
    trees: Sequence[_Tree],
    top_ids: NDArray[np.int32],  # [S, D, K]
) -> TreeBatch:
    counts = np.array([len(tree) for tree in trees], dtype=np.int32)
    shape = (len(trees), int(counts.max(initial=0)))
    tokens, parents, depths = (np.zeros(shape, dtype=np.int32) for _ in range(3))
    for index, tree in enumerate(trees):
        count = len(tree)
        parents[index, :count] = tree.parents
        depths[index, :count] = tree.depths
        tokens[index, :count] = top_ids[index, depths[index, :count] - 1, tree.candidates]
    return TreeBatch(
        tokens=torch.from_numpy(tokens),
        parents=torch.from_numpy(parents),
        depths=torch.from_numpy(depths),
        counts=torch.from_numpy(counts),
    )
