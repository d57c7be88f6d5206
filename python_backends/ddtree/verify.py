"""The verifier stage: one target forward over roots and draft trees, the acceptance walk, and the commit.

It owns the target's KV pages and the context features beside them. It knows sessions by id and what is
committed in them; it knows nothing of requests, text or stop conditions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ddtree import sampling
from ddtree.accept import Acceptance, walk
from ddtree.attention.plan import Segment, StepPlan
from ddtree.budget import CostCurve, measure
from ddtree.kv_cache import KvPool
from ddtree.models.target import TargetModel, TargetStep
from ddtree.sessions import Session, SessionTable
from ddtree.tree_mask import ancestor_bits, expand
from ddtree.types import (
    FeatureRequest,
    FeatureResult,
    PrefillRequest,
    PrefillResult,
    SessionBatch,
    Status,
    TreeBatch,
    Usage,
    VerifierInfo,
    VerifyRequest,
    VerifyResult,
)

# Verified rows whose cost is measured at load, and the committed prefix they are measured behind.
COST_ROWS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
COST_PREFIX = 256


@dataclass(frozen=True)
class VerifierLimits:
    """Sizes of a verifier stage."""

    kv_cache_bytes: int
    page_size: int
    max_nodes: int
    session_ttl_s: float


class TargetVerifier:
    """The target with its sessions. One call at a time."""

    def __init__(
        self,
        target: TargetModel,
        projection: nn.Module,
        limits: VerifierLimits,
        *,
        draft_hash: str,
        feature_size: int,
    ) -> None:
        """Allocate the pool.

        Args:
            target: the loaded target, tapped at the drafter's layers.
            projection: `[n, taps * H]` to `[n, feature_size]`, the drafter's `fc` and `hidden_norm`.
            limits: sizes.
            draft_hash: hash of the draft checkpoint the projection comes from.
            feature_size: width of a projected feature.
        """
        self.target = target
        self._projection = projection
        self._limits = limits
        self._draft_hash = draft_hash
        self._feature_size = feature_size
        self._device = target.device
        self.feature_dtype = target.dtype
        self.pool = KvPool(
            target.cache_shape(feature_size),
            budget_bytes=limits.kv_cache_bytes,
            page_size=limits.page_size,
            device=target.device,
        )
        self.sessions = SessionTable(self.pool, ttl_s=limits.session_ttl_s)
        self._cost = CostCurve(rows=(1,), ms=(1.0,))

    def measure_cost(self, repeats: int = 3, on_progress: Callable[[int], None] | None = None) -> None:
        """Time verify steps of several sizes on this machine; `info` reports the curve."""
        prefix = min(COST_PREFIX, self.pool.total_slots // 2)
        rows = [
            r for r in COST_ROWS if prefix + r <= self.pool.total_slots and r <= self._limits.max_nodes + 1
        ]
        pages = self.pool.reserve(prefix + rows[-1])
        assert pages is not None, "the cost is measured before the first session"

        def step(count: int) -> None:
            segment = Segment(0, count, pages, prefix, torch.arange(count, device=self._device), None)
            plan = StepPlan.build(self.pool, (segment,))
            tokens = torch.zeros(count, dtype=torch.int64, device=self._device)
            sampling.choose(
                self.target.forward(tokens, plan, torch.arange(count, device=self._device)).logits
            )
            if on_progress is not None:
                on_progress(count)

        self._cost = measure(step, rows, repeats)
        self.pool.release(pages)

    def info(self) -> VerifierInfo:
        """What the orchestrator must know."""
        return VerifierInfo(
            vocab_size=self.target.vocab_size,
            context_length=self.target.context_length,
            max_nodes=self._limits.max_nodes,
            pool_slots=self.pool.total_slots,
            feature_size=self._feature_size,
            feature_dtype=str(self.target.dtype).removeprefix("torch."),
            draft_hash=self._draft_hash,
            cost_rows=tuple(int(rows) for rows in self._cost.rows),
            cost_ms=tuple(float(ms) for ms in self._cost.ms),
            usage=self.usage(),
        )

    def usage(self) -> Usage:
        """Sessions and pages held now; sessions past their time are dropped first."""
        self.sessions.expire()
        return self.sessions.usage()

    def release(self, session_ids: Sequence[int]) -> Usage:
        """Drop sessions; unknown ids are ignored."""
        for session_id in session_ids:
            self.sessions.release(session_id)
        return self.usage()

    @torch.inference_mode()
    def prefill(self, request: PrefillRequest) -> PrefillResult:
        """Add a chunk of committed ids to each session; a chunk at length 0 opens its session."""
        self.sessions.expire()
        counts = request.counts.tolist()
        status, found = self._open_or_find(request.sessions, request.reserve.tolist())
        features = torch.zeros(
            (sum(counts), self._feature_size), dtype=self.target.dtype, device=self._device
        )
        next_tokens = torch.zeros(len(counts), dtype=torch.int64, device=self._device)
        live = [index for index, session in enumerate(found) if session is not None]
        if live:
            starts = _starts(counts)
            rows = torch.cat([torch.arange(starts[i], starts[i] + counts[i]) for i in live]).to(self._device)
            segments, start = [], 0
            for i in live:
                segments.append(self._segment(found[i], start, counts[i], None, None))
                start += counts[i]
            last_rows = torch.tensor([segment.stop - 1 for segment in segments], device=self._device)
            plan = StepPlan.build(self.pool, tuple(segments))
            step = self.target.forward(request.token_ids.to(self._device).long()[rows], plan, last_rows)
            next_tokens[torch.tensor(live)] = sampling.choose(step.logits)
            features[rows] = self._project(step, plan.slots, None)
            for i in live:
                self._grow(found[i], counts[i])
        return PrefillResult(status, next_tokens.int(), features)

    @torch.inference_mode()
    def verify(self, request: VerifyRequest) -> VerifyResult:
        """Check each tree against the target and commit root and accepted path in the cache."""
        self.sessions.expire()
        found = self._find(request.sessions)
        live = [index for index, session in enumerate(found) if session is not None]
        status = torch.tensor(
            [Status.OK if s is not None else Status.SESSION_LOST for s in found], dtype=torch.int32
        )
        if not live:
            return self._nothing_verified(status)
        trees = _select(request.trees, live, self._device)
        sessions = [session for session in found if session is not None]
        roots = request.root_tokens[torch.tensor(live)].to(self._device).long()
        plan = self._plan(sessions, trees)
        token_rows = torch.cat([torch.cat((roots[i, None], trees.tokens[i, : segment.count - 1].long()))
                                for i, segment in enumerate(plan.segments)])  # fmt: skip
        step = self.target.forward(token_rows, plan, torch.arange(len(token_rows), device=self._device))
        target_tokens = nn.utils.rnn.pad_sequence(
            [sampling.choose(step.logits[segment.start : segment.stop]) for segment in plan.segments],
            batch_first=True,
        )
        target_tokens = nn.functional.pad(
            target_tokens, (0, trees.tokens.shape[1] + 1 - target_tokens.shape[1])
        )
        accepted = walk(trees, target_tokens)
        started = time.perf_counter()
        features = self._commit(sessions, plan, step, accepted)
        commit_ms = (time.perf_counter() - started) * 1e3
        return _spread(status, live, accepted, features, commit_ms)

    @torch.inference_mode()
    def read_features(self, request: FeatureRequest) -> FeatureResult:
        """Stored context features of committed tokens, for a drafter that has to start again."""
        found = self._find(request.sessions)
        pieces = [self.pool.features[:0]]
        status = []
        for session, start, count in zip(
            found, request.starts.tolist(), request.counts.tolist(), strict=True
        ):
            is_there = session is not None and start + count <= session.length
            status.append(Status.OK if is_there else Status.SESSION_LOST)
            if session is not None and is_there:
                pieces.append(self.pool.features[session.pages.slots[start : start + count]])
        return FeatureResult(torch.tensor(status, dtype=torch.int32), torch.cat(pieces))

    def check_integrity(self) -> None:
        """Assert that pages and sessions agree."""
        self.sessions.check_integrity()

    def _open_or_find(
        self, sessions: SessionBatch, reserve: Sequence[int]
    ) -> tuple[torch.Tensor, list[Session | None]]:
        outcomes = [
            self.sessions.open_or_find(*row, slots)
            for row, slots in zip(_rows(sessions), reserve, strict=True)
        ]
        status = torch.tensor([outcome for _, outcome in outcomes], dtype=torch.int32)
        return status, [session for session, _ in outcomes]

    def _find(self, sessions: SessionBatch) -> list[Session | None]:
        return [self.sessions.find(*row) for row in _rows(sessions)]

    def _plan(self, sessions: Sequence[Session], trees: TreeBatch) -> StepPlan:
        sees = expand(ancestor_bits(trees.parents, trees.counts))
        segments, start = [], 0
        for index, (session, count) in enumerate(zip(sessions, trees.counts.tolist(), strict=True)):
            rows = count + 1
            depths = nn.functional.pad(trees.depths[index, :count].long(), (1, 0))
            segments.append(self._segment(session, start, rows, depths, sees[index, :rows, :rows]))
            start += rows
        return StepPlan.build(self.pool, tuple(segments))

    def _segment(
        self,
        session: Session | None,
        start: int,
        count: int,
        depths: torch.Tensor | None,
        sees: torch.Tensor | None,
    ) -> Segment:
        assert session is not None
        if depths is None:
            depths = torch.arange(count, device=self._device)
        return Segment(start, count, session.pages, session.length, depths, sees)

    def _commit(
        self, sessions: Sequence[Session], plan: StepPlan, step: TargetStep, accepted: Acceptance
    ) -> torch.Tensor:
        """Keep root and accepted path of each sequence, `[0, length + path)`; give their features."""
        source, destination, rows = [], [], []
        for index, (session, segment) in enumerate(zip(sessions, plan.segments, strict=True)):
            length = int(accepted.accepted_counts[index]) + 1
            path = accepted.path_nodes[index, :length]
            rows.append(segment.start + path)
            target_slots = session.pages.slots[session.length : session.length + length]
            source.append(plan.slots[segment.start + path])
            destination.append(target_slots)
        from_slots, to_slots = torch.cat(source), torch.cat(destination)
        if not torch.equal(from_slots, to_slots):  # a path 0, 1, 2, … already stands where it belongs
            self.pool.move(from_slots, to_slots)
        features = self._project(step, to_slots, torch.cat(rows))
        for session, kept in zip(sessions, destination, strict=True):
            self._grow(session, len(kept))
        return features

    def _project(self, step: TargetStep, slots: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """Project the taps of some rows (all when None) and keep them beside the rows' KV slots."""
        taps = step.taps if rows is None else [tap[rows] for tap in step.taps]
        features: torch.Tensor = self._projection(torch.cat(list(taps), dim=-1))
        self.pool.features[slots] = features
        return features

    @staticmethod
    def _grow(session: Session | None, count: int) -> None:
        assert session is not None
        session.length += count

    def _nothing_verified(self, status: torch.Tensor) -> VerifyResult:
        zeros = torch.zeros(len(status), dtype=torch.int32)
        return VerifyResult(status, zeros[:, None][:, :0], zeros, zeros, self.pool.features[:0], 0.0)


def _rows(sessions: SessionBatch) -> list[tuple[int, int, int]]:
    return list(zip(sessions.ids.tolist(), sessions.epochs.tolist(), sessions.lengths.tolist(), strict=True))


def _starts(counts: Sequence[int]) -> list[int]:
    starts, start = [], 0
    for count in counts:
        starts.append(start)
        start += count
    return starts


def _select(trees: TreeBatch, live: Sequence[int], device: torch.device) -> TreeBatch:
    index = torch.tensor(live)
    fields = (trees.tokens, trees.parents, trees.depths, trees.counts)
    return TreeBatch(*(field[index].to(device) for field in fields))


def _spread(
    status: torch.Tensor, live: Sequence[int], accepted: Acceptance, features: torch.Tensor, commit_ms: float
) -> VerifyResult:
    """Put the results of the live sequences back to their places in the batch."""
    index = torch.tensor(live)
    tokens = torch.zeros((len(status), accepted.accepted_tokens.shape[1]), dtype=torch.int32)
    counts, bonus = torch.zeros(len(status), dtype=torch.int32), torch.zeros(len(status), dtype=torch.int32)
    tokens[index] = accepted.accepted_tokens.int().cpu()
    counts[index] = accepted.accepted_counts.int().cpu()
    bonus[index] = accepted.bonus_tokens.int().cpu()
    return VerifyResult(status, tokens, counts, bonus, features, commit_ms)
