"""Rotary position embedding: rows are turned by angles that depend on their position alone.

The angles are worked out in float32 whatever the rows' type, since bf16 cannot tell neighbouring positions
apart beyond 256. This module knows configuration values and positions, not whose rows it turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ddtree.models.draft_config import DraftConfig


@dataclass(frozen=True)
class Rotation:
    """The turn of each row; signs are in `sin`, so that turning needs no negation."""

    cos: torch.Tensor  # [n, 1, head_dim]
    sin: torch.Tensor  # [n, 1, head_dim], first half negated

    def turn(
        self,
        heads: torch.Tensor,  # [..., n, heads, head_dim]
    ) -> torch.Tensor:
        """Turn every head of a row alike."""
        return torch.addcmul(heads * self.cos, heads.roll(heads.shape[-1] // 2, -1), self.sin)


class Rotary(nn.Module):
    """Makes rotations from positions."""

    inverse_frequencies: torch.Tensor  # [head_dim / 2] float32

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        frequencies, self._scale = _frequencies(config)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def forward(
        self,
        positions: torch.Tensor,  # [n]
        dtype: torch.dtype,
    ) -> Rotation:
        """Give the rotation of rows of `dtype` at `positions`."""
        angles = positions.to(torch.float32).unsqueeze(-1) * self.inverse_frequencies
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        both_cos, both_sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return Rotation(both_cos.to(dtype).unsqueeze(-2), both_sin.to(dtype).unsqueeze(-2))


def _frequencies(config: DraftConfig) -> tuple[torch.Tensor, float]:
    """Give inverse frequencies and the factor on sine and cosine; transformers knows the scaled kinds."""
    if config.rope["rope_type"] == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / config.rope["rope_theta"] ** exponents, 1.0
    # Imported here: transformers takes seconds, and published drafters are of the default kind.
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    values = Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope),
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[config.rope["rope_type"]](values, torch.device("cpu"))
    return frequencies, float(scale)
