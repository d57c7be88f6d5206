"""Brings a checkpoint into the engine, and refuses before that what the tree path cannot run.

Knows the files of a checkpoint and the sizes of a deployment; sessions and stages are built elsewhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ddtree.models import loading, target_config
from ddtree.trtllm.adapter import EngineSizes, TreeEngine
from ddtree.trtllm.contract import TREE, Importer
from ddtree.trtllm.library import EngineUnfit, open_library
from ddtree.trtllm.target import EngineTarget

BLOCK_SIZES = (32, 64, 128)  # tokens of a block that the engine's kernels are made for
MAX_ROWS = 8192  # of one engine step, padding included
MAX_REQUESTS = 256  # open in the engine at a time


def load_engine_target(
    folder: Path,
    *,
    dtype: str,
    device: torch.device,
    taps: Sequence[int],
    max_nodes: int,
    page_size: int,
    importer: Importer = importlib.import_module,
) -> EngineTarget:
    """Load a target into TensorRT-LLM for tree verification.

    Raises:
        EngineUnfit: the installed version, this GPU or this target does not do.
        CheckpointError: the folder is no usable target.
    """
    library = open_library(TREE, importer)
    config = loading.read_target_config(folder)
    resolved = loading.resolve_dtype(dtype, config)
    config.dtype = resolved  # the engine builds its layers in what the configuration says
    _check_target(config, page_size, max_nodes)
    sizes = _sizes(config, dtype=resolved, device=device, taps=taps, max_nodes=max_nodes, page_size=page_size)
    engine = TreeEngine(library, sizes)
    try:
        engine.load(config, read_weights(folder, resolved, device))
    except (TypeError, AttributeError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise EngineUnfit(f"engine trtllm: the target could not be loaded ({reason})") from error
    text = config.get_text_config()
    return EngineTarget(
        engine,
        vocab_size=int(text.vocab_size),
        context_length=target_config.context_length(config),
        max_nodes=max_nodes,
    )


def read_weights(folder: Path, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, floats in `dtype`."""
    weights = {}
    for path in loading.check_files(folder, is_quantised=False):
        with safe_open(path, framework="pt", device=str(device)) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                tensor = tensors.get_tensor(name)
                weights[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return weights


def _check_target(config: Any, page_size: int, max_nodes: int) -> None:
    if page_size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES))
        raise EngineUnfit(f"page_size must be one of {sizes} with engine trtllm, got {page_size}")
    if max_nodes + 1 > MAX_ROWS:
        raise EngineUnfit(f"max_nodes must be below {MAX_ROWS} with engine trtllm, got {max_nodes}")
    if loading.has_quantisation(config):
        raise EngineUnfit(
            "engine trtllm: only unquantised targets are loaded without the executor; give such a checkpoint"
        )
    if layers := target_config.recurrent_layers(config):
        raise EngineUnfit(
            f"engine trtllm: its trees pass attention only, {len(layers)} of the target's layers are "
            "recurrent; set engine to torch"
        )
    if (window := target_config.sliding_window(config)) is not None:
        raise EngineUnfit(
            f"engine trtllm: its tree attention knows no sliding window, the target has one of {window}"
        )


def _sizes(
    config: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    taps: Sequence[int],
    max_nodes: int,
    page_size: int,
) -> EngineSizes:
    text = config.get_text_config()
    shape = target_config.attention_sizes(config)
    return EngineSizes(
        layers=shape.layers,
        heads=int(text.num_attention_heads),
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        hidden_size=int(text.hidden_size),
        taps=tuple(taps),
        # A session may be padded beyond the context by the widest tree of its batch.
        max_length=target_config.context_length(config) + max_nodes + 1,
        tokens_per_block=page_size,
        max_requests=MAX_REQUESTS,
        max_rows=MAX_ROWS,
        dtype=dtype,
        device=device,
    )
