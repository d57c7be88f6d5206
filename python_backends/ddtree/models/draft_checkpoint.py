"""Reads a DFlash v1 checkpoint folder in z-lab's format and says in one line what is wrong with one.

A folder holds `config.json` and safetensors (sharded or not) without embedding and output head, which come
from the target. This module knows files and shapes. It does not build the model, nor fetch a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ddtree.errors import CheckpointError
from ddtree.models.draft_config import DraftConfig
from ddtree.models.weight_files import FLOAT_TYPES, Header, read_headers, weight_files

_NAMES_SHOWN = 3  # of missing or unexpected tensors, in a message


@dataclass(frozen=True)
class DraftCheckpoint:
    """A folder whose configuration and tensor shapes have been checked."""

    folder: Path
    config: DraftConfig
    files: Mapping[str, Path]  # tensor name: the file that holds it

    def load(self, names: Iterable[str], dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
        """Read tensors by name."""
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            by_file[self.files[name]].append(name)
        tensors = {}
        for path, members in by_file.items():
            with safe_open(path, framework="pt") as file:
                for name in members:
                    tensors[name] = file.get_tensor(name).to(device=device, dtype=dtype)
        return tensors

    def check_against_target(self, target_config: Any) -> None:
        """Check that the draft was made for a target like this one.

        Args:
            target_config: the target's transformers configuration.

        Raises:
            CheckpointError: naming the draft's file, what the target asks for and what the draft has.
        """
        text, draft = target_config.get_text_config(), self.config
        eos = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
        special = {token for token in (*eos, text.pad_token_id) if token is not None}
        for rule, holds, found in (
            (
                f"the target's hidden_size {text.hidden_size}",
                draft.hidden_size == text.hidden_size,
                draft.hidden_size,
            ),
            (
                f"num_target_layers {text.num_hidden_layers}, the target's layer count",
                draft.num_target_layers == text.num_hidden_layers,
                draft.num_target_layers,
            ),
            (
                f"a mask_token_id below the target's vocabulary of {text.vocab_size}",
                draft.mask_token_id < text.vocab_size,
                draft.mask_token_id,
            ),
            (
                f"a mask_token_id other than the target's padding and end tokens {sorted(special)}",
                draft.mask_token_id not in special,
                draft.mask_token_id,
            ),
        ):
            if not holds:
                raise CheckpointError(
                    f"{self.folder / 'config.json'}: expected {rule}, found {found}; "
                    "is this the drafter of that target?"
                )


def open_checkpoint(folder: Path) -> DraftCheckpoint:
    """Read a checkpoint's configuration and compare the tensors' names and shapes with it; loads no weights.

    Raises:
        CheckpointError: one line with the file, what was expected and what was found.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: expected a draft checkpoint's configuration, found no such file")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: expected a readable JSON file, found {error}") from error
    try:
        config = DraftConfig.from_values(values)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error.args[0]}") from error
    return DraftCheckpoint(folder, config, _check_tensors(folder, tensor_shapes(config)))


def draft_hash(folder: Path) -> str:
    """Hash the configuration and the projection's weights: equal hashes mean interchangeable features.

    Cheap enough for every load: the layers' weights are not read.

    Raises:
        CheckpointError: as `open_checkpoint`.
    """
    checkpoint = open_checkpoint(folder)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for name in ("fc.weight", "hidden_norm.weight"):
        with safe_open(checkpoint.files[name], framework="pt") as file:
            tensor = file.get_tensor(name)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def tensor_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name every tensor of a checkpoint with its shape."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    for name, rows, columns in (
        ("q", queries, hidden),
        ("k", keys, hidden),
        ("v", keys, hidden),
        ("o", hidden, queries),
    ):
        layer[f"self_attn.{name}_proj.weight"] = (rows, columns)
        if config.attention_bias:
            layer[f"self_attn.{name}_proj.bias"] = (rows,)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.feature_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(len(config.layers)):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _check_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Path]:
    """Find every tensor's file from the files' headers and compare names, shapes and types."""
    listed, files = weight_files(folder)
    found: dict[str, Path] = {}
    for path in files:
        for name, header in read_headers(path).items():
            found[name] = path
            _check_header(path, name, header, shapes)
    missing = sorted(shapes.keys() - found.keys())
    if missing:
        described = ", ".join(f"{name} {list(shapes[name])}" for name in missing[:_NAMES_SHOWN])
        raise CheckpointError(
            f"{listed}: expected {len(shapes)} tensors, found {len(missing)} of them missing: {described}"
            + (", …" if len(missing) > _NAMES_SHOWN else "")
        )
    return found


def _check_header(path: Path, name: str, header: Header, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if name not in shapes:
        raise CheckpointError(
            f"{path}: expected only a DFlash v1 draft's tensors, found {name} {list(header.shape)} as well"
        )
    if header.shape != shapes[name]:
        raise CheckpointError(
            f"{path}: expected {name} of shape {list(shapes[name])}, found {list(header.shape)}"
        )
    if header.dtype not in FLOAT_TYPES:
        raise CheckpointError(f"{path}: expected {name} as one of {FLOAT_TYPES}, found {header.dtype}")
