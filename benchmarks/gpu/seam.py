"""What the benchmark asks of whoever runs a round, and who there is.

A bench is opened over a pair of models at a fixed context length and batch. Every method may be called again
and again and does the same work each time: what it changes, it puts back or the next call overwrites. This is
the one place that names the product's ways of running a round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from benchmarks.gpu.eager import EagerRound
from benchmarks.gpu.placement import Placement
from benchmarks.gpu.shapes import RandomPair


class RoundBench(Protocol):
    """One way of running rounds, at a fixed place."""

    def plain(self) -> Mapping[str, float]:
        """One step of plain decoding: one row a sequence, its token on the host, its commit.

        Returns:
            `verify`: milliseconds that the device took.
        """

    def verify(self, nodes: int) -> torch.Tensor:
        """The target's forward over root and `nodes` draft nodes of each of `S` sequences.

        Returns:
            The token of every row, `[S, nodes + 1]`.
        """

    def round(self, nodes: int) -> Mapping[str, float]:
        """A whole round; the accepted tokens are on the host when it returns.

        Returns:
            Milliseconds that the device took: `draft`, with the best candidates of each position; `build`;
            `verify`, with walk and commit.
        """


@dataclass(frozen=True)
class Way:
    """A way of running rounds, by what is shown of it."""

    title: str
    open: Callable[[RandomPair, Placement], RoundBench]
    prepare: Callable[[RandomPair], object] | None = None  # once per pair; what it does to the models stays
    needs_gpu: bool = True


def _on_device(pair: RandomPair, place: Placement) -> RoundBench:
    # Its kernels are imported where they run: not every installation has Triton's language.
    from benchmarks.gpu.on_device import DeviceRound

    return DeviceRound(pair, place)


def _fused(pair: RandomPair, place: Placement) -> RoundBench:
    from benchmarks.gpu.on_device import DeviceRound

    return DeviceRound(pair, place, is_fused=True)


def _fuse(pair: RandomPair) -> None:
    from benchmarks.gpu.on_device import fuse_target

    fuse_target(pair)


# In this order; the last one that runs is what the summary is taken from.
WAYS: Mapping[str, Way] = {
    "eager": Way("stage objects, PyTorch's operators", EagerRound, needs_gpu=False),
    "graphs": Way("whole rounds on the device, as captured graphs", _on_device),
    "fused": Way("the same with fused layers and measured products", _fused, prepare=_fuse),
}
