"""The drafter stage: one block-diffusion forward per round over all sequences, and the best candidates of it.

It owns the drafter's context cache and borrows embedding and output head from the target. It knows sessions
by id and how much context they hold; it never sees a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ddtree.budget import measure
from ddtree.cores import takes_all_cores
from ddtree.fresh_context import FreshContext
from ddtree.kv_cache import CacheShape, KvPool
from ddtree.models.dflash import DFlashDraft
from ddtree.models.draft_config import DraftConfig
from ddtree.prefix_cache import PageKeys, Prefix
from ddtree.sessions import Session, SessionTable
from ddtree.types import DrafterInfo, DraftRequest, DraftResult, Usage

if TYPE_CHECKING:
    from ddtree.device.draft_steps import DraftSteps
    from ddtree.device.drafting import DeviceDraft
    from ddtree.device.fused_layers import MakeLinear

_COST_CONTEXT = 256  # context tokens behind which the draft's cost is measured
_COST_WIDTH = 16


@dataclass(frozen=True)
class DrafterLimits:
    """Sizes of a drafter stage."""

    kv_cache_bytes: int
    page_size: int
    session_ttl_s: float
    prefix_cache: bool = True  # sequences that begin alike share pages


@dataclass(frozen=True)
class _Drafted:
    ids: torch.Tensor  # [S, D, K]
    log_probs: torch.Tensor  # [S, D, K] float32
    edge_log_probs: torch.Tensor | None  # [S, D, K, K] float32, see `DraftResult`


class Drafter:
    """The DFlash drafter with its sessions. One call at a time.

    Slots of one session: `[0, length)` hold the context's keys and values. The block's own are recomputed
    every round and never stored.
    """

    def __init__(
        self,
        model: DFlashDraft,
        limits: DrafterLimits,
        *,
        embedding: torch.Tensor,
        head: nn.Module,
        draft_hash: str,
        target_ids: torch.Tensor | None = None,
    ) -> None:
        """Allocate the context cache.

        Args:
            model: the drafter's layers, on the device and in the dtype of `embedding`.
            limits: sizes.
            embedding: the target's token embedding `[V, H]`.
            head: the output head, `[n, H]` to `[n, V]`: the target's, or the draft's own over fewer tokens.
            draft_hash: hash of the draft checkpoint.
            target_ids: `[V]` int64 when the head is the draft's own, the token that each of its outputs is.
        """
        self.model = model
        self._config: DraftConfig = model.config
        self._embedding = embedding
        self._head = head
        self._target_ids = target_ids
        self._draft_hash = draft_hash
        self._device = embedding.device
        self.feature_dtype = embedding.dtype
        self.pool = KvPool(
            CacheShape(
                len(self._config.layers),
                self._config.num_kv_heads,
                self._config.head_dim,
                dtype=embedding.dtype,
            ),
            budget_bytes=limits.kv_cache_bytes,
            page_size=limits.page_size,
            device=self._device,
        )
        keys = PageKeys(draft_hash, limits.page_size) if limits.prefix_cache else None
        self.sessions = SessionTable(self.pool, ttl_s=limits.session_ttl_s, keys=keys)
        self._cost_ms = 1.0
        self._steps: DraftSteps | None = None
        self._on_device: DeviceDraft | None = None

    def measure_cost(self, repeats: int = 3) -> None:
        """Time one draft of one sequence on this machine; `info` reports it."""
        count = min(_COST_CONTEXT, self.pool.total_slots)
        session = self.sessions.open(0, 0, count)
        assert session is not None, "the cost is measured before the first session"
        session.length = count
        root = torch.zeros(1, dtype=torch.int64)
        depth = self._config.block_size - 1
        nothing = FreshContext(torch.zeros((0, self._config.hidden_size), dtype=self.feature_dtype), ((),))

        def step(_: int) -> None:
            drafted = self._take([session], nothing, root, depth, self._width(_COST_WIDTH))
            assert drafted is not None, "it was asked for some depth"
            drafted.ids.cpu()  # waits for a GPU

        with torch.inference_mode():
            self._cost_ms = measure(step, (1,), repeats).ms[0]
        self.sessions.release([0])

    @property
    def block_size(self) -> int:
        """B, the rows of a draft."""
        return self._config.block_size

    def use(self, steps: DraftSteps, repeats: int = 10) -> None:
        """Draft through captured passes from now on, where they fit, and report what those cost."""
        self._steps = steps
        self.measure_cost(repeats)

    def on_device(self) -> DeviceDraft:
        """The same drafter over the same pool, for rounds that stay on the device; one for all who ask."""
        if self._on_device is None:
            self._on_device = self._build_on_device(None)
        return self._on_device

    def choose_products(self, linear: MakeLinear) -> None:
        """Let `on_device` use products made by `linear`; the ones it needs are made now, to be tuned."""
        if type(self._head) is nn.Linear:
            self._head = linear(self._head.weight, self._head.bias)
        self._on_device = self._build_on_device(linear)

    def _build_on_device(self, linear: MakeLinear | None) -> DeviceDraft:
        from ddtree.device.drafting import DeviceDraft  # kernels: not everywhere installed

        parts = (self.model, self._embedding, self._head, self._target_ids, self.pool)
        return DeviceDraft(*parts, linear=linear)

    def info(self) -> DrafterInfo:
        """What the orchestrator must know."""
        return DrafterInfo(
            self._config.block_size,
            self._draft_hash,
            self._cost_ms,
            self.usage(),
            takes_all_cores=takes_all_cores(self._device),
        )

    def usage(self) -> Usage:
        """Sessions and pages held now; sessions past their time are dropped first."""
        return self.sessions.usage()

    def release(self, session_ids: Sequence[int]) -> Usage:
        """Drop sessions; unknown ids are ignored."""
        return self.sessions.release(session_ids)

    @torch.inference_mode()
    def draft(self, request: DraftRequest) -> DraftResult:
        """Take new context and, if `depth > 0`, give the best candidates of each position.

        Candidates of a sequence that is not OK have log-probability -inf.
        """
        self.sessions.expire()
        status, found = self._open_or_find(request)
        lengths = request.sessions.lengths.tolist()
        reused = torch.tensor(
            [s.length if s and not length else 0 for s, length in zip(found, lengths, strict=True)],
            dtype=torch.int32,
        )
        live = [index for index, session in enumerate(found) if session is not None]
        sessions = [session for session in found if session is not None]
        depth = min(request.depth, self._config.block_size - 1)
        width = self._width(request.width)
        top_ids = torch.zeros((len(found), depth, width), dtype=torch.int32)
        top_log_probs = torch.full((len(found), depth, width), -torch.inf)
        edges = torch.zeros((len(found), depth, width, width)) if self.model.candidate_selector else None
        places = torch.tensor(live, dtype=torch.int64)
        drafted = None
        if sessions:
            roots = request.root_tokens[places].long()
            drafted = self._take(sessions, FreshContext.of(request, live), roots, depth, width)
        if drafted is not None:
            top_ids[places] = drafted.ids.int().cpu()
            top_log_probs[places] = drafted.log_probs.cpu()
            if edges is not None and drafted.edge_log_probs is not None:
                edges[places] = drafted.edge_log_probs.cpu()
        if edges is None:
            return DraftResult(status, top_ids, top_log_probs, reused=reused)
        return DraftResult(status, top_ids, top_log_probs, edges, reused)

    def check_integrity(self) -> None:
        """Assert that pages and sessions agree."""
        self.sessions.check_integrity()

    def _open_or_find(self, request: DraftRequest) -> tuple[torch.Tensor, list[Session | None]]:
        sessions, salts = request.sessions, request.beginnings.salts
        prefixes: Sequence[Prefix | None] = [None] * len(sessions)
        if salts:
            ids = request.beginnings.split()
            prefixes = [Prefix(begun, salt) for begun, salt in zip(ids, salts, strict=True)]
        rows = zip(
            sessions.ids.tolist(),
            sessions.epochs.tolist(),
            sessions.lengths.tolist(),
            request.reserve.tolist(),
            prefixes,
            strict=True,
        )
        outcomes = [self.sessions.open_or_find(*row) for row in rows]
        status = torch.tensor([outcome for _, outcome in outcomes], dtype=torch.int32)
        return status, [session for session, _ in outcomes]

    def _take(
        self, sessions: Sequence[Session], fresh: FreshContext, roots: torch.Tensor, depth: int, width: int
    ) -> _Drafted | None:
        """Add new context to the sessions and draft behind it, nothing where `depth` is 0."""
        for session, count in zip(sessions, fresh.counts, strict=True):
            assert session.length + count <= session.pages.capacity, "context overruns the session's pages"
        steps = self._steps if depth > 0 else None
        if steps is not None and not steps.takes(len(sessions), width):
            steps = None
        if steps is None or max(fresh.counts) > self.block_size:  # a prompt's, for one
            self._extend(sessions, fresh)
            self._commit(sessions, fresh)
            fresh = fresh.taken()
        if steps is None:
            return self._candidates(sessions, roots, depth, width) if depth > 0 else None
        best = steps.candidates(sessions, roots, fresh)
        self._commit(sessions, fresh)
        edges = None if best.edge_log_probs is None else best.edge_log_probs[:, :depth]
        return _Drafted(best.ids[:, :depth, :width], best.log_probs[:, :depth, :width], edges)

    def _extend(self, sessions: Sequence[Session], fresh: FreshContext) -> None:
        """Write new context to the cache, all sequences and layers at once."""
        slots, positions = [], []
        for session, count in zip(sessions, fresh.counts, strict=True):
            stop = session.length + count
            slots.append(session.pages.slots[session.length : stop])
            positions.append(torch.arange(session.length, stop, device=self._device))
        features = fresh.features.to(self._device)
        if len(features):
            keys, values = self.model.context_kv(features, torch.cat(positions))
            self.pool.write_layers(torch.cat(slots), keys, values)

    def _commit(self, sessions: Sequence[Session], fresh: FreshContext) -> None:
        for session, ids in zip(sessions, fresh.ids, strict=True):
            self.sessions.commit(session, ids)  # its pages may be found by others from now on

    def _width(self, wanted: int) -> int:
        return self.model.width(wanted, self._embedding, self._target_ids)

    def _candidates(
        self, sessions: Sequence[Session], roots: torch.Tensor, depth: int, width: int
    ) -> _Drafted:
        """The best candidates of each position, best first.

        The block always has the trained width: fewer masks would change every proposal of a non-causal
        drafter. Only the rows that are wanted go through the output head.
        """
        roots = roots.to(self._device)
        block = torch.full(
            (len(sessions), self._config.block_size), self._config.mask_token_id, device=self._device
        )
        block[:, 0] = roots
        embeds = nn.functional.embedding(block, self._embedding) * self._config.input_embedding_scale
        lengths = torch.tensor([session.length for session in sessions], device=self._device)
        positions = lengths[:, None] + torch.arange(self._config.block_size, device=self._device)

        def read_context(layer: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self.pool.read(layer, sessions[sequence].pages, sessions[sequence].length)

        hidden = self.model(embeds.to(self.feature_dtype), positions, read_context)[:, 1 : depth + 1]
        logits = self.model.finish_logits(self._head(hidden)).float()
        top, ids = logits.topk(width, dim=-1)
        if self._target_ids is not None:
            ids = self._target_ids[ids]
        selector = self.model.candidate_selector
        edges = None if selector is None else selector.edge_log_probs(hidden, ids, top, roots)
        return _Drafted(ids, top - logits.logsumexp(dim=-1, keepdim=True), edges)
