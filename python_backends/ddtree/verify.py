"""The verifier stage: one target forward over roots and draft trees, the acceptance walk, and the commit.

It owns the target's cache and the context features beside it. It knows sessions by id and what is
committed in them; it knows nothing of requests, text or stop conditions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ddtree import staging, verify_batch
from ddtree.accept import Acceptance, walk
from ddtree.budget import CostCurve
from ddtree.cores import takes_all_cores
from ddtree.errors import InvalidArgument
from ddtree.grammar import GrammarCompiler
from ddtree.models.target import Target, TargetStep
from ddtree.prefix_cache import PageKeys, Prefix
from ddtree.pruning import prune
from ddtree.samplers import Samplers
from ddtree.sessions import Session, SessionTable
from ddtree.staging import Staged, Steps
from ddtree.tree_sampling import first_tokens, target_tokens
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
from ddtree.verify_cost import measure_verify

if TYPE_CHECKING:
    from ddtree.device.verify_calls import VerifyCalls

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class VerifierLimits:
    """Sizes of a verifier stage."""

    kv_cache_bytes: int
    page_size: int
    max_nodes: int
    session_ttl_s: float
    prefix_cache: bool = True  # sequences that begin alike share pages


class TargetVerifier:
    """The target with its sessions. One call at a time."""

    def __init__(
        self,
        target: Target,
        projection: nn.Module,
        limits: VerifierLimits,
        *,
        draft_hash: str,
        feature_size: int,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Allocate the pool.

        Args:
            target: the loaded target, tapped at the drafter's layers.
            projection: `[n, taps * H]` to `[n, feature_size]`, the drafter's `fc` and `hidden_norm`.
            limits: sizes.
            draft_hash: hash of the draft checkpoint the projection comes from.
            feature_size: width of a projected feature.
            grammars: compiles what sequences are guided by; without it none may be.
        """
        self.target = target
        self.projection = projection
        self._limits = limits
        self._draft_hash = draft_hash
        self._feature_size = feature_size
        self._samplers = Samplers(target.vocab_size, target.device, grammars)
        self._device = target.device
        self.feature_dtype = target.dtype
        self.pool = target.make_pool(
            feature_size, budget_bytes=limits.kv_cache_bytes, page_size=limits.page_size
        )
        keys = PageKeys(draft_hash, limits.page_size) if limits.prefix_cache else None
        self.sessions = SessionTable(self.pool, ttl_s=limits.session_ttl_s, keys=keys)
        self._cost = CostCurve(rows=(1,), ms=(1.0,))
        self._steps: Steps | None = None
        self._calls: VerifyCalls | None = None

    def measure_cost(self, repeats: int = 3, on_progress: Callable[[int], None] | None = None) -> None:
        """Time verify steps of several sizes on this machine; `info` reports the curve."""
        self._cost = measure_verify(
            self.target, self.pool, self._limits.max_nodes, repeats=repeats, on_progress=on_progress
        )

    def use(self, steps: Steps, repeats: int = 5) -> None:
        """Verify, and read prompts, through prepared steps where they fit, and report what those cost."""
        self._steps = steps
        self._cost = steps.cost(repeats)

    def use_calls(self, calls: VerifyCalls) -> None:
        """Let these do what follows a step too, where no sequence of a batch draws its tokens."""
        self._calls = calls

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
            takes_all_cores=takes_all_cores(self._device),
        )

    def usage(self) -> Usage:
        """Sessions and pages held now; sessions past their time are dropped first."""
        return self.sessions.usage()

    def release(self, session_ids: Sequence[int]) -> Usage:
        """Drop sessions; unknown ids are ignored."""
        return self.sessions.release(session_ids)

    @torch.inference_mode()
    def prefill(self, request: PrefillRequest) -> PrefillResult:
        """Add a chunk of committed ids to each session; a chunk at length 0 opens its session."""
        self.sessions.expire()
        found = self._open_or_find(request)
        chunks = verify_batch.chunks(request, found)
        counts = [len(chunk) for chunk in chunks]
        shape = (sum(counts), self._feature_size)
        features = torch.zeros(shape, dtype=self.target.dtype, device=self._device)
        live = found.live
        if not live:
            return verify_batch.nothing_prefilled(found, features)
        starts, logits = verify_batch.starts_of(counts), dict[int, torch.Tensor]()
        try:
            for group in self._groups({i: counts[i] for i in live}):
                read = self._read([live[i] for i in group], [chunks[i] for i in group])
                rows = torch.cat([torch.arange(starts[i], starts[i] + counts[i]) for i in group])
                features[rows.to(self._device)] = self._project(read.step, read.slots, read.rows)
                logits.update(zip(group, read.step.logits, strict=True))
        except Exception:
            # A recurrent state may have moved in some layers already: nobody must go on from there.
            self.sessions.release([session.session_id for session in live.values()])
            raise
        commits = [self.sessions.commit(session, chunks[i]) for i, session in live.items()]
        samplers = [session.sampler for session in live.values()]
        first = first_tokens(torch.stack([logits[i] for i in live]), samplers).after(commits)
        return verify_batch.prefilled(found, first, features)

    @torch.inference_mode()
    def verify(self, request: VerifyRequest) -> VerifyResult:
        """Check each tree against the target and commit root and accepted path in the cache.

        Where the pool cannot stage all rows at once, this takes several steps.
        """
        parts = verify_batch.parts(request, self.pool.most_rows)
        if len(parts) > 1:
            return verify_batch.joined([self.verify(part) for part in parts])
        self.sessions.expire()
        found = self._find(request.sessions)
        live = [index for index, session in enumerate(found) if session is not None]
        status = verify_batch.status_of(found)
        if not live:
            return verify_batch.nothing_verified(status, self.pool.features[:0])
        sessions = [session for session in found if session is not None]
        samplers = [session.sampler for session in sessions]
        root_ids = request.root_tokens[torch.tensor(live)].tolist()
        chosen = verify_batch.select_trees(request.trees, live, torch.device("cpu"))
        trees = prune(chosen, root_ids, samplers)
        if self._calls is not None and not any(samplers):
            kept = self._calls.run(sessions, trees, root_ids)
            if kept is not None:
                commits = self.sessions.commit_paths(sessions, root_ids, kept.lists())
                return verify_batch.kept(status, live, trees.counts, kept, commits)
        staged = self._stage(sessions, trees, root_ids)
        # What the host knows of the trees is not asked of the device, which is still at the step.
        nodes, depth = trees.counts.tolist(), int(trees.depths.max()) if trees.depths.numel() else 0
        target = target_tokens(staged.step.logits, staged.starts, staged.trees, root_ids, samplers, nodes)
        accepted = walk(staged.trees, target.tokens, depth)
        paths = verify_batch.Paths.of(accepted)
        started = time.perf_counter()
        features = self._commit(sessions, staged, accepted, paths)
        target = target.after(self.sessions.commit_paths(sessions, root_ids, paths.tokens))
        commit_ms = (time.perf_counter() - started) * 1e3
        return verify_batch.verified(status, live, staged.trees.counts, target, accepted, features, commit_ms)

    @torch.inference_mode()
    def read_features(self, request: FeatureRequest) -> FeatureResult:
        """Stored context features of committed tokens, for a drafter that has to start again."""
        return verify_batch.stored(request, self._find(request.sessions), self.pool.features)

    def check_integrity(self) -> None:
        """Assert that pages and sessions agree."""
        self.sessions.check_integrity()

    def _open_or_find(self, request: PrefillRequest) -> verify_batch.Found:
        reserve, salts = request.reserve.tolist(), request.beginnings.salts
        beginnings = request.beginnings.split()
        found: list[Session | None] = []
        statuses: list[Status] = []
        reused = [0] * len(reserve)
        for index, row in enumerate(verify_batch.session_rows(request.sessions)):
            # The last id is never taken from the cache: what the target says after it is wanted.
            prefix = Prefix(beginnings[index], salts[index], computed=1) if salts else None
            session, status = self.sessions.open_or_find(*row, reserve[index], prefix)
            if session is not None:
                try:
                    if row[2]:
                        reused[index] = self.sessions.catch_up(session)
                    else:
                        self._open_sampler(session, request.sampling[index] if request.sampling else "")
                        reused[index] = session.length
                except Exception as error:  # noqa: BLE001 - whatever broke, it is this session's own
                    _LOG.exception("a sequence's tokens cannot be chosen as it asks")
                    self.sessions.release([session.session_id])
                    # The orchestrator refuses bad grammars, so its library reads this one otherwise.
                    is_grammar = isinstance(error, InvalidArgument)
                    session, status = None, Status.GRAMMAR_FAILED if is_grammar else Status.SAMPLER_FAILED
            found.append(session)
            statuses.append(status)
        return verify_batch.Found(tuple(found), tuple(statuses), tuple(reused))

    def _open_sampler(self, session: Session, settings: str) -> None:
        """Begin to choose tokens after what the session has from the cache."""
        session.sampler = self._samplers.open(settings)
        if session.sampler is not None:
            session.sampler.push(session.prefix.ids[: session.length])

    def _find(self, sessions: SessionBatch) -> list[Session | None]:
        return [self.sessions.find(*row) for row in verify_batch.session_rows(sessions)]

    @property
    def _readers(self) -> Steps | None:
        """Prepared steps that prompts can go through: recurrent states take a chunk in as a whole."""
        return self._steps if self.pool.states is None else None

    def _groups(self, counts: Mapping[int, int]) -> list[list[int]]:
        """Which places of a batch read their chunks together."""
        steps = self._readers
        return [list(counts)] if steps is None else staging.grouped(steps.rows, counts)

    def _read(self, sessions: Sequence[Session], chunks: Sequence[Sequence[int]]) -> staging.Read:
        """Run the target over chunks of prompts, as a captured step where one of their size is prepared."""
        steps = self._readers
        read = None if steps is None else staging.read_prepared(steps, sessions, chunks)
        return read or staging.read(self.target, self.pool, sessions, chunks)

    def _stage(self, sessions: Sequence[Session], trees: TreeBatch, roots: Sequence[int]) -> Staged:
        """Run the target over trees, as a captured step where one of their size is prepared."""
        staged = None if self._steps is None else self._steps.stage(sessions, trees, roots)
        return staged or staging.stage(self.target, self.pool, sessions, trees, roots)

    def _commit(
        self, sessions: Sequence[Session], staged: Staged, accepted: Acceptance, paths: verify_batch.Paths
    ) -> torch.Tensor:
        """Keep root and accepted path of each sequence, `[0, length + path)`; give their features."""
        rows = [
            start + node for start, nodes in zip(staged.starts, paths.nodes, strict=True) for node in nodes
        ]
        destination = [
            session.pages.slots[session.length : session.length + len(nodes)]
            for session, nodes in zip(sessions, paths.nodes, strict=True)
        ]
        kept, to_slots = torch.tensor(rows, device=self._device), torch.cat(destination)
        from_slots = staged.slots[kept]
        if staged.recurrent is not None:
            staged.recurrent.commit(accepted.path_nodes, accepted.accepted_counts + 1)
        # A path 0, 1, 2, … already stands where it belongs; asking a GPU takes longer than moving.
        if self._device.type != "cpu" or not torch.equal(from_slots, to_slots):
            self.pool.move(from_slots, to_slots)
        return self._project(staged.step, to_slots, kept)

    def _project(self, step: TargetStep, slots: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """Project the taps of some rows (all when None) and keep them beside the rows' KV slots."""
        taps = step.taps if rows is None else [tap[rows] for tap in step.taps]
        features: torch.Tensor = self.projection(torch.cat(list(taps), dim=-1))
        self.pool.features[slots] = features
        return features
