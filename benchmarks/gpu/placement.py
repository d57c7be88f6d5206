"""Where a round is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """How much stands behind a round."""

    context: int  # committed tokens of each sequence
    batch: int = 1
    most_nodes: int = 256  # draft nodes of the largest tree that will be asked for
