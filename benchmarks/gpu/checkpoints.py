"""Writes a pair of random weights as checkpoint folders, for a server that loads from disk."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from benchmarks.gpu.shapes import PairShape, random_weights
from ddtree.models.draft_checkpoint import tensor_shapes

# A tokenizer of fewer tokens than the target has is enough: nobody reads what noise writes.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class SavedPair:
    """Folders of a target and its drafter."""

    target: Path
    draft: Path


def save_pair(
    shape: PairShape, folder: Path, *, tokenizer: Path, device: torch.device, dtype: torch.dtype
) -> SavedPair:
    """Make weights on the device and write them.

    Args:
        shape: sizes.
        folder: an empty folder.
        tokenizer: a checkpoint folder whose tokenizer the target takes.
        device: where the weights are made.
        dtype: of the weights.
    """
    saved = SavedPair(folder / "target", folder / "draft")
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape.target, dtype=dtype)
    model.save_pretrained(saved.target)
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, saved.target / name)
    saved.draft.mkdir()
    save_file(random_weights(tensor_shapes(shape.draft), device, dtype), saved.draft / "model.safetensors")
    values = {**shape.draft_values, "dtype": str(dtype).removeprefix("torch.")}
    (saved.draft / "config.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    return saved
