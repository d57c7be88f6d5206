"""Runs a target in TensorRT-LLM's PyTorch backend without its executor: steps, cache, tree attention.

The order of calls follows NVIDIA's own unit test of an arbitrary tree with relocated cache rows
(tests/unittest/_torch/modeling/test_modeling_llama.py at 151c21c). Everything here is private API of theirs;
each call passes keywords that the contract records. Knows requests, rows and masks; no session, no tree
builder, no acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddtree.trtllm.library import EngineUnfit, Library
from ddtree.trtllm.masks import PackedTrees
from ddtree.trtllm.relocation import draft_indices

_BACKEND = "TRTLLM"
_DTYPES = {torch.float16: "HALF", torch.bfloat16: "BF16", torch.float32: "FLOAT"}


@dataclass(frozen=True)
class EngineSizes:
    """What the engine is built for."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    taps: tuple[int, ...]  # decoder layers whose outputs are captured, in the drafter's order
    max_length: int  # most tokens of one request, padding rows included
    tokens_per_block: int
    max_requests: int
    max_rows: int  # most rows of one step
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Batch:
    """The requests of one step, in the order of their rows."""

    requests: tuple[Any, ...]  # what `open` gave
    cached: tuple[int, ...]  # tokens of each that are in the cache
    counts: tuple[int, ...]  # rows of each
    prompts: tuple[int, ...]  # tokens of each that came in context steps


@dataclass(frozen=True)
class EngineStep:
    """What one step gave, and what its relocation needs."""

    batch: Batch
    metadata: Any
    logits: torch.Tensor  # [rows, V], or [requests, V] of the last rows
    taps: tuple[torch.Tensor, ...]  # per tap layer [rows, H]


class TreeEngine:
    """One loaded target with its paged cache. One call at a time."""

    def __init__(self, library: Library, sizes: EngineSizes) -> None:
        self._library = library
        self.sizes = sizes
        self._manager: Any = None
        self._model: Any = None
        self._capture: Any = None

    @property
    def library(self) -> Library:
        """The library that runs it."""
        return self._library

    def load(self, config: Any, weights: Mapping[str, torch.Tensor]) -> None:
        """Build the model of a transformers configuration and give it a checkpoint's tensors."""
        sizes = self.sizes
        model_config = self._library["ModelConfig"](pretrained_config=config, attn_backend=_BACKEND)
        with torch.device(sizes.device):
            model = self._library["AutoModelForCausalLM.from_config"](config=model_config)
            model = model.to(sizes.device)
            model.load_weights(weights=dict(weights))
            if hasattr(model, "post_load_weights"):
                model.post_load_weights()
        self._model = model
        # Sized for padded rows: a capture of more rows than its buffer has overruns it.
        self._capture = self._library["DFlashSpecMetadata"](
            max_num_requests=sizes.max_requests,
            max_draft_len=1,
            max_total_draft_tokens=1,
            spec_dec_mode=self._library["SpeculativeDecodingMode"].DFLASH,
            layers_to_capture=list(sizes.taps),
            hidden_size=sizes.hidden_size,
            max_num_tokens=sizes.max_rows,
            dtype=sizes.dtype,
        )

    def open_cache(self, max_tokens: int) -> None:
        """Allocate the paged cache for `max_tokens` tokens in all."""
        sizes = self.sizes
        self._manager = self._library["KVCacheManager"](
            # No reuse: a request's rows are ours alone, and a relocation must not reach another's.
            kv_cache_config=self._library["KvCacheConfig"](max_tokens=max_tokens, enable_block_reuse=False),
            kv_cache_type=self._library["CacheType"].SELF,
            num_layers=sizes.layers,
            num_kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            tokens_per_block=sizes.tokens_per_block,
            max_seq_len=sizes.max_length,
            max_batch_size=sizes.max_requests,
            mapping=self._library["Mapping"](world_size=1, tp_size=1, rank=0),
            dtype=getattr(self._library["DataType"], _DTYPES[sizes.dtype]),
        )

    def free_blocks(self) -> int:
        """Blocks that no request holds."""
        return int(self._manager.get_num_free_blocks())

    def open(self, request_id: int, tokens: int) -> Any:
        """Reserve blocks for all tokens a request may ever hold; None when there are too few.

        Nothing grows later and nothing is rewound in the engine: a step says how much of it is filled, so
        rejected rows are dropped by saying less.
        """
        opened = self._manager.add_dummy_requests(request_ids=[request_id], token_nums=[tokens])
        return opened[0] if opened else None

    def close(self, request: Any) -> None:
        """Give a request's blocks back."""
        self._manager.free_resources(request=request)

    def context(
        self, batch: Batch, token_ids: torch.Tensor, positions: torch.Tensor, *, wants_all: bool
    ) -> EngineStep:
        """Read chunks of committed tokens; each row sees those before it."""
        features = self._library["AttentionRuntimeFeatures"](chunked_prefill=True)
        metadata = self._metadata(batch, num_contexts=len(batch.requests), runtime_features=features)
        metadata.prepare()
        return self._forward(batch, metadata, token_ids, positions, wants_all=wants_all)

    def decode(self, batch: Batch, token_ids: torch.Tensor, positions: torch.Tensor) -> EngineStep:
        """One row per request. A tree of a root alone goes here: the kernels differ in rounding."""
        metadata = self._metadata(batch, num_contexts=0)
        metadata.prepare()
        return self._forward(batch, metadata, token_ids, positions, wants_all=True)

    def verify(
        self, batch: Batch, token_ids: torch.Tensor, positions: torch.Tensor, trees: PackedTrees
    ) -> EngineStep:
        """All rows of one tree per request; every row sees what its mask says.

        Raises:
            EngineUnfit: tree attention is switched off for this GPU.
        """
        drafts = trees.width - 1
        metadata = self._metadata(
            batch,
            num_contexts=0,
            is_spec_decoding_enabled=True,
            use_spec_decoding=True,
            is_spec_dec_tree=True,
            is_spec_dec_dynamic_tree=True,
        )
        metadata.prepare()
        metadata.update_spec_dec_param(
            batch_size=len(batch.requests),
            is_spec_decoding_enabled=True,
            is_spec_dec_tree=True,
            is_spec_dec_dynamic_tree=True,
            max_draft_len=drafts,
            max_total_draft_tokens=drafts,
            spec_tree_manager=self._tree_manager(trees),
        )
        if not metadata.is_spec_decoding_enabled:
            raise EngineUnfit("engine trtllm: this version has no tree attention for this GPU")
        return self._forward(batch, metadata, token_ids, positions, wants_all=True)

    def relocate(self, step: EngineStep, paths: Sequence[Sequence[int]]) -> None:
        """Bring each request's accepted path to the front of its draft rows.

        Args:
            step: a step of `verify`, and the last one of its requests.
            paths: per request, in the step's order, the accepted nodes, root first.
        """
        drafts = step.batch.counts[0] - 1
        for request, path in zip(step.batch.requests, paths, strict=True):
            indices = draft_indices(path)
            request.py_num_accepted_draft_tokens = len(indices)
            request.py_num_accepted_draft_tokens_indices = list(indices)
            request.py_rewind_len = drafts - len(indices)
            request.py_rewind_draft_token_separate_adjustment = 0
            request.state = self._library["LlmRequestState"].GENERATION_IN_PROGRESS
        scheduled = self._library["ScheduledRequests"]()
        scheduled.generation_requests = list(step.batch.requests)
        # The first draft row is found by subtracting this from each request's length; without a speculative
        # configuration the manager has 0 here, which would move rows beyond the tree.
        self._manager.max_draft_len = self._manager.max_total_draft_tokens = drafts
        arguments = {
            "scheduled_batch": scheduled,
            "attn_metadata": step.metadata,
            "kv_cache_dtype_byte_size": self.sizes.dtype.itemsize,
        }
        relocate = self._library["relocate"]
        if self._library.is_method("relocate"):
            relocate(self._manager, **arguments)
        else:
            relocate(cache_manager=self._manager, **arguments)

    def shutdown(self) -> None:
        """Give the cache back."""
        if self._manager is not None:
            self._manager.shutdown()

    def _metadata(self, batch: Batch, **more: Any) -> Any:
        backend = self._library["get_attention_backend"](backend_name=_BACKEND)
        assert backend.Metadata is self._library["TrtllmAttentionMetadata"], "another attention is installed"
        return backend.Metadata(
            seq_lens=torch.tensor(batch.counts, dtype=torch.int32),
            kv_cache_params=self._library["KVCacheParams"](
                use_cache=True, num_cached_tokens_per_seq=list(batch.cached)
            ),
            kv_cache_manager=self._manager,
            request_ids=[request.py_request_id for request in batch.requests],
            prompt_lens=list(batch.prompts),
            max_num_requests=len(batch.requests),
            max_num_tokens=self.sizes.max_rows,
            num_heads_per_kv=self.sizes.heads // self.sizes.kv_heads,
            **more,
        )

    def _tree_manager(self, trees: PackedTrees) -> Any:
        """The trees where this version's attention reads them.

        With one draft per step and layer the manager's buffers are exactly as wide as the trees, which one
        kernel demands: it reads rows by that width, packed one after another.
        """
        size, drafts = trees.offsets.shape[0], trees.width - 1
        manager = self._library["SpecTreeManager"](
            max_num_requests=size,
            use_dynamic_tree=True,
            max_total_draft_tokens=drafts,
            max_draft_len=drafts,
            eagle_choices=None,
            dynamic_tree_max_topK=1,
        )
        manager.spec_dec_packed_mask[:size].copy_(trees.mask)
        manager.spec_dec_position_offsets[:size].copy_(trees.offsets)
        if self._library.contract.trees_are_read_from == "slot_storage":
            slots = manager.slot_storage
            slots.packed_mask[:size].copy_(trees.mask)
            slots.position_offsets[:size].copy_(trees.offsets)
            slots.all_ids_buf[:size].copy_(torch.arange(size))
        return manager

    def _forward(
        self,
        batch: Batch,
        metadata: Any,
        token_ids: torch.Tensor,  # [rows]
        positions: torch.Tensor,  # [rows]
        *,
        wants_all: bool,
    ) -> EngineStep:
        # Positions are given for every row: some families turn keys by them, others in the kernel by offset.
        logits = self._model.forward(
            attn_metadata=metadata,
            input_ids=token_ids.to(torch.int32),
            position_ids=positions[None].to(torch.int32),
            return_context_logits=wants_all,
            spec_metadata=self._capture,
        )
        hidden = self._capture.get_hidden_states(num_tokens=len(token_ids)).clone()
        return EngineStep(batch, metadata, logits, self._in_drafters_order(hidden))

    def _in_drafters_order(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split captured rows by layer; the engine sorts the layers, the drafter may not have."""
        by_layer = dict(zip(sorted(self.sizes.taps), hidden.split(self.sizes.hidden_size, -1), strict=True))
        return tuple(by_layer[layer] for layer in self.sizes.taps)
