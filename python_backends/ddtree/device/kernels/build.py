"""Builds draft trees on the device: the nodes that `tree.build_trees` takes on the host, in the same order.

One program grows one tree. What may be taken next is at most one child of each node taken so far, the best
that is left, so the frontier has a slot per node and a slot's number is its entry's parent:

    slot    0 (root)   1          2          …       each: path cost of the entry, its rank among siblings
    entry   (0, 1)     (0, 0)     closed             names are the ranks on the path; (0) was taken as node 1

A step takes the cheapest entry, puts its next sibling into its slot and its first child into the slot of the
node it became. Both come where it stood in dictionary order, child before sibling, since whatever lies
between them would have to be its descendant: so a small number that keeps that order settles ties as the
host does. Costs are summed in float64, parent first, as the host sums them: results are equal, not close.

An automatic budget is no budget to this module, and it knows neither drafters nor what a row costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ddtree.device.trees import DeviceTrees

# An entry as one int32, highest bits first: place in dictionary order, slot (8 bits), depth of the slot's
# node (6), rank (8). The least of the cheapest entries' numbers is then at once the one to take and all
# that is to be known of it.
_ORDER = tl.constexpr(1 << 22)
_SLOT_SHIFT = tl.constexpr(14)
_DEPTH_SHIFT = tl.constexpr(8)
_BYTE = tl.constexpr(255)
_DEPTH_MASK = tl.constexpr(63)
_NEVER = tl.constexpr(0x7FFFFFFF)  # more than any entry's number
_SIGN = tl.constexpr(-0x80000000)
_NOT_SIGN = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_LOWER = tl.constexpr(0xFFFFFFFF)

_WARP = 32  # entries at least: a minimum over a part of a warp is slower than over all of it
_MOST_NODES = 256
_MOST_DEPTH = 62


@triton.jit
def _least(cost):
    """The least of float64 numbers among which is neither NaN nor -0.0.

    It is found as two whole numbers, upper and lower half: the least of 32-bit whole numbers takes a warp one
    instruction, that of floating-point numbers five rounds of exchange, and every step of the search waits.
    """
    bits = cost.to(tl.int64, bitcast=True)
    bits ^= (bits >> 63) & _NOT_SIGN  # negative numbers come in reverse
    upper, lower = (bits >> 32).to(tl.int32), bits.to(tl.int32) ^ _SIGN  # as unsigned
    least_upper = tl.min(upper, axis=0)
    least_lower = tl.min(tl.where(upper == least_upper, lower, _NEVER), axis=0)
    least = (least_upper.to(tl.int64) << 32) | ((least_lower ^ _SIGN).to(tl.int64) & _LOWER)
    least ^= (least >> 63) & _NOT_SIGN
    return least.to(tl.float64, bitcast=True)


@triton.jit
def _around(
    scores, order, own, parent_row, depth, rank, width, end, fan, candidates, HAS_EDGES: tl.constexpr
):  # fmt: skip
    """The entry's candidate, and what its next sibling and its first child add: -inf where there is none."""
    siblings = own + (depth * fan + parent_row) * candidates + rank
    candidate = rank
    children_row = parent_row  # one list for all parents
    if HAS_EDGES:
        candidate = tl.load(order + siblings)
        children_row = candidate
    children = own + ((depth + 1) * fan + children_row) * candidates
    beside = tl.load(scores + siblings + 1, mask=rank + 1 < width, other=float("-inf"))
    below = tl.load(scores + children, mask=depth + 1 < end, other=float("-inf"))
    return candidate, beside.to(tl.float64), below.to(tl.float64)


@triton.jit(do_not_specialize=["positions", "candidates", "nodes"])
def _build_kernel(
    scores, order, top_ids, budgets, deepest, is_chain, tokens, parents, depths, counts, log_probs,
    positions, candidates, nodes,
    HAS_EDGES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    slot = tl.arange(0, WIDTH)
    budget = tl.minimum(tl.load(budgets + sequence), nodes)
    end = tl.minimum(tl.load(deepest + sequence), positions)
    width = tl.where(tl.load(is_chain + sequence) != 0, 1, candidates)
    fan = candidates if HAS_EDGES else 1  # lists of children per position
    own = sequence.to(tl.int64) * positions * fan * candidates
    infinite = tl.full((WIDTH,), float("inf"), tl.float64)

    first = tl.load(scores + own, mask=(end > 0) & (candidates > 0), other=float("-inf")).to(tl.float64)
    base = tl.zeros((WIDTH,), tl.float64)  # path cost of each slot's node
    first_cost = tl.where(first > float("-inf"), base - first, infinite)
    cost = tl.where(slot == 0, first_cost, infinite)
    entry = slot << _SLOT_SHIFT
    row = tl.zeros((WIDTH,), tl.int32)  # list that each slot's node's children stand in
    taken = tl.zeros((WIDTH,), tl.int32)  # by column: parent, depth and candidate
    paid = infinite  # by column: path cost
    count = tl.min(entry, axis=0)  # zero, of the type that a loop carries
    cheapest = _least(cost)
    while (count < budget) & (cheapest < float("inf")):
        chosen = tl.min(tl.where(cost == cheapest, entry, _NEVER), axis=0)
        parent = (chosen >> _SLOT_SHIFT) & _BYTE
        depth = (chosen >> _DEPTH_SHIFT) & _DEPTH_MASK
        parent_row = tl.sum(tl.where(slot == parent, row, 0), axis=0) if HAS_EDGES else 0
        candidate, beside, below = _around(
            scores, order, own, parent_row, depth, chosen & _BYTE, width, end, fan, candidates, HAS_EDGES
        )
        here = (parent << _SLOT_SHIFT) | ((depth + 1) << _DEPTH_SHIFT) | candidate
        taken = tl.where(slot == count, here, taken)
        paid = tl.where(slot == count, cheapest, paid)

        count += 1
        is_parent, is_new = slot == parent, slot == count
        beside_cost = tl.where(beside > float("-inf"), base - beside, infinite)
        below_cost = tl.where(below > float("-inf"), cheapest - below, infinite)
        cost = tl.where(is_parent, beside_cost, tl.where(is_new, below_cost, cost))
        base = tl.where(is_new, cheapest, base)
        row = tl.where(is_new, candidate, row)
        child = (chosen & -_ORDER) | (count << _SLOT_SHIFT) | ((depth + 1) << _DEPTH_SHIFT)
        others = tl.where(entry > chosen, entry + _ORDER, entry)
        entry = tl.where(is_parent, chosen + _ORDER + 1, tl.where(is_new, child, others))
        cheapest = _least(cost)

    depth_at = (taken >> _DEPTH_SHIFT) & _DEPTH_MASK
    at = (sequence * positions + depth_at - 1) * candidates + (taken & _BYTE)
    out, is_inside = sequence * nodes + slot, slot < nodes
    tl.store(tokens + out, tl.load(top_ids + at, mask=slot < count, other=0), mask=is_inside)
    tl.store(parents + out, taken >> _SLOT_SHIFT, mask=is_inside)
    tl.store(depths + out, depth_at, mask=is_inside)
    tl.store(log_probs + out, (0.0 - paid).to(tl.float32), mask=is_inside)
    tl.store(counts + sequence, count)


@triton.jit(do_not_specialize=["candidates"])
def _sort_kernel(edges, top_log_probs, scores, order, candidates, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # of one position and one parent
    child = tl.arange(0, WIDTH)
    is_child = child < candidates
    edge = edges + row * candidates
    unary = top_log_probs + row // candidates * candidates
    value = tl.load(edge + child, mask=is_child, other=float("-inf"))
    there = tl.load(unary + child, mask=is_child, other=float("-inf"))
    value = tl.where((value > float("-inf")) & (there != float("-inf")), value, float("-inf"))
    before = tl.zeros((WIDTH,), tl.int32)
    for index in range(candidates):
        other, other_there = tl.load(edge + index), tl.load(unary + index)
        other = tl.where((other > float("-inf")) & (other_there != float("-inf")), other, float("-inf"))
        before += ((other > value) | ((other == value) & (index < child))).to(tl.int32)
    tl.store(scores + row * candidates + before, value, mask=is_child)
    tl.store(order + row * candidates + before, child, mask=is_child)


@dataclass(frozen=True)
class _Children:
    """Children of each position and parent, best first; without edges one list stands for all parents."""

    scores: torch.Tensor  # [S, D, K or 1, K] float32
    candidates: torch.Tensor  # as scores, int32; not read where there are no edges


def build(
    top_ids: torch.Tensor,  # [S, D, K] int32
    top_log_probs: torch.Tensor,  # [S, D, K] float32
    budgets: torch.Tensor,  # [S] int32
    depths: torch.Tensor,  # [S] int32
    is_chain: torch.Tensor,  # [S] bool or int32
    nodes: int,
    edge_log_probs: torch.Tensor | None = None,  # [S, D, K, K] float32
    into: DeviceTrees | None = None,
) -> DeviceTrees:
    """Build one tree per sequence: the nodes of `tree.build_trees`, in its order; one launch, two with edges.

    Args:
        top_ids: candidates, at most 256 for each of at most 62 positions.
        top_log_probs: best first in each position unless there are edges; -inf and NaN are never drafted.
        budgets: most nodes of each tree; negative ones count as none, and none is above `nodes`.
        depths: deepest node that each sequence may still emit; below 1: none.
        is_chain: whether only the best child of each node counts.
        nodes: N of the result, at most 256.
        edge_log_probs: of a child given its parent, by candidate; at the first position row 0 is the root's.
        into: where the trees are written and what is returned; new tensors when absent.
    """
    places, positions, candidates = top_ids.shape
    trees = DeviceTrees.unwritten(places, nodes, top_ids.device) if into is None else into
    assert trees.tokens.shape == (places, nodes), f"no room for {places} trees of {nodes} nodes"
    assert nodes <= _MOST_NODES, f"a tree built on the device has at most {_MOST_NODES} nodes, not {nodes}"
    assert candidates <= _MOST_NODES, f"at most {_MOST_NODES} candidates per position, not {candidates}"
    assert positions <= _MOST_DEPTH, f"at most {_MOST_DEPTH} draft positions, not {positions}"
    children = _children(top_log_probs.contiguous(), edge_log_probs)
    chains = is_chain.view(torch.uint8) if is_chain.dtype == torch.bool else is_chain
    _build_kernel[(places,)](
        children.scores, children.candidates, top_ids.contiguous(), budgets, depths, chains,
        trees.tokens, trees.parents, trees.depths, trees.counts, trees.log_probs,
        positions, candidates, nodes,
        HAS_EDGES=edge_log_probs is not None, WIDTH=max(_WARP, triton.next_power_of_2(nodes)), num_warps=1,
    )  # fmt: skip
    return trees


def _children(top_log_probs: torch.Tensor, edge_log_probs: torch.Tensor | None) -> _Children:
    if edge_log_probs is None:
        return _Children(top_log_probs, top_log_probs)
    edges = edge_log_probs.contiguous()
    scores, order = torch.empty_like(edges), torch.empty_like(edges, dtype=torch.int32)
    places, positions, candidates = top_log_probs.shape
    _sort_kernel[(places * positions * candidates,)](
        edges, top_log_probs, scores, order, candidates,
        WIDTH=triton.next_power_of_2(candidates), num_warps=1,
    )  # fmt: skip
    return _Children(scores, order)
