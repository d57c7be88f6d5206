"""The stage objects as they run without graphs: `TargetVerifier`, `Drafter` and `build_trees`.

The column that everything else is compared with, and the adapter to write another one by. Random weights
accept next to nothing, so a tree's shape is made up where its size alone matters.
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.gpu.placement import NEW_TOKENS, WIDTH, Placement
from benchmarks.gpu.shapes import RandomPair
from ddtree.accept import walk
from ddtree.attention.plan import Segment, StepPlan
from ddtree.draft import Drafter, DrafterLimits
from ddtree.kv_cache import KvPool
from ddtree.models.target import TargetStep
from ddtree.sampling import choose
from ddtree.sessions import Session, SessionTable
from ddtree.tree import build_trees
from ddtree.tree_mask import ancestor_bits, expand
from ddtree.types import (
    DraftRequest,
    DraftResult,
    SessionBatch,
    TreeBatch,
    TreeRequest,
    VerifyRequest,
)
from ddtree.verify import TargetVerifier, VerifierLimits

_PAGE_SIZE = 64
_FOREVER_S = 1e9
_BEST_PROBABILITY, _FALL = 0.6, 0.35  # of a made-up position's first candidate, and from one to the next


class EagerRound:
    """See `RoundBench`."""

    def __init__(self, pair: RandomPair, place: Placement) -> None:
        """Open a session of `place.context` tokens for each sequence; what is cached of them is noise."""
        self._pair, self._place = pair, place
        self._device = pair.target.device
        self._slots = place.context + place.most_nodes + 1
        feature_size = pair.shape.draft.hidden_size
        self._verifier = TargetVerifier(
            pair.target,
            pair.projection,
            VerifierLimits(
                self._budget(pair.target.cache_shape(feature_size).bytes_per_slot),
                _PAGE_SIZE, place.most_nodes, _FOREVER_S, prefix_cache=False,
            ),
            draft_hash="random",
            feature_size=feature_size,
        )  # fmt: skip
        draft = pair.shape.draft
        per_slot = 2 * len(draft.layers) * draft.num_kv_heads * draft.head_dim * pair.target.dtype.itemsize
        self._drafter = Drafter(
            pair.draft,
            DrafterLimits(self._budget(per_slot), _PAGE_SIZE, _FOREVER_S, prefix_cache=False),
            embedding=pair.target.embedding,
            head=pair.target.head,
            draft_hash="random",
        )
        self._sessions = self._fill(self._verifier.sessions, self._verifier.pool, place.context)
        self._known = place.context - NEW_TOKENS
        self._draft_sessions = self._fill(self._drafter.sessions, self._drafter.pool, self._known)
        self._new = torch.randn(
            place.batch * NEW_TOKENS, feature_size, dtype=pair.target.dtype, device=self._device
        )
        self._trees: dict[int, TreeBatch] = {}
        self._verified: tuple[TreeBatch, StepPlan, TargetStep, torch.Tensor] | None = None
        self._drafted = self._draft()

    def plain(self) -> None:
        """One row of each sequence through the verifier."""
        empty = TreeBatch.empty(self._place.batch)
        self._verifier.verify(self._request(empty)).bonus_tokens.tolist()
        self._rewind()

    @torch.inference_mode()
    def verify(self, nodes: int) -> None:
        """The step's plan, its masks, the forward, and the token of every row."""
        trees = self._tree(nodes)
        sees = expand(ancestor_bits(trees.parents, trees.counts))
        depths = nn.functional.pad(trees.depths.long(), (1, 0))
        rows = nodes + 1
        segments = tuple(
            Segment(at * rows, rows, session.pages, session.length, depths[at], sees[at, :rows, :rows])
            for at, session in enumerate(self._sessions)
        )
        plan = StepPlan.build(self._verifier.pool, segments)
        tokens = nn.functional.pad(trees.tokens.long(), (1, 0)).flatten()
        keep = torch.arange(len(tokens), device=self._device)
        step = self._pair.target.forward(tokens, plan, keep)
        chosen = choose(step.logits).view(self._place.batch, rows)
        self._verified = (trees, plan, step, chosen)

    def draft(self) -> None:
        """One draft of all sequences."""
        self._drafted = self._draft()

    def build(self, nodes: int) -> None:
        """The heap, on the CPU."""
        self._build(self._drafted, nodes)

    @torch.inference_mode()
    def settle(self, nodes: int) -> None:
        """Walk, move the accepted rows, and keep their projected features, as the verifier's commit does."""
        assert self._verified is not None, "verify comes first"
        trees, plan, step, chosen = self._verified
        assert trees.tokens.shape[1] == nodes, "the last verify had another size"
        accepted = walk(trees, chosen)
        sources, destinations, rows = [], [], []
        for at, (session, segment) in enumerate(zip(self._sessions, plan.segments, strict=True)):
            length = int(accepted.accepted_counts[at]) + 1
            path = segment.start + accepted.path_nodes[at, :length]
            rows.append(path)
            sources.append(plan.slots[path])
            destinations.append(session.pages.slots[session.length : session.length + length])
        source, destination, kept = torch.cat(sources), torch.cat(destinations), torch.cat(rows)
        if plan.recurrent is not None:
            plan.recurrent.commit(accepted.path_nodes, accepted.accepted_counts + 1)
        if not torch.equal(source, destination):
            self._verifier.pool.move(source, destination)
        features = self._pair.projection(torch.cat([tap[kept] for tap in step.taps], dim=-1))
        self._verifier.pool.features[destination] = features

    def round(self, nodes: int) -> None:
        """Draft, build, verify with its commit, and the accepted tokens as numbers of Python."""
        trees = self._build(self._draft(), nodes)
        verdict = self._verifier.verify(self._request(trees))
        verdict.accepted_tokens.tolist()
        verdict.bonus_tokens.tolist()
        self._rewind()

    def _draft(self) -> DraftResult:
        place = self._place
        result = self._drafter.draft(
            DraftRequest(
                sessions=self._batch(self._known),
                context_ids=_ints(place.batch * NEW_TOKENS, 0),
                context_features=self._new,
                counts=_ints(place.batch, NEW_TOKENS),
                root_tokens=_ints(place.batch, 1),
                reserve=_ints(place.batch, self._slots),
                depth=self._pair.shape.draft.draft_positions,
                width=WIDTH,
            )
        )
        for session in self._draft_sessions:
            session.length = self._known
        return result

    def _build(self, drafted: DraftResult, nodes: int) -> TreeBatch:
        batch = self._place.batch
        return build_trees(
            TreeRequest(
                drafted.top_ids, drafted.top_log_probs, _ints(batch, nodes),
                torch.zeros(batch, dtype=torch.bool), torch.zeros(0), drafted.edge_log_probs,
            )
        )  # fmt: skip

    def _tree(self, nodes: int) -> TreeBatch:
        """A tree such as a drafter that is often right leads to, the same for every sequence."""
        if nodes not in self._trees:
            depth, width = self._pair.shape.draft.draft_positions, min(WIDTH, self._pair.target.vocab_size)
            per_rank = torch.log(_BEST_PROBABILITY * _FALL ** torch.arange(width, dtype=torch.float64))
            shape = (self._place.batch, depth, width)
            ids = torch.arange(width, dtype=torch.int32).expand(shape)
            made = self._build(
                DraftResult(_ints(self._place.batch, 0), ids, per_rank.float().expand(shape)), nodes
            )
            self._trees[nodes] = TreeBatch(
                *(part.to(self._device) for part in (made.tokens, made.parents, made.depths, made.counts))
            )
        return self._trees[nodes]

    def _request(self, trees: TreeBatch) -> VerifyRequest:
        roots = _ints(self._place.batch, 1)
        return VerifyRequest(self._batch(self._place.context), roots, trees)

    def _batch(self, length: int) -> SessionBatch:
        batch = self._place.batch
        return SessionBatch(torch.arange(batch), _ints(batch, 0), _ints(batch, length))

    def _rewind(self) -> None:
        for session in self._sessions:
            session.length = self._place.context

    def _fill(self, table: SessionTable, pool: KvPool, length: int) -> list[Session]:
        pool.keys_values.normal_()
        opened = []
        for session_id in range(self._place.batch):
            session = table.open(session_id, 0, self._slots)
            assert session is not None, "the pool was made for these sessions"
            session.length = length
            opened.append(session)
        return opened

    def _budget(self, bytes_per_slot: int) -> int:
        return self._place.batch * -(-self._slots // _PAGE_SIZE) * _PAGE_SIZE * bytes_per_slot


def _ints(count: int, value: int) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.int32)
