"""The drafter in training: DFlash v1 (arXiv 2602.06036) over many blocks of many sequences at once.

Parameters have the names and shapes of z-lab's checkpoint format, float32; the arithmetic runs in the dtype
of the inputs. `ddtree.models.dflash` is the same function arranged for serving. This module knows neither the
target nor how blocks are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from ddtree.errors import CheckpointError
from ddtree.models.draft_config import DraftConfig
from ddtree.models.rotary import Rotary, Rotation


@dataclass(frozen=True)
class BlockBatch:
    """Blocks to draft, a fixed number of every sequence."""

    taps: torch.Tensor  # [S, n, taps * H] of whole sequences
    embeds: torch.Tensor  # [S, A, B, H] root and mask embeddings
    anchors: torch.Tensor  # [S, A] the root tokens' positions: a block sees the context before its root


class Linear(nn.Linear):
    """A matmul in the dtype of its input, whatever the weights are kept in."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply `[..., inputs]` to `[..., outputs]`."""
        return F.linear(rows, self.weight.to(rows.dtype))


class Norm(nn.Module):
    """RMS norm in the dtype of its input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Norm the last axis."""
        return F.rms_norm(rows, rows.shape[-1:], self.weight.to(rows.dtype), self._eps)


class TrainedDraft(nn.Module):
    """The drafter's projection, layers and final norm."""

    def __init__(self, config: DraftConfig) -> None:
        """Make a drafter with fresh weights.

        Raises:
            CheckpointError: the configuration is not plain DFlash v1.
        """
        super().__init__()
        for what, is_there in (
            ("DFlash 2 parts", config.dflash2 is not None),
            ("a vocabulary of its own", config.draft_vocab_size != config.vocab_size),
            ("biases", config.attention_bias),
            ("causal or sliding layers", any(layer.is_causal or layer.window for layer in config.layers)),
            ("changed logits", config.output_multiplier != 1 or config.final_logit_softcapping is not None),
        ):
            if is_there:
                raise CheckpointError(f"draft: has {what}; only plain DFlash v1 drafters can be trained")
        self.config = config
        self.fc = Linear(config.feature_size, config.hidden_size)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in config.layers)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self._rotary = Rotary(config)
        self._initialise()

    def forward(
        self, batch: BlockBatch, layers: Sequence[Callable[..., torch.Tensor]] | None = None
    ) -> torch.Tensor:
        """Give hidden states `[S, A, B, H]` after the final norm, before the output head.

        Args:
            batch: what to draft.
            layers: what to call in place of `self.layers`: the same functions, compiled.
        """
        sequences, length, _ = batch.taps.shape
        _, blocks, width, hidden_size = batch.embeds.shape
        device, dtype = batch.embeds.device, batch.embeds.dtype
        features = self.hidden_norm(self.fc(batch.taps.to(dtype)))
        context_turn = self._rotary(torch.arange(length, device=device), dtype)
        within = torch.arange(width, device=device)
        positions = (batch.anchors[..., None] + within).flatten(1)
        block_turn = self._rotary(positions, dtype)
        mask = self._mask(batch.anchors, length, width, dtype)
        hidden = batch.embeds.reshape(sequences, blocks * width, hidden_size)
        for layer in self.layers if layers is None else layers:
            hidden = layer(hidden, features, block_turn, context_turn, mask)
        normed: torch.Tensor = self.norm(hidden)
        return normed.view(sequences, blocks, width, hidden_size)

    def _mask(self, anchors: torch.Tensor, length: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """What each row sees, `[S, 1, group * A * B, n + A * B]`, added to the scores.

        A row sees the context before its own root and all rows of its own block. With two blocks of two rows,
        roots at 1 and 2, and three tokens of context:

            T F F | T T F F
            T F F | T T F F
            T T F | F F T T
            T T F | F F T T
        """
        sequences, rows = anchors.shape[0], anchors.shape[1] * width
        device = anchors.device
        roots = anchors.repeat_interleave(width, 1)
        context = torch.arange(length, device=device) < roots[..., None]
        owner = torch.arange(rows, device=device) // width
        block = (owner[:, None] == owner).expand(sequences, -1, -1)
        seen = torch.cat((context, block), -1)
        mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
        group = self.config.num_heads // self.config.num_kv_heads
        return mask[:, None].expand(-1, group, -1, -1).reshape(sequences, 1, group * rows, -1)

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        for layer in self.layers:  # residual branches start small, so that depth does not hurt at first
            assert isinstance(layer, Layer)
            for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
                nn.init.normal_(last.weight, std=0.2 * last.in_features**-0.5)


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(
        self,
        hidden: torch.Tensor,  # [S, A * B, H]
        features: torch.Tensor,  # [S, n, H]
        block_turn: Rotation,
        context_turn: Rotation,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Give the rows `[S, A * B, H]` after this layer."""
        rows = self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(rows, features, block_turn, context_turn, mask)
        output: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Attention(nn.Module):
    """Block rows attend to context features and to their own block."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self._heads, self._kv_heads, self._width = config.num_heads, config.num_kv_heads, config.head_dim
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, queries)
        self.k_proj = Linear(config.hidden_size, keys)
        self.v_proj = Linear(config.hidden_size, keys)
        self.o_proj = Linear(queries, config.hidden_size)
        self.q_norm = Norm(config.head_dim, config.rms_norm_eps)
        self.k_norm = Norm(config.head_dim, config.rms_norm_eps)

    def forward(
        self,
        rows: torch.Tensor,
        features: torch.Tensor,
        block_turn: Rotation,
        context_turn: Rotation,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Give what attention adds to the rows, `[S, A * B, H]`."""
        query = block_turn.turn(self.q_norm(self.q_proj(rows).unflatten(-1, (-1, self._width))))
        keys, values = [], []
        for source, turn in ((features, context_turn), (rows, block_turn)):
            keys.append(turn.turn(self.k_norm(self.k_proj(source).unflatten(-1, (-1, self._width)))))
            values.append(self.v_proj(source).unflatten(-1, (-1, self._width)))
        # The query heads of one key head become rows of it, so that no key is repeated.
        sequences, count = rows.shape[:2]
        grouped = query.view(sequences, count, self._kv_heads, -1, self._width).permute(0, 2, 3, 1, 4)
        seen = F.scaled_dot_product_attention(
            grouped.reshape(sequences, self._kv_heads, -1, self._width),
            torch.cat(keys, 1).transpose(1, 2),
            torch.cat(values, 1).transpose(1, 2),
            attn_mask=mask,
        )
        by_row = seen.view(sequences, self._kv_heads, -1, count, self._width).permute(0, 3, 1, 2, 4)
        output: torch.Tensor = self.o_proj(by_row.reshape(sequences, count, -1))
        return output


class Mlp(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Give what it adds to the rows, `[..., H]`."""
        output: torch.Tensor = self.down_proj(F.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return output
