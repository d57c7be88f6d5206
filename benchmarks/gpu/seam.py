"""What the benchmark asks of whoever runs a round, and who there is.

A bench is opened over a pair of models at a fixed context length and batch. Every method may be called again
and again and does the same work each time: what it changes, it or the next call puts back. This is the one
place that names the product's ways of running a round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from benchmarks.gpu.eager import EagerRound
from benchmarks.gpu.placement import Placement
from benchmarks.gpu.shapes import RandomPair


class RoundBench(Protocol):
    """One way of running rounds, at a fixed place."""

    def plain(self) -> None:
        """One step of plain decoding: one row a sequence, its token, its commit."""

    def verify(self, nodes: int) -> None:
        """The target's forward over root and `nodes` draft nodes a sequence, and the token of every row."""

    def draft(self) -> None:
        """One draft: new context taken in, the block's forward, the best 64 candidates of each position."""

    def build(self, nodes: int) -> None:
        """Trees of `nodes` nodes from the candidates of the last draft."""

    def settle(self, nodes: int) -> None:
        """Acceptance walk and commit after the last `verify`, which must have had as many nodes."""

    def round(self, nodes: int) -> None:
        """A whole round; the accepted tokens are on the host when it returns."""


@dataclass(frozen=True)
class Way:
    """A way of running rounds, by what is shown of it."""

    title: str
    open: Callable[[RandomPair, Placement], RoundBench]


# The last one that opens is what the summary is taken from.
WAYS: Mapping[str, Way] = {"eager": Way("stage objects, PyTorch's operators", EagerRound)}
