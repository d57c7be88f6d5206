"""A small engine behind the recorded interface: torch on a CPU, with the classes and attributes we touch.

Keyword arguments arrive already checked against a contract (`trtllm_library`), so these classes take what
they use. `FakeModel.turns_by_position_ids` chooses between two families: keys turned in the kernel by length
and offset, or outside of it by position id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from transformers import LlamaForCausalLM

from tests.fakes.trtllm_attention import PagedPool, causal_attention, tree_attention, turn


class CacheType:
    SELF = "self"


class DataType:
    HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32


class LlmRequestState:
    CONTEXT_INIT, GENERATION_IN_PROGRESS = "context", "generation"


class SpeculativeDecodingMode:
    DFLASH = "dflash"


class Plain(SimpleNamespace):
    """An object of arguments and nothing else."""


class ScheduledRequests:
    def __init__(self) -> None:
        self.generation_requests: list[Any] = []


class KVCacheManager:
    def __init__(self, **sizes: Any) -> None:
        assert not sizes["kv_cache_config"].enable_block_reuse
        assert sizes["kv_cache_type"] == CacheType.SELF
        assert sizes["dtype"] == torch.float32
        self.tokens_per_block = sizes["tokens_per_block"]
        self.max_seq_len = sizes["max_seq_len"]
        self.max_batch_size = sizes["max_batch_size"]
        blocks = sizes["kv_cache_config"].max_tokens // self.tokens_per_block
        self.pool = PagedPool(
            sizes["num_layers"], blocks, self.tokens_per_block, sizes["num_kv_heads"], sizes["head_dim"]
        )
        self.max_draft_len = self.max_total_draft_tokens = 0

    def add_dummy_requests(self, request_ids: Sequence[int], token_nums: Sequence[int]) -> list[Any] | None:
        (request_id,), (tokens,) = request_ids, token_nums
        assert len(self.pool.tables) < self.max_batch_size
        if not self.pool.open(request_id, tokens):
            return None
        return [Plain(py_request_id=request_id, state=LlmRequestState.CONTEXT_INIT)]

    def free_resources(self, request: Any) -> None:
        self.pool.close(request.py_request_id)

    def get_num_free_blocks(self) -> int:
        return len(self.pool.free)

    def shutdown(self) -> None:
        assert not self.pool.tables, f"requests {sorted(self.pool.tables)} are still open"


def relocate(
    cache_manager: KVCacheManager,
    scheduled_batch: ScheduledRequests,
    attn_metadata: TrtllmAttentionMetadata,
    kv_cache_dtype_byte_size: float,
) -> None:
    """Row by row, from the recorded operation: draft rows begin `max_total_draft_tokens` before the end."""
    assert kv_cache_dtype_byte_size == 4
    for index, request in enumerate(scheduled_batch.generation_requests):
        assert request.state == LlmRequestState.GENERATION_IN_PROGRESS
        indices = request.py_num_accepted_draft_tokens_indices
        assert request.py_num_accepted_draft_tokens == len(indices)
        assert request.py_rewind_len == cache_manager.max_total_draft_tokens - len(indices)
        start = int(attn_metadata.kv_lens_cuda[index]) - cache_manager.max_total_draft_tokens
        start -= request.py_rewind_draft_token_separate_adjustment
        for place, draft in enumerate(indices):
            cache_manager.pool.copy(request.py_request_id, start + draft, start + place)


class SpecTreeManager:
    """Draft trees; what the attention reads of it depends on the recorded state."""

    def __init__(self, **sizes: Any) -> None:
        assert sizes["use_dynamic_tree"]
        assert sizes["eagle_choices"] is None
        self.size = sizes["max_num_requests"]
        self.max_total_draft_tokens = sizes["max_total_draft_tokens"]
        rows = self.max_total_draft_tokens + 1
        width = max(rows, sizes["dynamic_tree_max_topK"] * sizes["max_draft_len"])
        assert width == rows, "a wider buffer has another row stride than the kernel reads"
        words = -(-rows // 32)
        self.spec_dec_packed_mask = torch.zeros((self.size, rows, words), dtype=torch.int32)
        self.spec_dec_position_offsets = torch.zeros((self.size, rows), dtype=torch.int32)
        self.slot_storage = Plain(
            packed_mask=torch.zeros((self.size + 1, rows, words), dtype=torch.int32),
            position_offsets=torch.zeros((self.size + 1, rows), dtype=torch.int32),
            all_ids_buf=torch.full((self.size,), self.size, dtype=torch.int64),
        )


class TrtllmAttentionMetadata:
    reads_slots: ClassVar[bool] = True
    has_tree_attention: ClassVar[bool] = True

    def __init__(self, **values: Any) -> None:
        self.seq_lens = values["seq_lens"].tolist()
        self.num_contexts = values["num_contexts"]
        self.cached = list(values["kv_cache_params"].num_cached_tokens_per_seq)
        self.manager: KVCacheManager = values["kv_cache_manager"]
        self.request_ids = values["request_ids"]
        self.runtime_features = values.get("runtime_features") or Plain(chunked_prefill=False)
        self.is_spec_decoding_enabled = values.get("is_spec_decoding_enabled", False)
        self.packed_mask: torch.Tensor | None = None
        self.position_offsets: torch.Tensor | None = None
        self.generation_lengths: list[int] = []
        size = len(self.seq_lens)
        assert size == len(self.cached) == len(self.request_ids) == len(values["prompt_lens"])
        assert size <= values["max_num_requests"]
        assert sum(self.seq_lens) <= values["max_num_tokens"]
        self.kv_lens_cuda = torch.zeros(size, dtype=torch.int32)

    def prepare(self) -> None:
        lengths = [cached + count for cached, count in zip(self.cached, self.seq_lens, strict=True)]
        assert max(lengths) <= self.manager.max_seq_len
        if self.num_contexts and any(self.cached):
            assert self.runtime_features.chunked_prefill, "a chunk behind cached tokens needs paged context"
        self.kv_lens_cuda = torch.tensor(lengths, dtype=torch.int32)

    def update_spec_dec_param(
        self,
        *,
        batch_size: int,
        max_total_draft_tokens: int,
        spec_tree_manager: SpecTreeManager,
        **flags: Any,
    ) -> None:
        assert all(flags[name] for name in ("is_spec_dec_tree", "is_spec_dec_dynamic_tree"))
        self.is_spec_decoding_enabled = self.has_tree_attention
        assert spec_tree_manager.max_total_draft_tokens == max_total_draft_tokens
        trees = spec_tree_manager
        if self.reads_slots:
            ids = trees.slot_storage.all_ids_buf[:batch_size]
            self.packed_mask = trees.slot_storage.packed_mask[ids].clone()
            self.position_offsets = trees.slot_storage.position_offsets[ids].clone()
        else:
            self.packed_mask = trees.spec_dec_packed_mask[:batch_size].clone()
            self.position_offsets = trees.spec_dec_position_offsets[:batch_size].clone()
        self.generation_lengths = [max_total_draft_tokens + 1] * batch_size


class TrtllmAttention:
    Metadata = TrtllmAttentionMetadata


class DFlashSpecMetadata:
    def __init__(self, **values: Any) -> None:
        assert values["spec_dec_mode"] == SpeculativeDecodingMode.DFLASH
        self.layers = sorted(values["layers_to_capture"])
        self.hidden_size = values["hidden_size"]
        width = self.hidden_size * len(self.layers)
        self.buffer = torch.zeros((values["max_num_tokens"], width), dtype=values["dtype"])

    def maybe_capture_hidden_states(
        self, layer: int, hidden: torch.Tensor, residual: torch.Tensor | None = None
    ) -> None:
        if layer in self.layers:
            at = self.layers.index(layer) * self.hidden_size
            rows = hidden if residual is None else hidden + residual
            self.buffer[: len(hidden), at : at + self.hidden_size] = rows

    def get_hidden_states(self, num_tokens: int) -> torch.Tensor:
        return self.buffer[:num_tokens]


@dataclass
class FakeModel:
    """A Llama of transformers, its layers called one by one with the engine's attention and cache."""

    turns_by_position_ids: ClassVar[bool] = False
    config: Any
    llama: Any = None

    def to(self, device: torch.device) -> FakeModel:
        assert device.type == "cpu"
        return self

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        assert {tensor.dtype for tensor in weights.values()} == {self.config.dtype}
        self.llama = LlamaForCausalLM(self.config).eval()
        self.llama.load_state_dict(weights)

    def forward(
        self,
        *,
        attn_metadata: TrtllmAttentionMetadata,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        return_context_logits: bool,
        spec_metadata: DFlashSpecMetadata,
    ) -> torch.Tensor:
        model = self.llama.model
        positions = position_ids[0] if self.turns_by_position_ids else _kernel_positions(attn_metadata)
        rows = model.embed_tokens(input_ids.long())
        for index, layer in enumerate(model.layers):
            attended = self._attend(index, layer, layer.input_layernorm(rows), positions, attn_metadata)
            residual = rows + attended
            hidden = layer.mlp(layer.post_attention_layernorm(residual))
            spec_metadata.maybe_capture_hidden_states(index, hidden, residual)
            rows = hidden + residual
        if not return_context_logits:
            rows = rows[torch.tensor(attn_metadata.seq_lens).cumsum(0) - 1]
        logits: torch.Tensor = self.llama.lm_head(model.norm(rows))
        return logits

    def _attend(
        self, index: int, layer: Any, rows: torch.Tensor, positions: torch.Tensor, m: TrtllmAttentionMetadata
    ) -> torch.Tensor:
        attention, rotary = layer.self_attn, self.llama.model.rotary_emb
        shape = (len(rows), -1, attention.head_dim)
        query = turn(rotary, attention.q_proj(rows).view(shape), positions)
        key = turn(rotary, attention.k_proj(rows).view(shape), positions)
        value = attention.v_proj(rows).view(shape)
        pool, start, keys, values = m.manager.pool, 0, [], []
        for request, cached, count in zip(m.request_ids, m.cached, m.seq_lens, strict=True):
            span = slice(start, start + count)
            pool.write(request, index, cached, key[span], value[span])
            read = pool.read(request, index, cached + count)
            keys.append(read[0])
            values.append(read[1])
            start += count
        if m.packed_mask is not None:
            assert m.generation_lengths == m.seq_lens
            lens = m.kv_lens_cuda.tolist()
            out = tree_attention(query, keys, values, m.packed_mask, m.generation_lengths, lens)
        else:
            parts = query.split(m.seq_lens)
            out = torch.cat([causal_attention(*part) for part in zip(parts, keys, values, strict=True)])
        attended: torch.Tensor = attention.o_proj(out.flatten(1))
        return attended


def _kernel_positions(m: TrtllmAttentionMetadata) -> torch.Tensor:
    """Length and offset, as a kernel that turns keys itself sees them."""
    if m.position_offsets is not None:
        return (torch.tensor(m.cached)[:, None] + m.position_offsets).flatten()
    return torch.cat([torch.arange(c, c + n) for c, n in zip(m.cached, m.seq_lens, strict=True)])
