"""The DFlash drafter (arXiv 2602.06036): one forward pass drafts a whole block of positions.

The block is the root token and `B - 1` mask tokens. Its rows see each other and, in every layer, keys and
values that are projected from the context features of the committed tokens. Those never change, so they are
computed once per token (`context_kv`), kept by the caller, and only read by the pass over the block
(`forward`), whose own keys and values live no longer than that. What DFlash 2 adds is in `dflash2`.

This module knows neither the target (embeddings and output head are the caller's), nor where context is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from ddtree.models.dflash2 import BlockConvolution, CandidateSelector, convolve
from ddtree.models.draft_checkpoint import DraftCheckpoint
from ddtree.models.draft_config import DraftConfig, LayerAttention
from ddtree.models.draft_weights import read_draft, read_projection
from ddtree.models.rotary import Rotary, Rotation

# Keys and values of one layer and one sequence of the packed batch, each [P_s, n_kv, head_dim].
ContextReader = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]


class FeatureProjection(nn.Module):
    """From tapped hidden states to the context features that the drafter's layers read."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    @classmethod
    def load(cls, checkpoint: DraftCheckpoint, dtype: torch.dtype, device: torch.device) -> FeatureProjection:
        """Load the projection alone."""
        with torch.device("meta"):
            module = cls(checkpoint.config)
        _assign(module, read_projection(checkpoint, dtype, device))
        return module

    def forward(
        self,
        taps: torch.Tensor,  # [n, taps * H] hidden states of the tapped layers, side by side
    ) -> torch.Tensor:
        """Project to `[n, H]`."""
        features: torch.Tensor = self.hidden_norm(self.fc(taps))
        return features


class DFlashDraft(nn.Module):
    """The drafter's layers. Linear modules are plain `nn.Linear`, so a caller may replace them."""

    def __init__(self, config: DraftConfig, rotary: Rotary) -> None:
        super().__init__()
        self.config = config
        num_layers, kv_size = len(config.layers), config.num_kv_heads * config.head_dim
        self.layers = nn.ModuleList(_DraftLayer(config, attention) for attention in config.layers)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        # One matmul gives a token's keys and values of all layers: twice as fast as one per layer for the few
        # tokens of a round, at the price of holding these weights twice.
        self.context_kv_proj = nn.Linear(
            config.hidden_size, num_layers * 2 * kv_size, bias=config.attention_bias
        )
        self.context_k_norm = nn.Parameter(torch.empty(num_layers, 1, config.head_dim))
        self.rotary = rotary
        self.candidate_selector: CandidateSelector | None = None
        if config.dflash2 is not None:
            sizes = (config.vocab_size, config.hidden_size, config.dflash2)
            self.candidate_selector = CandidateSelector(*sizes)

    @classmethod
    def load(cls, checkpoint: DraftCheckpoint, dtype: torch.dtype, device: torch.device) -> DFlashDraft:
        """Load the layers' weights; those of one input are joined into one matmul."""
        rotary = Rotary(checkpoint.config).to(device)  # computed, not loaded: it must not be made on `meta`
        with torch.device("meta"):
            module = cls(checkpoint.config, rotary)
        _assign(module, read_draft(checkpoint, dtype, device))
        return module

    def context_kv(
        self,
        features: torch.Tensor,  # [n, H] projected context features
        positions: torch.Tensor,  # [n] their tokens' positions in their sequences
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give keys and values of committed tokens, each `[L, n, n_kv, head_dim]`, for `forward` to read."""
        config = self.config
        kv = self.context_kv_proj(features)
        kv = kv.view(len(features), len(self.layers), 2, config.num_kv_heads, config.head_dim)
        keys, values = kv.unbind(2)
        keys = F.rms_norm(keys, (config.head_dim,), eps=config.rms_norm_eps) * self.context_k_norm
        rotation = self.rotary(positions, features.dtype)
        return rotation.turn(keys.transpose(0, 1)), values.transpose(0, 1)

    def forward(
        self,
        block_embeds: torch.Tensor,  # [S, B, H] root and mask embeddings, scaled
        positions: torch.Tensor,  # [S, B] P_s .. P_s + B - 1
        read_context: ContextReader,
    ) -> torch.Tensor:
        """Give the block's hidden states `[S, B, H]` after the final norm, before the output head."""
        num_sequences, block_size, hidden_size = block_embeds.shape
        rotation = self.rotary(positions.reshape(-1), block_embeds.dtype)
        sights = _Sights(block_size, self.config.num_heads // self.config.num_kv_heads, block_embeds.device)
        hidden = block_embeds.reshape(-1, hidden_size)
        for index, layer in enumerate(self.layers):
            context = [read_context(index, sequence) for sequence in range(num_sequences)]
            hidden = layer(hidden, rotation, context, sights)
        normed: torch.Tensor = self.norm(hidden)
        return normed.view(num_sequences, block_size, hidden_size)

    def width(self, wanted: int, embedding: torch.Tensor, target_ids: torch.Tensor | None) -> int:
        """Candidates per position when so many are wanted.

        There are no more than tokens to draft: those of the embedding `[V, H]` or, when the head is the
        draft's own, of `target_ids` `[V]`. A selector is made for a number of its own, whatever a tree can
        use.
        """
        if self.candidate_selector is not None:
            return self.candidate_selector.top_k
        return min(wanted, len(embedding if target_ids is None else target_ids))

    def finish_logits(self, head_output: torch.Tensor) -> torch.Tensor:
        """Turn the target head's output for drafted rows into the drafter's logits; any shape."""
        logits = head_output
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap


@dataclass(frozen=True)
class _Sight:
    """What the block's rows see of one layer's context and block."""

    first: int  # context before this is seen by no row
    mask: torch.Tensor | None  # [B * group, P - first + B] bool; None: everything is seen


class _Sights:
    """Sights by layer kind and context length, made once per pass: layers of a kind share them."""

    def __init__(self, block_size: int, group: int, device: torch.device) -> None:
        self._block_size, self._group, self._device = block_size, group, device
        self._made: dict[tuple[LayerAttention, int], _Sight] = {}

    def of(self, attention: LayerAttention, context_length: int) -> _Sight:
        key = (attention, context_length)
        if key not in self._made:
            self._made[key] = self._make(attention, context_length)
        return self._made[key]

    def _make(self, attention: LayerAttention, context_length: int) -> _Sight:
        window, block_size = attention.window, self._block_size
        stop = context_length + block_size
        first = 0 if window is None else max(0, context_length - window + 1)
        if not attention.is_causal and (window is None or stop <= window):
            return _Sight(first, None)
        rows = torch.arange(context_length, stop, device=self._device).unsqueeze(1)
        columns = torch.arange(first, stop, device=self._device)
        ahead = columns - rows
        mask = ahead <= 0 if attention.is_causal else torch.ones_like(ahead, dtype=torch.bool)
        if window is not None:
            mask &= ahead.abs() < window
        return _Sight(first, mask.repeat_interleave(self._group, 0))


class _DraftLayer(nn.Module):
    def __init__(self, config: DraftConfig, attention: LayerAttention) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _BlockAttention(config, attention)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _GatedMlp(config)
        self.attention_conv: BlockConvolution | None = None
        self.mlp_conv: BlockConvolution | None = None
        if config.dflash2 is not None:
            self.attention_conv = BlockConvolution(config.hidden_size, config.dflash2)
            self.mlp_conv = BlockConvolution(config.hidden_size, config.dflash2)

    def forward(
        self,
        hidden: torch.Tensor,  # [S * B, H]
        rotation: Rotation,
        context: Sequence[tuple[torch.Tensor, torch.Tensor]],
        sights: _Sights,
    ) -> torch.Tensor:
        def attend(rows: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.self_attn(rows, rotation, context, sights)
            return output

        count = len(context)
        rows = self.input_layernorm(hidden)
        hidden = hidden + _within(self.attention_conv, attend, rows, count)
        rows = self.post_attention_layernorm(hidden)
        return hidden + _within(self.mlp_conv, self.mlp, rows, count)


def _within(
    conv: BlockConvolution | None,
    inner: Callable[[torch.Tensor], torch.Tensor],
    rows: torch.Tensor,  # [S * B, H]
    num_sequences: int,
) -> torch.Tensor:
    """Run a sub-layer, between the two convolutions of DFlash 2 where there are any."""
    if conv is None:
        return inner(rows)
    blocks = rows.unflatten(0, (num_sequences, -1))
    into, out_of = conv.kernels(blocks).unbind(2)
    inner_rows = inner(convolve(blocks, into).flatten(0, 1))
    return convolve(inner_rows.unflatten(0, (num_sequences, -1)), out_of).flatten(0, 1)


class _BlockAttention(nn.Module):
    def __init__(self, config: DraftConfig, attention: LayerAttention) -> None:
        super().__init__()
        self._heads, self._kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._eps, self._attention = config.rms_norm_eps, attention
        qkv_heads = config.num_heads + 2 * config.num_kv_heads
        bias = config.attention_bias
        self.qkv_proj = nn.Linear(config.hidden_size, qkv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=bias)
        # Query and key heads are normed together: one row of weights per head.
        self.qk_norm = nn.Parameter(torch.empty(config.num_heads + config.num_kv_heads, config.head_dim))

    def forward(
        self,
        rows: torch.Tensor,  # [S * B, H]
        rotation: Rotation,
        context: Sequence[tuple[torch.Tensor, torch.Tensor]],
        sights: _Sights,
    ) -> torch.Tensor:
        block_size = len(rows) // len(context)
        qkv = self.qkv_proj(rows).view(len(rows), -1, self._head_dim)
        turned = self._heads + self._kv_heads
        heads = F.rms_norm(qkv[:, :turned], (self._head_dim,), eps=self._eps) * self.qk_norm
        queries, keys = rotation.turn(heads).split((self._heads, self._kv_heads), 1)
        values = qkv[:, turned:]
        outputs = []
        for index, (context_keys, context_values) in enumerate(context):
            sight = sights.of(self._attention, len(context_keys))
            own = slice(index * block_size, (index + 1) * block_size)
            all_keys = torch.cat((context_keys[sight.first :], keys[own]))
            all_values = torch.cat((context_values[sight.first :], values[own]))
            outputs.append(self._attend(queries[own], all_keys, all_values, sight.mask))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        output: torch.Tensor = self.o_proj(joined)
        return output

    def _attend(
        self,
        queries: torch.Tensor,  # [B, heads, head_dim]
        keys: torch.Tensor,  # [T, n_kv, head_dim]
        values: torch.Tensor,
        mask: torch.Tensor | None,  # [B * group, T]
    ) -> torch.Tensor:
        """Attend; the query heads of one key head become rows of it, so that no key is repeated."""
        block_size = len(queries)
        grouped = queries.reshape(block_size, self._kv_heads, -1, self._head_dim).transpose(0, 1)
        seen = F.scaled_dot_product_attention(
            grouped.reshape(1, self._kv_heads, -1, self._head_dim),
            keys.transpose(0, 1).unsqueeze(0),
            values.transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
        )
        by_row = seen.view(self._kv_heads, block_size, -1, self._head_dim).transpose(0, 1)
        return by_row.reshape(block_size, -1)


class _GatedMlp(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(rows).chunk(2, -1)
        output: torch.Tensor = self.down_proj(F.silu(gate) * up)
        return output


def _assign(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put loaded tensors in place of a module's parameters, ready for inference."""
    module.load_state_dict(tensors, assign=True)
    module.requires_grad_(False).eval()
