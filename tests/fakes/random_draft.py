"""Small draft checkpoint folders with random weights: DFlash v1 and 2 in z-lab's format, and speculators'."""

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
    if "DFlash2DraftModel" in values["architectures"]:
        shapes |= _dflash2_shapes(values)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        # Norm weights around 1, matrices that keep the scale of what passes through.
        is_matrix = len(shape) >= 2
        tensors[name] = noise / shape[1] ** 0.5 * 1.5 if is_matrix else 1 + 0.3 * noise
    return tensors


def _dflash2_shapes(values: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, sizes = values["hidden_size"], values["dflash_config"]
    kernel, groups = sizes["conv_kernel_size"], hidden // sizes["conv_group_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(values["num_hidden_layers"]):
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{index}.{name}.base_kernel"] = (2, kernel, hidden)
            shapes[f"layers.{index}.{name}.kernel_projection.weight"] = (2 * kernel * groups, hidden)
    rank = sizes["selector_rank"]
    shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    for name in ("predecessor_codebook", "successor_codebook"):
        shapes[f"candidate_selector.{name}"] = (values["vocab_size"], rank)
    return shapes


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


DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}


def dflash2_values(**changes: Any) -> dict[str, Any]:
    """A valid DFlash 2 configuration: sliding layers that see both ways, the block size where it is there."""
    drafting = {
        **BASE_CONFIG["dflash_config"],
        **DFLASH2,
        "block_size": 6,
        **changes.pop("dflash_config", {}),
    }
    sliding = {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention"] * 3}
    base = {"architectures": ["DFlash2DraftModel"], "block_size": None, "is_causal": False, **sliding}
    return config_values(**{**base, "dflash_config": drafting, **changes})


def write_dflash2(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a valid random DFlash 2 checkpoint; `dflash_config` in `changes` replaces single values."""
    values = dflash2_values(**changes)
    return write_folder(folder, values, random_tensors(values, seed))


DRAFTED = 20  # tokens a speculators draft can propose


def speculators_values(**changes: Any) -> dict[str, Any]:
    """A valid configuration in the speculators format; only what differs from Qwen3's defaults is nested."""
    nested = {
        name: BASE_CONFIG[name]
        for name in (
            "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_parameters", "vocab_size",
        )
    }  # fmt: skip
    base = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.6.0",
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "some/target"}},
        "transformer_layer_config": {**nested, **changes.pop("transformer_layer_config", {})},
        "draft_vocab_size": DRAFTED,
        "block_size": 6,
        "aux_hidden_state_layer_ids": [2, 4, 6],  # z-lab's 1, 3, 5
        "mask_token_id": 49,
        "dtype": "float32",
    }
    return {**base, **changes}


def speculators_tensors(values: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Layers as in z-lab's format, an output head over some of the target's tokens, and the maps."""
    nested, drafted = values["transformer_layer_config"], values["draft_vocab_size"]
    layers = {**nested, "architectures": [], "dflash_config": {"target_layer_ids": [1, 3, 5]}}
    tensors = random_tensors(layers, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    tensors["lm_head.weight"] = torch.randn(drafted, nested["hidden_size"], generator=generator)
    if drafted < nested["vocab_size"]:
        chosen = torch.randperm(nested["vocab_size"], generator=generator)[:drafted].sort().values
        tensors["d2t"] = chosen - torch.arange(drafted)
        tensors["t2d"] = torch.zeros(nested["vocab_size"], dtype=torch.bool).index_fill(0, chosen, True)
    return tensors


def write_speculators(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a valid random checkpoint in the speculators format."""
    values = speculators_values(**changes)
    return write_folder(folder, values, speculators_tensors(values, seed))
