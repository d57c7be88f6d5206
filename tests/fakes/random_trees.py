"""Random draft trees as parents of nodes 1, 2, …; node 0 is the root and a parent precedes its children."""

from __future__ import annotations

import random

import torch


def random_parents(source: random.Random, nodes: int, *, reach: int | None = None) -> list[int]:
    """Parents of a tree; with a small `reach` nodes hang from recent ones, and the tree grows deep."""
    return [source.randrange(max(0, node - reach) if reach else 0, node + 1) for node in range(nodes)]


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to a node, both included."""
    path = [node]
    while path[-1]:
        path.append(parents[path[-1] - 1])
    return path[::-1]


def depths_of(parents: list[int]) -> list[int]:
    """Depth of the root and of every node."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


def sees_of(parents: list[int]) -> torch.Tensor:
    """Who sees whom, `[nodes + 1, nodes + 1]` bool, by walking up from every node."""
    sees = torch.zeros((len(parents) + 1,) * 2, dtype=torch.bool)
    for node in range(len(parents) + 1):
        sees[node, path_to(parents, node)] = True
    return sees
