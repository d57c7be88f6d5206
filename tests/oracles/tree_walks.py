"""Walks over one draft tree, node by node, from parent pointers alone."""

from __future__ import annotations

from dataclasses import dataclass


def ancestors_and_self(parents: list[int], node: int) -> set[int]:
    """Follow the parents up to the root; `parents[i]` belongs to node i + 1."""
    seen = {node}
    while node != 0:
        node = parents[node - 1]
        seen.add(node)
    return seen


@dataclass(frozen=True)
class WalkResult:
    """The accepted path, root not included, and the token after it."""

    nodes: list[int]
    tokens: list[int]
    bonus: int


def follow_target(tokens: list[int], parents: list[int], target_tokens: list[int]) -> WalkResult:
    """Go from the root to the child that holds the target's token until there is none."""
    children: dict[int, dict[int, int]] = {}
    for column, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        assert token not in children.setdefault(parent, {}), "two children with one token"
        children[parent][token] = column + 1
    node, nodes = 0, []
    while target_tokens[node] in children.get(node, {}):
        node = children[node][target_tokens[node]]
        nodes.append(node)
    return WalkResult(nodes, [tokens[i - 1] for i in nodes], target_tokens[node])
