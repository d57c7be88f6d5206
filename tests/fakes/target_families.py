"""Small random checkpoints, one per family of targets, with what makes the family special switched on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.fakes.tiny_models import CONTEXT_LENGTH, EOS_ID, HIDDEN, VOCAB_SIZE, make_tokenizer

LAYERS = 4
WINDOW = 8
ALTERNATING = ["sliding_attention", "full_attention"] * 2
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT_LENGTH,
    "initializer_range": 0.35,
    "bos_token_id": 256,
    "eos_token_id": EOS_ID,
    "pad_token_id": EOS_ID,
}
SLIDING = {"layer_types": ALTERNATING, "sliding_window": WINDOW}


def _rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 500.0, **values}}


def _gemma3(**changes: Any) -> Gemma3TextConfig:
    values = {
        **COMMON,
        **SLIDING,
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": 20.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
        },
    }
    return Gemma3TextConfig(**{**values, **changes})


def _gemma3_vision() -> Gemma3Config:
    """As published from 4B on: the text model inside one that also reads images."""
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    tokens = {"boi_token_index": 260, "eoi_token_index": 261, "image_token_index": 262}
    special = {"eos_token_id": EOS_ID, "pad_token_id": EOS_ID, "bos_token_id": 256}
    return Gemma3Config(
        text_config=_gemma3().to_dict(), vision_config=vision, mm_tokens_per_image=4, **tokens, **special
    )


def _moe(**changes: Any) -> Qwen3MoeConfig:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return Qwen3MoeConfig(**{**COMMON, **experts, "norm_topk_prob": True, **changes})


def _gpt_oss() -> GptOssConfig:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    yarn = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
    yarn |= {"original_max_position_embeddings": 128}
    return GptOssConfig(**COMMON, **SLIDING, **experts, rope_parameters=yarn)


# Each turns on what a tree could get wrong in that family.
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**COMMON),
    "llama, tied and biased": lambda: LlamaConfig(
        **COMMON, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama, rope llama3": lambda: LlamaConfig(
        **COMMON,
        **_rope(
            rope_type="llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama, rope dynamic": lambda: LlamaConfig(**COMMON, **_rope(rope_type="dynamic", factor=4.0)),
    "qwen2": lambda: Qwen2Config(**COMMON),
    "qwen2, sliding": lambda: Qwen2Config(**COMMON, **SLIDING, use_sliding_window=True),
    "qwen3": lambda: Qwen3Config(**COMMON),
    "qwen3, sliding": lambda: Qwen3Config(**COMMON, **SLIDING, use_sliding_window=True),
    "qwen3 moe": _moe,
    "qwen3 moe, some layers dense": lambda: _moe(mlp_only_layers=[1], norm_topk_prob=False),
    "gemma2": lambda: Gemma2Config(
        **COMMON,
        **SLIDING,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=20.0,
    ),
    "gemma3": _gemma3,
    "gemma3 with a vision tower": _gemma3_vision,
    "gpt-oss": _gpt_oss,
}


def make_family(folder: Path, name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Save a checkpoint of one of `FAMILIES`."""
    return save_checkpoint(folder, FAMILIES[name](), seed=seed, dtype=dtype)


def save_checkpoint(
    folder: Path, config: PretrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32, **save: Any
) -> Path:
    """Save a random model of any configuration with the small tokenizer.

    Parameters that start as zeros or ones (norms, biases, sinks) are moved too: at their start a norm that
    scales by `1 + weight` and one that scales by `weight` could be taken for each other.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = EOS_ID
    model.to(dtype).save_pretrained(folder, **save)
    make_tokenizer().save_pretrained(folder)
    return folder
