"""Whether a type drafts as well as another: both drafted along one text, and compared prompt by prompt.

Decoding freely, two types soon write different texts, and how many tokens a round gives depends on the text
far more than on the type. So the answers of one type are replayed in both (`ddtree.train.replay`): the target
reads an answer in its type, the drafter drafts from those features at every round's root, and the tree is
followed along the answer, whatever the target itself would say next. How long the accepted path is then
depends on the draft alone. This module knows stages and answers; neither prompts nor how stages are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks import measurement
from benchmarks.gpu.exact_stages import Loaded
from benchmarks.gpu.opened import ints
from benchmarks.gpu.setting import Facts
from benchmarks.measurement import Job
from ddtree.train.replay import Acceptance, Answer, replay_each
from ddtree.types import DraftRequest, DraftResult, PrefillRequest, SessionBatch

NODES = 64
_AT_ONCE = 8  # answers that are drafted for in one pass
_RESAMPLES = 10_000


@dataclass(frozen=True)
class Answered:
    """What the engine answered, and how many rounds that took it."""

    answers: tuple[Answer, ...]
    own: Acceptance

    @classmethod
    def by(
        cls, decode: Callable[[Job], measurement.Answer], jobs: Sequence[Job], max_tokens: int
    ) -> Answered:
        """Decode every prompt alone, greedily, with trees of `NODES` nodes."""
        answers, own = [], []
        for job in jobs:
            asked = replace(job, draft_mode="tree", tree_budget=NODES, max_tokens=max_tokens)
            found = decode(asked)
            ids = torch.tensor([*job.input_ids, *found.token_ids], dtype=torch.int32)
            # Whatever came with the prompt's reading was no round's.
            answers.append(Answer(ids, len(job.input_ids) + found.first_tokens - 1))
            own.append(Acceptance(len(found.token_ids) - found.first_tokens, found.rounds))
        return cls(tuple(answers), Acceptance.pooled(own))


def replay_text(loaded: Loaded, answers: Sequence[Answer], nodes: int = NODES) -> list[Acceptance]:
    """What drafts of these stages accept of each answer, with trees of `nodes` nodes.

    Args:
        loaded: the stages, without these sessions.
        answers: of at least one token behind a prompt each.
        nodes: of a tree; answers are read in as many rows as such a tree and its root have.
    """
    accepted: list[Acceptance] = []
    for start in range(0, len(answers), _AT_ONCE):
        some = answers[start : start + _AT_ONCE]
        features = [_read(loaded, answer.ids[:-1], nodes + 1) for answer in some]
        drafting = _Drafting(loaded, some, features, nodes)
        try:
            accepted += replay_each(some, drafting.draft, nodes)
        finally:
            loaded.close(range(len(some)))
    return accepted


def _read(loaded: Loaded, ids: torch.Tensor, rows: int) -> torch.Tensor:
    """The context features `[n, H]` of ids, in their stage's type."""
    reserve, features = ints(1, len(ids)), []
    try:
        for at, chunk in zip(range(0, len(ids), rows), ids.split(rows), strict=True):
            batch = SessionBatch(torch.tensor([0]), ints(1, 0), ints(1, at))
            read = loaded.verifier.prefill(PrefillRequest(batch, chunk, ints(1, len(chunk)), reserve))
            assert not read.status.any(), "the pool has room"
            features.append(read.features)
    finally:
        loaded.close([0])
    return torch.cat(features)


class _Drafting:
    """Sessions of the drafter that follow answers."""

    def __init__(
        self, loaded: Loaded, answers: Sequence[Answer], features: Sequence[torch.Tensor], nodes: int
    ) -> None:
        self._drafter, self._answers, self._features, self._nodes = loaded.drafter, answers, features, nodes
        self._held = [0] * len(answers)  # context tokens of each session

    def draft(self, at: Mapping[int, int]) -> DraftResult:
        """Bring every session up to its root and draft; see `DraftAt`."""
        roots = {index: self._answers[index].answer_start + place for index, place in at.items()}
        held = [self._held[index] for index in roots]
        new = [slice(have, root) for have, root in zip(held, roots.values(), strict=True)]
        block = self._drafter.block_size
        drafted = self._drafter.draft(
            DraftRequest(
                SessionBatch(
                    torch.tensor([*roots]), ints(len(roots), 0), torch.tensor(held, dtype=torch.int32)
                ),
                torch.cat([self._answers[index].ids[own] for index, own in zip(roots, new, strict=True)]),
                torch.cat([self._features[index][own] for index, own in zip(roots, new, strict=True)]),
                torch.tensor([own.stop - own.start for own in new], dtype=torch.int32),
                torch.stack([self._answers[index].ids[root] for index, root in roots.items()]),
                torch.tensor([len(self._answers[index].ids) + block for index in roots], dtype=torch.int32),
                depth=block - 1,
                width=self._nodes,
            )
        )
        assert not drafted.status.any(), "the pool has room"
        for index, root in roots.items():
            self._held[index] = root
        return drafted


def compare(expected: Sequence[Acceptance], found: Sequence[Acceptance]) -> Facts:
    """Tokens per round on the same answers, pooled, and how sure their difference is.

    Prompts are drawn anew, with repetition, each with what both accepted of it (paired bootstrap; Efron and
    Tibshirani 1993): the spread of the difference is its standard error, and 95 % of it the interval.
    """
    before, after = (
        np.array([(each.emitted, each.rounds) for each in some], dtype=np.float64)
        for some in (expected, found)
    )
    drawn = np.random.default_rng(0).integers(0, len(before), (_RESAMPLES, len(before)))

    def lengths(counts: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        emitted, rounds = counts[drawn].sum(1).T
        return np.asarray(emitted / np.maximum(1, rounds))

    differences = lengths(after) - lengths(before)
    low, high = np.quantile(differences, (0.025, 0.975))
    lengths_of = [Acceptance.pooled(some).length for some in (expected, found)]
    return {
        "replay_prompts": len(before),
        "replay_tokens": int(before[:, 0].sum()),
        "replay_float32_per_round": lengths_of[0],
        "replay_bfloat16_per_round": lengths_of[1],
        "replay_difference": lengths_of[1] - lengths_of[0],
        "replay_difference_se": float(differences.std()),
        "replay_difference_low": float(low),
        "replay_difference_high": float(high),
    }
