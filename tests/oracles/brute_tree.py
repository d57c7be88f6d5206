"""The best draft tree by listing every path there is."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import inf


@dataclass(frozen=True)
class PathNode:
    """A node, named by the candidate ranks on its path."""

    ranks: tuple[int, ...]
    log_prob: float


def all_nodes(log_probs: list[list[float]]) -> list[PathNode]:
    """List every path of every depth, most probable first, equals in dictionary order of their ranks."""
    nodes = []
    for depth in range(1, len(log_probs) + 1):
        for ranks in product(*(range(len(row)) for row in log_probs[:depth])):
            log_prob = 0.0
            for row, rank in zip(log_probs, ranks, strict=False):
                log_prob += row[rank]
            if log_prob > -inf:
                nodes.append(PathNode(ranks, log_prob))
    return sorted(nodes, key=lambda node: (-node.log_prob, node.ranks))


def best_nodes(log_probs: list[list[float]], budget: int) -> list[PathNode]:
    """Give the `budget` most probable nodes in order."""
    return all_nodes(log_probs)[:budget]


def conditioned_nodes(
    edges: list[list[list[float]]],  # [D][K parents][K children]
    is_there: list[list[bool]],  # [D][K]
) -> list[PathNode]:
    """List every path of children scored given their parent, most probable first; names are candidates."""
    nodes = []
    for depth in range(1, len(edges) + 1):
        for path in product(*(range(len(row[0])) for row in edges[:depth])):
            log_prob, parent = 0.0, 0
            for position, child in enumerate(path):
                log_prob += edges[position][parent][child] if is_there[position][child] else -inf
                parent = child
            if log_prob > -inf:
                nodes.append(PathNode(path, log_prob))
    return sorted(nodes, key=lambda node: -node.log_prob)
