"""Which cache rows of a verified tree stay, in the terms of TensorRT-LLM's relocation.

After a tree step a request's cache holds, as half-open intervals of positions:

    [0, base)                committed before
    [base, base + 1)         the root: it stays where it is
    [base + 1, base + N)     the draft nodes, in node order, padding last

The accepted path must become `[base + 1, base + 1 + accepted)`. The engine is told the path's *draft indices*
(node index - 1, the root not counted) and copies index k of the list to draft slot k. Nodes are numbered with
parents before children, so the indices ascend and never lie below their place: copying them one after another
in that order never overwrites a row that is still to be read, and neither does reading all of them first.
What is left behind the path is dropped by the next step, which says a smaller committed length.

Pure functions; this module knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Move:
    """One cache row of a request, all layers, by positions in the request."""

    source: int
    destination: int


def draft_indices(path: Sequence[int]) -> tuple[int, ...]:
    """Give the draft indices of an accepted path of node indices, root (0) first.

    Nodes ascend along a path; asserted, since the engine's copy may rely on it.
    """
    assert path[0] == 0, f"a path starts at the root, got {list(path)}"
    assert all(low < high for low, high in pairwise(path)), (
        f"parents come before children, got the path {list(path)}"
    )
    return tuple(node - 1 for node in path[1:])


def moves(base: int, indices: Sequence[int]) -> tuple[Move, ...]:
    """Give the row copies of one request in the order in which they may be done one by one.

    Args:
        base: position of the root.
        indices: draft indices of the accepted path.
    """
    return tuple(
        Move(base + 1 + index, base + 1 + place) for place, index in enumerate(indices) if index != place
    )
