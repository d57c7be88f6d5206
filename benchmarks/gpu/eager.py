"""The stage objects as they run without graphs: `TargetVerifier`, `Drafter` and `build_trees`.

The column that everything else is compared with. Its calls wait for the device themselves, so the host's
clock tells what they take.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import nn

from benchmarks.gpu.opened import (
    ROOT,
    WIDTH,
    OpenedStages,
    batch_of,
    ints,
    made_up_trees,
    rewind,
    tree_request,
)
from benchmarks.gpu.placement import Placement
from benchmarks.gpu.shapes import RandomPair
from ddtree.attention.plan import Segment, StepPlan
from ddtree.sampling import choose
from ddtree.tree import build_trees
from ddtree.tree_mask import ancestor_bits, expand
from ddtree.types import DraftRequest, DraftResult, TreeBatch, VerifyRequest

_NEW_TOKENS = 5  # context tokens that a draft takes in: what a round has accepted, about


class EagerRound:
    """See `RoundBench`."""

    def __init__(self, pair: RandomPair, place: Placement) -> None:
        """Open a session of `place.context` tokens for each sequence."""
        self._pair, self._place = pair, place
        self._device = pair.target.device
        self._stages = OpenedStages.over(pair, place)
        verifier, drafter = self._stages.verifier, self._stages.drafter
        self._known = place.context - _NEW_TOKENS
        self._sessions = self._stages.open(verifier.sessions, verifier.pool, place.batch, place.context)
        self._draft_sessions = self._stages.open(drafter.sessions, drafter.pool, place.batch, self._known)
        self._new = torch.randn(
            place.batch * _NEW_TOKENS,
            pair.shape.draft.hidden_size,
            dtype=pair.target.dtype,
            device=self._device,
        )
        self._trees: dict[int, TreeBatch] = {}

    def plain(self) -> Mapping[str, float]:
        """One row of each sequence through the verifier."""
        started = time.perf_counter()
        self._check(TreeBatch.empty(self._place.batch))
        return {"verify": _since(started)}

    @torch.inference_mode()
    def verify(self, nodes: int) -> torch.Tensor:
        """The step's plan, its masks, the forward, and the token of every row."""
        trees = self._tree(nodes)
        sees = expand(ancestor_bits(trees.parents, trees.counts))
        depths = nn.functional.pad(trees.depths.long(), (1, 0))
        rows = nodes + 1
        segments = tuple(
            Segment(at * rows, rows, session.pages, session.length, depths[at], sees[at, :rows, :rows])
            for at, session in enumerate(self._sessions)
        )
        plan = StepPlan.build(self._stages.verifier.pool, segments)
        tokens = nn.functional.pad(trees.tokens.long(), (1, 0), value=ROOT).flatten()
        step = self._pair.target.forward(tokens, plan, torch.arange(len(tokens), device=self._device))
        return choose(step.logits).view(self._place.batch, rows)

    def round(self, nodes: int) -> Mapping[str, float]:
        """Draft, build, verify with its commit, and the accepted tokens as numbers of Python."""
        started = time.perf_counter()
        drafted = self._draft()
        draft_ms, started = _since(started), time.perf_counter()
        trees = build_trees(tree_request(drafted.top_ids, drafted.top_log_probs, nodes))
        build_ms, started = _since(started), time.perf_counter()
        self._check(trees)
        return {"draft": draft_ms, "build": build_ms, "verify": _since(started)}

    def _draft(self) -> DraftResult:
        batch = self._place.batch
        result = self._stages.drafter.draft(
            DraftRequest(
                sessions=batch_of(batch, self._known),
                context_ids=ints(batch * _NEW_TOKENS, 0),
                context_features=self._new,
                counts=ints(batch, _NEW_TOKENS),
                root_tokens=ints(batch, ROOT),
                reserve=ints(batch, self._stages.slots),
                depth=self._pair.shape.draft.draft_positions,
                width=WIDTH,
            )
        )
        rewind(self._draft_sessions, self._known)
        return result

    def _check(self, trees: TreeBatch) -> None:
        """Verify, walk and commit; the tokens are on the host afterwards."""
        batch, context = self._place.batch, self._place.context
        verdict = self._stages.verifier.verify(
            VerifyRequest(batch_of(batch, context), ints(batch, ROOT), trees)
        )
        assert not verdict.status.any(), "the sessions are there"
        verdict.accepted_tokens.tolist()
        verdict.bonus_tokens.tolist()
        rewind(self._sessions, context)

    def _tree(self, nodes: int) -> TreeBatch:
        if nodes not in self._trees:
            made = made_up_trees(self._pair, self._place.batch, nodes)
            parts = (made.tokens, made.parents, made.depths, made.counts)
            self._trees[nodes] = TreeBatch(*(part.to(self._device) for part in parts))
        return self._trees[nodes]


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
