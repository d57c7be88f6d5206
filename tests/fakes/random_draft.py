"""Small DFlash v1 checkpoint folders with random weights, in z-lab's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

BASE_CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "attention_bias": False,
    "vocab_size": 50,
    "tie_word_embeddings": True,
    "layer_types": ["full_attention"] * 3,
    "use_sliding_window": False,
    "sliding_window": None,
    "num_target_layers": 8,
    "block_size": 6,
    "dflash_config": {"mask_token_id": 49, "target_layer_ids": [1, 3, 5]},
    "dtype": "float32",
}


def config_values(**changes: Any) -> dict[str, Any]:
    """A valid configuration with some values replaced; a value of None is left out."""
    merged = {**BASE_CONFIG, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def random_tensors(values: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """The tensors a folder with these values holds, listed here apart from the library's own list."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, head_dim = values["hidden_size"], values["intermediate_size"], values["head_dim"]
    queries, keys = values["num_attention_heads"] * head_dim, values["num_key_value_heads"] * head_dim
    taps = len(values["dflash_config"].get("target_layer_ids") or range(values["num_hidden_layers"]))
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(values["num_hidden_layers"]):
        layer = f"layers.{index}"
        for name, rows, columns in (
            ("self_attn.q_proj", queries, hidden),
            ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden),
            ("self_attn.o_proj", hidden, queries),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if values.get("attention_bias") and name.startswith("self_attn"):
                shapes[f"{layer}.{name}.bias"] = (rows,)
        for name, size in (
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", head_dim),
            ("self_attn.k_norm", head_dim),
        ):
            shapes[f"{layer}.{name}.weight"] = (size,)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        # Norm weights around 1, matrices that keep the scale of what passes through.
        is_matrix = len(shape) == 2
        tensors[name] = noise / shape[1] ** 0.5 * 1.5 if is_matrix else 1 + 0.3 * noise
    return tensors


def write_folder(folder: Path, values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """Write an unsharded checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_draft(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a valid random checkpoint with some configuration values replaced."""
    values = config_values(**changes)
    return write_folder(folder, values, random_tensors(values, seed))
