"""A drafter stage and the same draft over device rows, side by side, with drafts as small as they may be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddtree.device.drafting import DeviceCandidates, DeviceDraft
from ddtree.device.kernels.top import TopChoice, top_by_torch
from ddtree.device.rows import DeviceRows
from ddtree.draft import Drafter, DrafterLimits
from ddtree.kv_cache import CacheShape, KvPool
from ddtree.models.dflash import DFlashDraft
from ddtree.models.draft_checkpoint import open_checkpoint
from ddtree.types import DraftRequest, DraftResult, SessionBatch
from tests.fakes.device import DEVICE
from tests.fakes.random_draft import write_dflash2, write_draft, write_speculators

if TYPE_CHECKING:
    from ddtree.device.fused_layers import MakeLinear

PAGE, PAGES, HIDDEN, VOCABULARY, BLOCK, WIDTH = 4, 4, 32, 50, 4, 7
# Of log-probabilities. The interpreter does not know bfloat16's product: half floats stand for it there.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.15}
# As small as it may be: in the interpreter each row, head and layer is a program of its own.
SMALL = {
    "block_size": BLOCK, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "layer_types": ["full_attention"] * 2,
}  # fmt: skip


def small(folder: Path, **changes: Any) -> Path:
    return write_draft(folder, **{**SMALL, **changes})


def small_dflash2(folder: Path, **changes: Any) -> Path:
    sizes = {"block_size": BLOCK, **changes.pop("dflash_config", {})}
    base = {**SMALL, "block_size": None, "layer_types": ["sliding_attention"] * 2, "sliding_window": 5}
    return write_dflash2(folder, **{**base, **changes, "dflash_config": sizes})


def small_speculators(folder: Path) -> Path:
    nested = {name: SMALL[name] for name in SMALL if name not in ("block_size", "layer_types")}
    return write_speculators(folder, block_size=BLOCK, transformer_layer_config=nested)


def fresh_pool(model: DFlashDraft, places: int, dtype: torch.dtype) -> KvPool:
    config = model.config
    shape = CacheShape(len(config.layers), config.num_kv_heads, config.head_dim, dtype=dtype)
    budget = shape.bytes_per_slot * PAGE * PAGES * places
    pool = KvPool(shape, budget_bytes=budget, page_size=PAGE, device=DEVICE)
    pool.keys_values.fill_(float("nan"))  # whoever reads what was never written shows it
    return pool


class Pair:
    """A drafter stage with sessions, and the same draft over device rows with pages in any order."""

    def __init__(
        self,
        folder: Path,
        lives: Sequence[bool],
        dtype: torch.dtype = torch.float32,
        top: TopChoice = top_by_torch,
        linear: MakeLinear | None = None,
    ) -> None:
        torch.manual_seed(5)
        self.lives, self.dtype, places = lives, dtype, len(lives)
        self.live = [place for place, is_live in enumerate(lives) if is_live]
        checkpoint = open_checkpoint(folder)
        model = DFlashDraft.load(checkpoint, dtype, DEVICE)
        embedding = torch.randn(VOCABULARY, HIDDEN).to(DEVICE, dtype)
        count = VOCABULARY
        self.target_ids = None
        if checkpoint.config.draft_vocab_size < VOCABULARY:
            count = checkpoint.config.draft_vocab_size
            self.target_ids = torch.randperm(VOCABULARY)[:count].to(DEVICE)
        head = nn.Linear(HIDDEN, count, bias=False).to(DEVICE, dtype)
        self.drafter = Drafter(
            model, DrafterLimits(1 << 20, page_size=PAGE, session_ttl_s=600), embedding=embedding, head=head,
            draft_hash="one", target_ids=self.target_ids,
        )  # fmt: skip
        self.pool = fresh_pool(model, places, dtype)
        self.draft = DeviceDraft(model, embedding, head, self.target_ids, self.pool, top=top, linear=linear)
        self.rows = DeviceRows.empty(places, BLOCK, PAGES, PAGE, DEVICE)
        self.rows.page_table.copy_(torch.randperm(places * PAGES).view(places, PAGES))
        self.rows.depths.copy_(torch.arange(BLOCK))
        self.rows.counts.copy_(torch.tensor(lives).int() * BLOCK)
        self.rows.slots.fill_(1)  # not for the draft to look at
        self.most_context = PAGES * PAGE

    def extend(self, counts: Sequence[int], at_most: int) -> DraftRequest:
        """Give live places new context; the rest of their rows, and empty ones', are another's."""
        features = torch.full((len(counts), at_most, HIDDEN), 9.0).to(DEVICE, self.dtype)
        for place in self.live:
            features[place, : counts[place]] = torch.randn(counts[place], HIDDEN).to(DEVICE, self.dtype)
        self.lengths = self.rows.lengths[self.live].cpu()
        on_device = torch.tensor(counts).int().to(DEVICE)
        self.draft.extend(features, on_device, self.rows)
        self.rows.lengths.add_(on_device)
        return self._request(torch.cat([features[place, : counts[place]] for place in self.live]), counts)

    def _request(self, features: torch.Tensor, counts: Sequence[int]) -> DraftRequest:
        size, own = len(self.live), torch.tensor([counts[place] for place in self.live]).int()
        sessions = SessionBatch(torch.tensor(self.live), torch.zeros(size).int(), self.lengths.int())
        return DraftRequest(
            sessions, torch.zeros(int(own.sum())).int(), features, own, torch.zeros(size).int(),
            torch.full((size,), self.most_context).int(), depth=BLOCK - 1, width=WIDTH,
        )  # fmt: skip

    def round(self, counts: Sequence[int], roots: Sequence[int], at_most: int = 8) -> DeviceCandidates:
        """Extend both and draft with both; what they say of live places must agree."""
        request = self.extend(counts, at_most)
        request.root_tokens.copy_(torch.tensor([roots[place] for place in self.live]))
        wanted = self.drafter.draft(request)
        found = self.draft.draft(torch.tensor(roots).to(DEVICE), self.rows, WIDTH)
        self._compare(found, wanted)
        return found

    def _compare(self, found: DeviceCandidates, wanted: DraftResult) -> None:
        close = TOLERANCE[self.dtype]
        assert found.log_probs.isfinite().all(), "also of empty places"
        log_probs = found.log_probs[self.live].cpu()
        torch.testing.assert_close(log_probs, wanted.top_log_probs, rtol=0, atol=close)
        assert found.ids.dtype is torch.int32
        if self.dtype is torch.float32:
            assert torch.equal(found.ids[self.live].cpu(), wanted.top_ids)
        assert (found.edge_log_probs is None) == (not wanted.edge_log_probs.numel())
        if found.edge_log_probs is not None:
            edges = found.edge_log_probs[self.live].cpu()
            torch.testing.assert_close(edges, wanted.edge_log_probs, rtol=0, atol=close)
