"""Builds the packed messages of a step from the live sequences, by what the loaded stages can do.

Also decides how far to draft: no deeper than a sequence may still emit, no wider than its budget can use.
Pure: it calls nothing and keeps no state of a sequence.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from ddtree.budget import CostCurve
from ddtree.device.messages import RoundRequest
from ddtree.errors import ConfigError
from ddtree.limits import Limits
from ddtree.live import Live
from ddtree.params import GenerationParams
from ddtree.promise import trusted
from ddtree.round_cost import RoundCost
from ddtree.stages.base import StageInfo
from ddtree.tree import useful_width
from ddtree.types import (
    AUTO_BUDGET,
    Beginnings,
    DraftRequest,
    DraftResult,
    FeatureRequest,
    PrefillRequest,
    SessionBatch,
    TreeBatch,
    TreeRequest,
    VerifyRequest,
)

_LOG = logging.getLogger(__name__)
_MOST_AUTO_NODES = 64
_MOST_SURPLUS = 96


class RoundPlanner:
    """Messages for stages described by `info`."""

    def __init__(self, info: StageInfo, max_step_nodes: int) -> None:
        """Take what the stages are; a round verifies at most `max_step_nodes` draft nodes in all."""
        verifier = info.verifier
        self._draft_depth = info.drafter.block_size - 1
        self._has_drafter = not verifier.fallback
        self._auto_nodes = min(_MOST_AUTO_NODES, verifier.max_nodes)
        self._feature_size = verifier.feature_size
        self._feature_dtype = getattr(torch, verifier.feature_dtype)
        curve = CostCurve(verifier.cost_rows, verifier.cost_ms)
        self.cost = RoundCost(curve, info.drafter.cost_ms, info.drafter.block_size)
        self._max_step_nodes = max_step_nodes
        room = verifier.pool_slots - verifier.max_nodes - 1
        if room < 2:  # a prompt and its answer
            raise ConfigError(
                f"kv_cache_mib must hold more than max_nodes {verifier.max_nodes}, got room for "
                f"{verifier.pool_slots} tokens; raise kv_cache_mib or lower max_nodes"
            )
        if room < verifier.context_length:
            _LOG.warning(
                "sequences are limited to %d tokens by kv_cache_mib; the target could hold %d",
                room,
                verifier.context_length,
            )
        self.limits = Limits.for_target(
            verifier.vocab_size, min(verifier.context_length, room), max_nodes=verifier.max_nodes
        )

    def wants_drafts(self, params: GenerationParams) -> bool:
        """Whether our drafter has a part in a sequence."""
        return self._has_drafter and params.draft_mode != "off" and params.tree_budget != 0

    def node_cap(self, params: GenerationParams) -> int:
        """Most draft nodes a round may stage for a sequence with these parameters."""
        if params.draft_mode == "off":
            return 0
        if params.tree_budget != AUTO_BUDGET:
            return params.tree_budget
        is_chain = params.draft_mode == "chain"
        return min(self._draft_depth, self.limits.max_nodes) if is_chain else self._auto_nodes

    def settings(self, params: GenerationParams) -> str:
        """What the verifier's session must know to choose tokens; it never learns anything later."""
        node_cap = self.node_cap(params)
        spec = replace(params.sampling, prompt_length=len(params.prompt_ids), max_nodes=node_cap)
        return spec.to_json()

    def prefill(self, batch: Sequence[tuple[Live, int]]) -> PrefillRequest:
        """Read the next `count` uncommitted ids of each sequence."""
        ids = [live.sequence.all_ids[live.committed : live.committed + count] for live, count in batch]
        lives = [live for live, _ in batch]
        return PrefillRequest(
            sessions=_sessions(lives, lambda live: live.sequence.epoch, lambda live: live.committed),
            token_ids=_ints([token for chunk in ids for token in chunk]),
            counts=_ints([count for _, count in batch]),
            reserve=_ints([_reserved_tokens(live) + live.node_cap + 1 for live in lives]),
            sampling=tuple("" if live.committed else live.settings for live in lives),
            beginnings=_beginnings(lives, lambda live: 0 if live.committed else live.to_commit),
        )

    def draft(self, batch: Sequence[Live], *, context_only: bool = False) -> DraftRequest:
        """Deliver what the drafter is owed and, unless `context_only`, ask for candidates."""
        features = [piece for live in batch for piece in live.draft.pending_features]
        empty = torch.zeros((0, self._feature_size), dtype=self._feature_dtype)
        return DraftRequest(
            sessions=_sessions(batch, lambda live: live.draft.epoch, lambda live: live.draft.length),
            context_ids=_ints([token for live in batch for token in live.draft.pending_ids]),
            context_features=torch.cat(features) if features else empty,
            counts=_ints([len(live.draft.pending_ids) for live in batch]),
            root_tokens=_ints([0 if context_only else live.sequence.root_token for live in batch]),
            reserve=self._draft_reserve(batch),
            depth=0 if context_only else max(self._asked_depth(live) for live in batch),
            width=0 if context_only else self._widest(batch),
            beginnings=_beginnings(batch, lambda _: 0),  # who opens with context has begun nowhere else
        )

    def open_drafts(self, batch: Sequence[Live]) -> DraftRequest:
        """Open the drafter's sessions with as much of what was committed as it has cached itself."""
        none = _ints([0] * len(batch))
        return DraftRequest(
            sessions=_sessions(batch, lambda live: live.draft.epoch, lambda _: 0),
            context_ids=none[:0],
            context_features=torch.zeros((0, self._feature_size), dtype=self._feature_dtype),
            counts=none,
            root_tokens=none,
            reserve=self._draft_reserve(batch),
            depth=0,
            width=0,
            beginnings=_beginnings(batch, lambda live: live.draft.behind_until),
        )

    @staticmethod
    def corrected(batch: Sequence[Live], drafts: DraftResult) -> DraftResult:
        """The candidates with the probabilities that each sequence's drafts have proved to have."""
        # Only where the number of nodes rests on it: a tree of a fixed size is the same for every trust.
        trusts = [live.outlook.trust if _tree_budget(live) == AUTO_BUDGET else 1.0 for live in batch]
        if all(trust == 1.0 for trust in trusts):
            return drafts
        trust = torch.tensor(trusts)
        return replace(
            drafts,
            top_log_probs=trusted(drafts.top_log_probs, trust),
            edge_log_probs=trusted(drafts.edge_log_probs, trust),
        )

    def trees(self, batch: Sequence[Live], drafts: DraftResult, sequences: int) -> TreeRequest:
        """Ask for one tree per drafting sequence of `sequences`, no deeper than it may still emit."""
        log_probs = drafts.top_log_probs.clone()
        for index, live in enumerate(batch):
            log_probs[index, self._depth(live) :] = -math.inf
        return TreeRequest(
            top_ids=drafts.top_ids,
            top_log_probs=log_probs,
            budgets=_ints([_tree_budget(live) for live in batch]),
            is_chain=torch.tensor([live.sequence.params.draft_mode == "chain" for live in batch]),
            round_cost_ms=torch.from_numpy(self.cost.table(sequences, len(batch), self._max_step_nodes)),
            edge_log_probs=drafts.edge_log_probs,
            others=sequences - len(batch),
            auto_limit=self._auto_nodes,
        )

    def verify(self, batch: Sequence[Live], trees: TreeBatch) -> VerifyRequest:
        """Check one tree per sequence, empty or not."""
        return VerifyRequest(
            sessions=_sessions(batch, lambda live: live.sequence.epoch, lambda live: live.committed),
            root_tokens=_ints([live.sequence.root_token for live in batch]),
            trees=trees,
        )

    def resident(
        self, batch: Sequence[Live], budgets: Sequence[int], epochs: Sequence[int], nodes: int
    ) -> RoundRequest:
        """Do a whole round: trees of at most `budgets` nodes, drafters by `epochs`, in a size of `nodes`."""
        return RoundRequest(
            sessions=_sessions(batch, lambda live: live.sequence.epoch, lambda live: live.committed),
            draft_epochs=_ints(epochs),
            root_tokens=_ints([live.sequence.root_token for live in batch]),
            budgets=_ints(budgets),
            depths=_ints([self._depth(live) for live in batch]),
            is_chain=torch.tensor([live.sequence.params.draft_mode == "chain" for live in batch]),
            nodes=nodes,
        )

    @staticmethod
    def features(live: Live, start: int, count: int) -> FeatureRequest:
        """Read back the features of committed tokens `[start, start + count)`."""
        sessions = _sessions([live], lambda live: live.sequence.epoch, lambda live: live.committed)
        return FeatureRequest(sessions, _ints([start]), _ints([count]))

    def _draft_reserve(self, batch: Sequence[Live]) -> torch.Tensor:
        return _ints([_reserved_tokens(live) + self._draft_depth + 1 for live in batch])

    def _depth(self, live: Live) -> int:
        """Deepest useful draft: an accepted path and its bonus token must fit into what may be emitted."""
        return max(0, min(self._draft_depth, live.sequence.remaining_tokens - 1, live.node_cap))

    def _asked_depth(self, live: Live) -> int:
        """Draft positions to ask for: no more than a tree of a size that is chosen goes to, and some."""
        depth = self._depth(live)
        return live.outlook.depth(depth) if _tree_budget(live) == AUTO_BUDGET else depth

    def _widest(self, batch: Sequence[Live]) -> int:
        """Candidates per position that some tree may use."""
        auto_width = 0
        if any(live.is_budget_open for live in batch):
            table = self.cost.table(len(batch), len(batch), self._auto_nodes)[len(batch) - 1 :]
            auto_width = _auto_width(table, len(batch), self._auto_nodes)
        return max(self._width(live, auto_width) for live in batch)

    def _width(self, live: Live, auto_width: int) -> int:
        if live.sequence.params.draft_mode == "chain":
            return 1
        if live.is_budget_open:
            return auto_width
        return useful_width(_tree_budget(live), self._draft_depth)


def _reserved_tokens(live: Live) -> int:
    return len(live.sequence.params.prompt_ids) + live.sequence.params.max_tokens


def _tree_budget(live: Live) -> int:
    """Draft nodes to ask the builder for: more than the budget when a grammar will take some out again."""
    budget = live.sequence.params.tree_budget
    is_guided = live.sequence.params.sampling.grammar is not None
    return budget + min(3 * budget, _MOST_SURPLUS) if is_guided and budget != AUTO_BUDGET else budget


def _auto_width(round_cost_ms: NDArray[np.float32], sequences: int, most_nodes: int) -> int:
    """Candidates per position that can matter when the budget follows the cost of 0, 1, … nodes.

    The candidate of rank r has a probability of at most 1 / (r + 1), and a node pays only if its probability
    times the milliseconds per token exceeds what a row costs; a round emits at least a token per sequence.
    """
    rows = len(round_cost_ms)
    per_row = (round_cost_ms[-1] - round_cost_ms[0]) / max(1, rows - 1)
    if per_row <= 0:
        return most_nodes
    return int(min(most_nodes, max(4, math.ceil(round_cost_ms[0] / sequences / per_row))))


def _sessions(
    batch: Sequence[Live], epoch: Callable[[Live], int], length: Callable[[Live], int]
) -> SessionBatch:
    return SessionBatch(
        ids=torch.from_numpy(np.array([live.sequence.session_id for live in batch], dtype=np.int64)),
        epochs=_ints([epoch(live) for live in batch]),
        lengths=_ints([length(live) for live in batch]),
    )


def _beginnings(batch: Sequence[Live], count: Callable[[Live], int]) -> Beginnings:
    """The first `count` ids of each sequence, and the salt under which it shares pages."""
    ids = [live.sequence.all_ids[: count(live)] if count(live) else [] for live in batch]
    return Beginnings(
        ids=_ints([token for begun in ids for token in begun]),
        counts=_ints([len(begun) for begun in ids]),
        salts=tuple(live.sequence.params.cache_salt for live in batch),
    )


def _ints(values: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int32))  # a third of what `torch.tensor` takes


def spread_trees(trees: TreeBatch, positions: Sequence[int], size: int) -> TreeBatch:
    """Give the trees of some sequences their places in a batch of `size`; the others get empty ones."""
    if len(positions) == size:
        return trees
    index = torch.tensor(positions, dtype=torch.int64)

    def place(field: torch.Tensor) -> torch.Tensor:
        spread = torch.zeros((size, *field.shape[1:]), dtype=field.dtype, device=field.device)
        spread[index] = field
        return spread

    return TreeBatch(place(trees.tokens), place(trees.parents), place(trees.depths), place(trees.counts))
