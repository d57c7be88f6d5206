"""Trees of several sequences in one forward: each row's logits are those of its sequence alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddtree.staging import stage
from ddtree.types import PrefillRequest, SessionBatch, TreeBatch
from tests.fakes.pipeline import make_verifier

LENGTH = 9
# Trees of one size, whose masks differ all the same: a chain, a star, two branches, a late fork.
PARENTS = ([0, 1, 2, 3], [0, 0, 0, 0], [0, 0, 1, 2], [0, 1, 2, 2])


def depths_of(parents: list[int]) -> list[int]:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths[1:]


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_sequences_of_one_length_with_trees_of_one_size(tiny_target: Path, order: tuple[int, ...]) -> None:
    verifier = make_verifier(tiny_target)
    generator = torch.Generator().manual_seed(4)
    prompts = torch.randint(0, 256, (4, LENGTH), generator=generator).int()
    tokens = torch.randint(0, 256, (4, 5), generator=generator)  # the root and its four nodes
    sessions = SessionBatch(torch.arange(4), ints([0] * 4), ints([0] * 4))
    verifier.prefill(PrefillRequest(sessions, prompts.flatten(), ints([LENGTH] * 4), ints([32] * 4)))
    held = list(verifier.sessions)

    def logits_of(rows: list[int]) -> torch.Tensor:
        parents = [PARENTS[row] for row in rows]
        trees = TreeBatch(
            tokens[rows, 1:].int(),
            ints(parents),
            ints([depths_of(p) for p in parents]),
            ints([4] * len(rows)),
        )
        with torch.inference_mode():
            roots = tokens[rows, 0].tolist()
            staged = stage(verifier.target, verifier.pool, [held[row] for row in rows], trees, roots)
        return staged.step.logits

    packed = logits_of(list(order)).reshape(4, 5, -1)
    for place, row in enumerate(order):
        torch.testing.assert_close(packed[place], logits_of([row]), rtol=1e-4, atol=1e-4)
