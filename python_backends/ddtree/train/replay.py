"""Acceptance length of a drafter by replaying answers that the target has given.

Sample-and-match accepts exactly the drafted tokens that the target emits, so for a given answer the rounds
can be replayed without the target: draft, build the tree, follow the answer. All anchors of an answer are
drafted at once, then the rounds visit those they need. Trees are the product's own (`ddtree.tree`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ddtree.train.batches import Batch
from ddtree.train.train import Trainer
from ddtree.tree import build_trees
from ddtree.types import TreeRequest

_ROWS_AT_ONCE = 2048  # through the output head
_ANCHORS_AT_ONCE = 128  # of one sequence


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


@torch.no_grad()
def draft_everywhere(trainer: Trainer, answer: Answer, width: int) -> Candidates:
    """Draft at every token of an answer but the last."""
    first, last = answer.answer_start, len(answer.ids) - 1
    anchors = torch.arange(first, last)
    block = trainer.draft.config.block_size
    ids, log_probs = [], []
    for some in anchors.split(_ANCHORS_AT_ONCE):
        labels = torch.zeros(1, len(some), block - 1, dtype=torch.int64)
        hidden = trainer.hidden_of(Batch(answer.ids[None].long(), some[None], labels))
        for rows in hidden[0, :, 1:].reshape(-1, hidden.shape[-1]).split(_ROWS_AT_ONCE):
            logits = (rows @ trainer.head.T).float()
            top, top_ids = logits.topk(min(width, logits.shape[-1]), -1)
            ids.append(top_ids.int().cpu())
            log_probs.append((top - logits.logsumexp(-1, keepdim=True)).cpu())
    shape = (len(anchors), block - 1, -1)
    if not ids:
        empty = torch.zeros(0, block - 1, width)
        return Candidates(empty.int(), empty)
    return Candidates(torch.cat(ids).view(shape), torch.cat(log_probs).view(shape))


@dataclass(frozen=True)
class Acceptance:
    """Emitted tokens (the first, which prefill gives, is not counted) and rounds, pooled over answers."""

    emitted: int
    rounds: int

    @property
    def length(self) -> float:
        """Acceptance length τ."""
        return self.emitted / max(1, self.rounds)


def replay(
    answers: Sequence[Answer],
    drafts: Sequence[Candidates],
    budget: int | None,  # None: a chain
) -> Acceptance:
    """Replay all answers side by side, one round at a time."""
    emitted = rounds = 0
    # Where each answer's root token stands, counted from the answer's start.
    at = {index: 0 for index, answer in enumerate(answers) if len(answer.ids) - answer.answer_start > 1}
    while at:
        members = list(at)
        top_ids = torch.stack([drafts[index].top_ids[at[index]] for index in members])
        log_probs = torch.stack([drafts[index].top_log_probs[at[index]] for index in members])
        depth = top_ids.shape[1]
        nodes = depth if budget is None else budget
        trees = build_trees(
            TreeRequest(
                top_ids[..., :nodes],
                log_probs[..., :nodes],
                torch.full((len(members),), nodes, dtype=torch.int32),
                torch.full((len(members),), budget is None),
                torch.zeros(0),
            )
        )
        tokens, parents = trees.tokens.numpy(), trees.parents.numpy()
        for row, index in enumerate(members):
            answer = answers[index]
            ahead = answer.ids[answer.answer_start + at[index] + 1 :].tolist()
            count = int(trees.counts[row])
            accepted = _follow(tokens[row, :count], parents[row, :count], ahead)
            step = min(accepted + 1, len(ahead))  # a stop inside the path must not inflate the length
            emitted, rounds = emitted + step, rounds + 1
            at[index] += step
            if step == len(ahead):
                del at[index]
    return Acceptance(emitted, rounds)


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
