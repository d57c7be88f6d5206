"""Small random checkpoints of targets with Gated DeltaNet layers beside attention.

Their layers start with a decay that forgets nearly everything within a token or two, which would hide a state
that is read or committed wrongly; here heads remember from a few tokens to hundreds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from transformers.models.qwen3_5 import Qwen3_5Config

from tests.fakes.target_families import COMMON as LOUD
from tests.fakes.target_families import LAYERS
from tests.fakes.tiny_models import EOS_ID, make_tokenizer

# Not as loud as the other families: rounding would grow with every layer, in transformers' own forward too.
COMMON: dict[str, Any] = {**LOUD, "initializer_range": 0.12}
# Two value heads per key head, a key size unlike the value size, and attention first, last and in between.
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
           "shared_expert_intermediate_size": 16}  # fmt: skip
USUAL = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
TURNED = ["full_attention", "linear_attention", "full_attention", "linear_attention"]


def _text(**changes: Any) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(**{**COMMON, **LINEAR, "layer_types": USUAL, **changes})


def _with_vision() -> Qwen3_5Config:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
              "patch_size": 4, "num_position_embeddings": 16}  # fmt: skip
    return Qwen3_5Config(
        text_config=_text().to_dict(), vision_config=vision, eos_token_id=EOS_ID, pad_token_id=EOS_ID
    )


HYBRIDS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3-next": lambda: Qwen3NextConfig(**COMMON, **LINEAR, **EXPERTS, layer_types=USUAL),
    "qwen3-next, kernel 2": lambda: Qwen3NextConfig(
        **COMMON, **LINEAR, **EXPERTS, layer_types=TURNED, mlp_only_layers=[1], linear_conv_kernel_dim=2
    ),
    "qwen3.5": _text,
    "qwen3.5, other order": lambda: _text(layer_types=TURNED, linear_num_value_heads=2),
    "qwen3.5 moe": lambda: Qwen3_5MoeTextConfig(**COMMON, **LINEAR, **EXPERTS, layer_types=USUAL),
    "qwen3.5 with a vision tower": _with_vision,
}
assert all(len(kinds) == LAYERS for kinds in (USUAL, TURNED))


def make_hybrid(folder: Path, name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Save a checkpoint of one of `HYBRIDS` with the small tokenizer."""
    torch.manual_seed(seed)
    config = HYBRIDS[name]()
    is_whole = isinstance(config, Qwen3_5Config)
    model = Qwen3_5ForConditionalGeneration(config) if is_whole else AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            if label.endswith("A_log"):
                parameter.copy_(torch.linspace(0.002, 0.3, len(parameter)).log())
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = EOS_ID
    model.eval().to(dtype).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
