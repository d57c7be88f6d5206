"""A target run by TensorRT-LLM, in the place of a transformers model: a step plan in, logits and taps out.

`TargetVerifier` drives it like any target: sessions, acceptance, sampling and grammars are the verifier's.
This module turns segments into the engine's batches; it knows no session id and accepts nothing.

    plan, three trees      rows       engine (at most max_rows a step)
    a  root, 2 nodes       0 1 2      step 1, 3 rows each: a, b with one padding row
    b  root, 1 node        3 4
    c  root, 9 nodes       5 … 14     step 2, 10 rows: c
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from ddtree.attention.plan import Segment, StepPlan
from ddtree.kv_cache import KvPool
from ddtree.models.target import TargetStep
from ddtree.trtllm.adapter import Batch, EngineStep, TreeEngine
from ddtree.trtllm.masks import pack
from ddtree.trtllm.pool import EnginePages, EnginePool, EngineRequest


class EngineTarget:
    """A target whose layers and cache are TensorRT-LLM's (`models.target.Target`). One forward at a time."""

    def __init__(self, engine: TreeEngine, *, vocab_size: int, context_length: int, max_nodes: int) -> None:
        """Take an engine with a loaded model.

        Args:
            engine: the engine; its cache is opened by `make_pool`.
            vocab_size: logits per row; the engine may give more, padded.
            context_length: most tokens a sequence may hold.
            max_nodes: most draft nodes of a tree.
        """
        self.engine = engine
        self.vocab_size = vocab_size
        self.context_length = context_length
        self._max_nodes = max_nodes

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations and cache."""
        return self.engine.sizes.dtype

    @property
    def device(self) -> torch.device:
        """Where logits and taps are."""
        return self.engine.sizes.device

    def make_pool(self, feature_size: int, *, budget_bytes: int, page_size: int) -> KvPool:
        """Open the engine's cache, `budget_bytes` in all with a projected feature beside each token."""
        sizes = self.engine.sizes
        assert page_size == sizes.tokens_per_block, f"{page_size} is no block of the engine"
        values = 2 * sizes.layers * sizes.kv_heads * sizes.head_dim + feature_size
        pages = max(1, budget_bytes // (values * sizes.dtype.itemsize * page_size))
        self.engine.open_cache(pages * page_size)
        return EnginePool(
            self.engine,
            feature_size=feature_size,
            pages=max(1, min(pages, self.engine.free_blocks())),
            page_size=page_size,
            padding=self._max_nodes,
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,  # [rows] int64
        plan: StepPlan,
        keep: torch.Tensor,  # [kept] int64, rows whose logits are wanted
    ) -> TargetStep:
        """Run one packed step; keys and values are staged in the engine's cache as a side effect."""
        assert isinstance(plan.pool, EnginePool), "a plan over pages of another target"
        last_rows = [segment.stop - 1 for segment in plan.segments]
        wants_all = keep.tolist() != last_rows
        steps, taps, logits = [], [], []
        for group in self._groups(plan.segments):
            first, stop = group[0].start, group[-1].stop
            step = self._run(group, token_ids[first:stop], plan.positions[first:stop], wants_all=wants_all)
            own = _own_rows(group, step.batch.counts).to(step.logits.device)
            taps.append([tap[own] for tap in step.taps])
            # Rows of all nodes, or already one per request.
            logits.append(step.logits[own] if len(step.logits) == sum(step.batch.counts) else step.logits)
            steps.append(step)
        plan.pool.staged = steps
        joined = torch.cat(logits)[:, : self.vocab_size]
        rows_given = len(joined) == len(token_ids)
        return TargetStep(
            joined[keep] if rows_given else joined,
            tuple(torch.cat(parts) for parts in zip(*taps, strict=True)),
        )

    def _run(
        self, group: Sequence[Segment], token_ids: torch.Tensor, positions: torch.Tensor, *, wants_all: bool
    ) -> EngineStep:
        if any(segment.sees is None for segment in group):
            for segment in group:
                _request(segment).prompt = segment.prefix + segment.count
            batch = _batch(group, [segment.count for segment in group], is_context=True)
            return self.engine.context(batch, token_ids, positions, wants_all=wants_all)
        width = max(segment.count for segment in group)
        batch = _batch(group, [width] * len(group), is_context=False)
        if width == 1:
            return self.engine.decode(batch, token_ids, positions)
        trees = pack(group, width)
        rows = _own_rows(group, batch.counts).to(token_ids.device)
        padded_ids = token_ids.new_zeros(len(group) * width)
        padded_ids[rows] = token_ids
        bases = torch.tensor([segment.prefix for segment in group], device=trees.offsets.device)
        padded_positions = (bases[:, None] + trees.offsets).reshape(-1)
        return self.engine.verify(batch, padded_ids, padded_positions, trees)

    def _groups(self, segments: Sequence[Segment]) -> Iterator[list[Segment]]:
        """Neighbours that make one engine step: all chunks or all trees, padded rows within the limit."""
        sizes = self.engine.sizes
        group: list[Segment] = []
        for segment in segments:
            width = max(item.count for item in (*group, segment))
            is_other_kind = bool(group) and (group[0].sees is None) != (segment.sees is None)
            is_full = (len(group) + 1) * width > sizes.max_rows or len(group) == sizes.max_requests
            if group and (is_other_kind or is_full):
                yield group
                group = []
            group.append(segment)
        yield group


def _request(segment: Segment) -> EngineRequest:
    pages = segment.pages
    assert isinstance(pages, EnginePages), "a session's pages are not the engine's"
    return pages.request


def _batch(group: Sequence[Segment], counts: Sequence[int], *, is_context: bool) -> Batch:
    requests = [_request(segment) for segment in group]
    prompts = counts if is_context else [request.prompt for request in requests]
    return Batch(
        tuple(request.handle for request in requests),
        tuple(segment.prefix for segment in group),
        tuple(counts),
        tuple(prompts),
    )


def _own_rows(group: Sequence[Segment], counts: Sequence[int]) -> torch.Tensor:
    """Which of the engine's rows, `counts` of each request, are the plan's: padding is left out."""
    starts = [0, *accumulate(counts)]
    rows = [torch.arange(start, start + s.count) for start, s in zip(starts, group, strict=False)]
    return torch.cat(rows)
