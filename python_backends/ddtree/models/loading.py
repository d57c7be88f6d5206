"""Reading a target checkpoint folder, and saying in one line what is wrong with it.

This module knows the files of a transformers checkpoint; it does not know what is done with the model.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ddtree.errors import CheckpointError, ConfigError
from ddtree.models.speculators import is_speculators
from ddtree.models.target_config import check_target_config
from ddtree.models.weight_files import FLOAT_TYPES, Header, read_headers

_EMBEDDING_SUFFIX = "embed_tokens.weight"
_HEAD_NAME = "lm_head.weight"
_DRAFT_ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")


@dataclass(frozen=True)
class TargetTables:
    """The two tables a drafter borrows from its target."""

    embedding: torch.Tensor  # [V, H]
    head: torch.Tensor  # [V, H]; the same tensor when the target ties them


def choose_device(name: str) -> torch.device:
    """Resolve `auto` to CUDA when there is one.

    Raises:
        ConfigError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpus = torch.cuda.device_count()
    with contextlib.suppress(RuntimeError):  # of a name that PyTorch does not know
        device = torch.device(name)
        if device.type != "cuda" or (device.index or 0) < gpus:
            return device
    raise ConfigError(
        f"a device must be auto, cpu, cuda or cuda:N of the {gpus} GPUs that PyTorch sees, got {name!r}; "
        "name one that is there"
    )


def place(device: torch.device) -> torch.device:
    """The same device with its number, so that two can be compared: `cuda` is `cuda:0`."""
    return torch.device(device.type, device.index or 0) if device.type == "cuda" else device


def read_target_config(folder: Path) -> PretrainedConfig:
    """Read the target's configuration.

    Raises:
        CheckpointError: no such folder, no readable `config.json`, or a draft given as the target.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise CheckpointError(
            f"target: {folder} is not a folder; give the folder of a transformers checkpoint"
        )
    try:
        values = json.loads(path.read_text())
        architectures = values.get("architectures") or []
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"target: {path} must be a readable JSON object ({error})") from None
    if any(name in _DRAFT_ARCHITECTURES for name in architectures) or is_speculators(values):
        raise CheckpointError(
            f"target: {path} names {architectures}, a draft model; were target and draft swapped?"
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        reason = " ".join(str(error).split())[:400]
        raise CheckpointError(
            f"target: {path} is not a configuration that transformers reads ({reason})"
        ) from None
    try:
        check_target_config(config)
    except CheckpointError as error:
        raise CheckpointError(f"target: {path}: {error.args[0]}") from None
    return config


def resolve_dtype(name: str, config: PretrainedConfig) -> torch.dtype:
    """Resolve `auto` to the checkpoint's own dtype (float32 when it does not say)."""
    said = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    chosen = said or torch.float32 if name == "auto" else getattr(torch, name)
    return getattr(torch, chosen) if isinstance(chosen, str) else chosen


def load_target(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    options: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Load a causal LM with its attention replaced by the registered one named `attention`.

    Args:
        folder: the checkpoint.
        dtype: of weights and activations.
        device: where it is put.
        attention: name of the registered attention.
        options: more arguments of transformers' `from_pretrained`, as those that divide the model.

    Raises:
        CheckpointError: files are missing, truncated, or tensors are missing from them.
    """
    config = read_target_config(folder)
    check_files(folder, is_quantised=has_quantisation(config))
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below, by name; transformers only says that
            **(options or {}),
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:400]
        raise CheckpointError(f"target: {folder} could not be loaded: {reason}") from None
    _check_report(folder, report)
    return model.to(device).eval().requires_grad_(False)


def _check_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Refuse weights that do not belong to the folder's configuration."""
    if names := sorted(report.get("missing_keys") or ()):
        problem = f"{len(names)} tensors are missing, the first is {names[0]}"
    elif shapes := sorted(report.get("mismatched_keys") or ()):
        name, found, expected = shapes[0]
        problem = f"{len(shapes)} tensors have another shape: {name} {list(expected)} is {list(found)}"
    else:
        return
    raise CheckpointError(f"target: in {folder} {problem}; the weights do not belong to its config.json")


def load_tables(folder: Path, *, dtype: torch.dtype, device: torch.device) -> TargetTables:
    """Read only the embedding and output head of a target, for a drafter in a process of its own.

    Raises:
        CheckpointError: the folder is no target checkpoint, or has no embedding.
    """
    config = read_target_config(folder)
    files = check_files(folder, is_quantised=has_quantisation(config))
    embedding = head = None
    for path in files:
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                if name.endswith(_EMBEDDING_SUFFIX):
                    embedding = tensors.get_tensor(name)
                elif name == _HEAD_NAME:
                    head = tensors.get_tensor(name)
    if embedding is None:
        raise CheckpointError(
            f"target: no tensor *.{_EMBEDDING_SUFFIX} in {folder}; a drafter needs the embedding"
        )
    if head is None and not getattr(config, "tie_word_embeddings", False):
        raise CheckpointError(f"target: no tensor {_HEAD_NAME} in {folder}, and config.json does not tie it")
    embedding = embedding.to(device, dtype)
    return TargetTables(embedding, embedding if head is None else head.to(device, dtype))


def has_quantisation(config: PretrainedConfig) -> bool:
    """Whether the configuration says how the weights are quantised."""
    return getattr(config, "quantization_config", None) is not None


def check_files(folder: Path, *, is_quantised: bool) -> list[Path]:
    """Give the target's safetensors files.

    Raises:
        CheckpointError: one is missing or truncated, or its weights are of a type nobody says how to read.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = set(json.loads(index.read_text()).get("weight_map", {}).values())
        if missing := sorted(named - {path.name for path in files}):
            raise CheckpointError(f"target: {folder / missing[0]} is named in {index.name} but is not there")
        files = [path for path in files if path.name in named]
    if not files:
        raise CheckpointError(
            f"target: no *.safetensors file in {folder}; only safetensors checkpoints are read"
        )
    for path in files:
        try:
            headers = read_headers(path)
        except CheckpointError as error:
            raise CheckpointError(f"target: {error.args[0]}") from None
        if not is_quantised:
            _check_dtypes(headers)
    return files


def _check_dtypes(headers: Mapping[str, Header]) -> None:
    for name, header in headers.items():
        if name.endswith(".weight") and header.dtype not in FLOAT_TYPES:
            raise CheckpointError(
                f"target: {header.path}: expected {name} as one of {FLOAT_TYPES}, found {header.dtype} "
                "and no quantization_config in config.json; convert the weights or add their configuration"
            )
