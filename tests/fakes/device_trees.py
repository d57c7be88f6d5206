"""Trees of plain lists as device tensors whose padding is poisoned."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ddtree.device.trees import DeviceTrees
from tests.fakes.device import DEVICE
from tests.fakes.random_trees import depths_of, random_parents


@dataclass(frozen=True)
class ListTree:
    """Tokens and parents of a tree's nodes 1, 2 and so on."""

    tokens: list[int]
    parents: list[int]

    @classmethod
    def random(cls, source: random.Random, nodes: int, reach: int | None = None) -> ListTree:
        """A tree whose siblings have different tokens; half of the nodes have token 0."""
        parents = random_parents(source, nodes, reach=reach)
        return cls([parents[:node].count(parent) for node, parent in enumerate(parents)], parents)


def on_device(trees: Sequence[ListTree], nodes: int, fill: int) -> DeviceTrees:
    """Trees with room for `nodes` nodes each; `fill` stands in tokens, parents and depths of padding."""

    def rows(lists: Sequence[list[int]]) -> torch.Tensor:
        padded = [values + [fill] * (nodes - len(values)) for values in lists]
        return torch.tensor(padded, dtype=torch.int32, device=DEVICE).reshape(len(lists), nodes)

    return DeviceTrees(
        tokens=rows([tree.tokens for tree in trees]),
        parents=rows([tree.parents for tree in trees]),
        depths=rows([depths_of(tree.parents)[1:] for tree in trees]),
        counts=torch.tensor([len(tree.parents) for tree in trees], dtype=torch.int32, device=DEVICE),
        log_probs=torch.full((len(trees), nodes), torch.nan, device=DEVICE),
    )


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that is allocated and not written holds NaN, or the largest number, and not zeros by chance."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
