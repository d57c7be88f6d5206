"""Takes out of draft trees what a sequence's grammar forbids, before the target sees it.

Node order is best first, so the first nodes that survive are the best tree within the grammar. This module
knows the trees and the matchers, not who built or verifies them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ddtree.grammar import Matcher
from ddtree.sampling import SamplerState
from ddtree.types import TreeBatch

_LOG = logging.getLogger(__name__)


def prune(trees: TreeBatch, roots: Sequence[int], states: Sequence[SamplerState | None]) -> TreeBatch:
    """Keep the nodes whose whole path the grammar allows, at most `max_nodes` of the sequence's settings.

    Args:
        trees: best first, one per state.
        roots: root tokens, not yet pushed to the states.
        states: only those with a matcher have their trees changed.

    Returns:
        Trees on the device of `trees`; the very same object when no state has a matcher.
    """
    matchers = {
        index: (state.matcher, state.spec.max_nodes)
        for index, state in enumerate(states)
        if state is not None and state.matcher is not None
    }
    if not matchers:
        return trees
    rows = [field.tolist() for field in (trees.tokens, trees.parents, trees.depths)]
    counts = trees.counts.tolist()
    kept = TreeBatch(trees.tokens.clone(), trees.parents.clone(), trees.depths.clone(), trees.counts.clone())
    for index, (matcher, max_nodes) in matchers.items():
        tokens, parents, depths = (field[index][: counts[index]] for field in rows)
        try:
            root = matcher.fork()
            root.advance([roots[index]])
            nodes, new_parents = _allowed_nodes(root, tokens, parents, max_nodes)
        except Exception:  # noqa: BLE001 - without drafts the answer is right as well
            _LOG.exception("a draft tree is left out, its grammar cannot be asked")
            nodes, new_parents = [], []
        for field, values in (
            (kept.tokens, [tokens[node] for node in nodes]),
            (kept.parents, new_parents),
            (kept.depths, [depths[node] for node in nodes]),
        ):
            field[index] = 0
            field[index, : len(nodes)] = torch.tensor(values, dtype=field.dtype)
        kept.counts[index] = len(nodes)
    width = int(kept.counts.max())
    return TreeBatch(kept.tokens[:, :width], kept.parents[:, :width], kept.depths[:, :width], kept.counts)


def _allowed_nodes(
    root: Matcher, tokens: Sequence[int], parents: Sequence[int], most: int
) -> tuple[list[int], list[int]]:
    """Columns of the nodes to keep, and their parents among those kept."""
    at: dict[int, tuple[int, Matcher]] = {0: (0, root)}  # old node: (new node, matcher standing there)
    columns: list[int] = []
    new_parents: list[int] = []
    for column, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if len(columns) == most:
            break
        if parent not in at:
            continue
        new_parent, matcher = at[parent]
        child = matcher.fork()
        if child.advance([token]):
            columns.append(column)
            new_parents.append(new_parent)
            at[column + 1] = (len(columns), child)
    return columns, new_parents
