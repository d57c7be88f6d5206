"""Acceptance length of drafts by replaying answers that the target has given.

Sample-and-match accepts exactly the drafted tokens that the target emits, so for a given answer the rounds
can be replayed without the target: draft, build the tree, follow the answer. Trees are the product's own
(`ddtree.tree`). This module does not know what drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ddtree.tree import build_trees
from ddtree.types import DraftResult, TreeRequest


@dataclass(frozen=True)
class Answer:
    """One answer to replay."""

    ids: torch.Tensor  # [n] prompt and answer
    answer_start: int


@dataclass(frozen=True)
class Candidates:
    """What was drafted at every anchor of one answer; anchor i is token `answer_start + i`."""

    top_ids: torch.Tensor  # [anchors, D, K] int32
    top_log_probs: torch.Tensor  # [anchors, D, K] float32


# Drafts for some answers, in the order of the mapping: from an answer's index to the place of its root token,
# counted from the answer's start. Places of an answer only grow from call to call.
DraftAt = Callable[[Mapping[int, int]], DraftResult]


@dataclass(frozen=True)
class Acceptance:
    """Emitted tokens (the first, which prefill gives, is not counted) and rounds."""

    emitted: int
    rounds: int

    @property
    def length(self) -> float:
        """Acceptance length τ."""
        return self.emitted / max(1, self.rounds)

    @classmethod
    def pooled(cls, parts: Sequence[Acceptance]) -> Acceptance:
        """All tokens and all rounds."""
        return cls(sum(part.emitted for part in parts), sum(part.rounds for part in parts))


def replay(
    answers: Sequence[Answer],
    drafts: Sequence[Candidates],
    budget: int | None,  # None: a chain
) -> Acceptance:
    """Replay all answers with what was drafted at every token of theirs; pooled."""

    def look_up(at: Mapping[int, int]) -> DraftResult:
        return DraftResult(
            torch.zeros(len(at), dtype=torch.int32),
            torch.stack([drafts[index].top_ids[place] for index, place in at.items()]),
            torch.stack([drafts[index].top_log_probs[place] for index, place in at.items()]),
        )

    return Acceptance.pooled(replay_each(answers, look_up, budget))


def replay_each(
    answers: Sequence[Answer],
    draft_at: DraftAt,
    budget: int | None,  # None: a chain
) -> list[Acceptance]:
    """Replay all answers side by side, one round at a time; what each of them accepted."""
    emitted, rounds = [0] * len(answers), [0] * len(answers)
    at = {index: 0 for index, answer in enumerate(answers) if len(answer.ids) - answer.answer_start > 1}
    while at:
        drafted = draft_at(at)
        depth, edges = drafted.top_ids.shape[1], drafted.edge_log_probs
        nodes = depth if budget is None else budget
        trees = build_trees(
            TreeRequest(
                drafted.top_ids[..., :nodes],
                drafted.top_log_probs[..., :nodes],
                torch.full((len(at),), nodes, dtype=torch.int32),
                torch.full((len(at),), budget is None),
                torch.zeros(0),
                edges[..., :nodes, :nodes] if edges.numel() else edges,
            )
        )
        tokens, parents = trees.tokens.numpy(), trees.parents.numpy()
        for row, index in enumerate([*at]):
            answer = answers[index]
            ahead = answer.ids[answer.answer_start + at[index] + 1 :].tolist()
            count = int(trees.counts[row])
            accepted = _follow(tokens[row, :count], parents[row, :count], ahead)
            step = min(accepted + 1, len(ahead))  # a stop inside the path must not inflate the length
            emitted[index], rounds[index] = emitted[index] + step, rounds[index] + 1
            at[index] += step
            if step == len(ahead):
                del at[index]
    return [Acceptance(*each) for each in zip(emitted, rounds, strict=True)]


def _follow(tokens: np.ndarray, parents: np.ndarray, ahead: Sequence[int]) -> int:  # type: ignore[type-arg]
    """Count the nodes on the path that the answer's next tokens take from the root."""
    children = {
        (int(parent), int(token)): node + 1
        for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))
    }
    node = accepted = 0
    for token in ahead:
        step = children.get((node, int(token)))
        if step is None:
            break
        node, accepted = step, accepted + 1
    return accepted
