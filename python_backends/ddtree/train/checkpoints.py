"""Writes drafters in z-lab's checkpoint format, reads them to train on, and keeps a training's state.

This module knows files and names; how a drafter is trained is not its concern.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ddtree.models.draft_checkpoint import open_checkpoint
from ddtree.models.draft_config import DraftConfig, default_taps
from ddtree.models.pairing import pair_checks, refuse_failures
from ddtree.train.draft_model import TrainedDraft


@dataclass(frozen=True)
class DraftShape:
    """What of a drafter's shape is free; the rest follows from its target."""

    layers: int = 4
    block_size: int = 16
    mask_token_id: int = 16
    taps: Sequence[int] = ()  # empty: spread over the target's layers, one per draft layer
    intermediate_size: int | None = None  # None: the target's


def draft_values(target_config: Any, shape: DraftShape) -> dict[str, Any]:
    """Give the `config.json` of a drafter for a target, from its transformers configuration."""
    text = target_config.get_text_config()
    heads = int(text.num_attention_heads)
    rope: dict[str, Any] = dict(getattr(text, "rope_parameters", None) or {})
    theta = float(rope.get("rope_theta", getattr(text, "rope_theta", 10000.0)))
    eos = text.eos_token_id
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": int(text.hidden_size),
        "intermediate_size": int(shape.intermediate_size or text.intermediate_size),
        "num_hidden_layers": shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(text, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        "hidden_act": "silu",
        "max_position_embeddings": int(text.max_position_embeddings),
        "rms_norm_eps": 1e-6,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "vocab_size": int(text.vocab_size),
        "tie_word_embeddings": True,
        "layer_types": ["full_attention"] * shape.layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.layers,
        "num_target_layers": int(text.num_hidden_layers),
        "block_size": shape.block_size,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.taps or default_taps(int(text.num_hidden_layers), shape.layers)),
        },
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "bos_token_id": text.bos_token_id,
        "eos_token_id": eos[0] if isinstance(eos, list) else eos,
        "pad_token_id": text.pad_token_id,
    }


def new_draft(target_config: Any, shape: DraftShape) -> tuple[TrainedDraft, dict[str, Any]]:
    """Make a drafter with fresh weights, and its `config.json`.

    Raises:
        CheckpointError: the shape does not fit the target.
    """
    values = draft_values(target_config, shape)
    config = DraftConfig.from_values(values)
    refuse_failures(pair_checks(config, target_config), Path("a new drafter"))
    return TrainedDraft(config), values


def read_draft(folder: Path, target_config: Any | None = None) -> tuple[TrainedDraft, dict[str, Any]]:
    """Read a drafter to go on from, and its `config.json`.

    Raises:
        CheckpointError: the folder is no DFlash v1 drafter, or not one of the target's.
    """
    checkpoint = open_checkpoint(folder)
    if target_config is not None:
        refuse_failures(pair_checks(checkpoint.config, target_config), folder / "config.json")
    draft = TrainedDraft(checkpoint.config)
    names = draft.state_dict().keys()
    draft.load_state_dict(checkpoint.load(names, torch.float32, torch.device("cpu")))
    return draft, json.loads((folder / "config.json").read_text(encoding="utf-8"))


def write_draft(
    folder: Path, draft: TrainedDraft, values: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write `config.json` and `model.safetensors`; the weights appear whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {**values, "dtype": str(dtype).removeprefix("torch.")}
    named["torch_dtype"] = named["dtype"]
    (folder / "config.json").write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.detach().to("cpu", dtype) for name, tensor in draft.state_dict().items()}
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")


@dataclass(frozen=True)
class TrainingState:
    """What a training needs to go on where it was, beside the data."""

    draft: dict[str, torch.Tensor]
    optimizers: list[dict[str, Any]]
    step: int
    seconds: float  # of training so far

    def save(self, path: Path) -> None:
        """Write the state; it appears whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(
            {
                "draft": self.draft,
                "optimizers": self.optimizers,
                "step": self.step,
                "seconds": self.seconds,
            },
            partial,
        )
        partial.replace(path)

    @classmethod
    def load(cls, path: Path, device: torch.device) -> TrainingState:
        """Read a state that `save` wrote."""
        return cls(**torch.load(path, map_location=device, weights_only=True))
