"""The verifier stage over TensorRT-LLM: trees where the private calls fit, its own chains where they do not.

The choice is made at load and told once: in the log, in what the stage says of itself, and by the
orchestrator as a metric. This module builds neither projections nor grammars; who does is handed in.
"""

from __future__ import annotations

import gc
import importlib
import logging
from collections.abc import Callable

import torch

from ddtree.config import ServingConfig
from ddtree.models import loading, target_config
from ddtree.models.draft_checkpoint import DraftCheckpoint, draft_hash
from ddtree.trtllm.check import refuse_wrong_trees
from ddtree.trtllm.contract import NATIVE, Importer
from ddtree.trtllm.library import EngineUnfit, open_library
from ddtree.trtllm.loading import load_engine_target
from ddtree.trtllm.native import NativeChainVerifier, NativeSizes
from ddtree.trtllm.pool import EnginePool
from ddtree.trtllm.target import EngineTarget
from ddtree.verify import TargetVerifier

_LOG = logging.getLogger(__name__)
BuildVerifier = Callable[[EngineTarget], TargetVerifier]


def load_engine_verifier(
    config: ServingConfig,
    draft: DraftCheckpoint,
    build: BuildVerifier,
    importer: Importer = importlib.import_module,
) -> TargetVerifier | NativeChainVerifier:
    """Load the target into TensorRT-LLM.

    Args:
        config: settings.
        draft: the draft's checkpoint.
        build: makes the verifier of a loaded target: projection, grammars, limits.
        importer: stands in for `importlib.import_module` in tests.

    Raises:
        EngineUnfit: TensorRT-LLM is not installed, or does not even decode by itself.
        CheckpointError: target or draft cannot be used.
    """
    if config.engine == "trtllm_chain":
        return load_native_chain(config, draft, "engine trtllm_chain asks for its own chains", importer)
    try:
        return load_tree_verifier(config, draft, build, importer)
    except EngineUnfit as error:
        reason = str(error.args[0])
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        verifier = load_native_chain(config, draft, reason, importer)
    except EngineUnfit as error:
        raise EngineUnfit(f"{reason}; nor can it decode by itself: {error.args[0]}") from None
    _LOG.warning("falling back to TensorRT-LLM's own DFlash chains: %s", reason)
    return verifier


def load_tree_verifier(
    config: ServingConfig,
    draft: DraftCheckpoint,
    build: BuildVerifier,
    importer: Importer = importlib.import_module,
) -> TargetVerifier:
    """The same without a way out, for the check command and tests.

    Raises:
        EngineUnfit: the installed version, this GPU or this target does not verify trees.
        CheckpointError: target or draft cannot be used.
    """
    target = load_engine_target(
        config.target,
        dtype=config.dtype,
        device=loading.choose_device(config.device),
        taps=draft.config.target_layer_ids,
        max_nodes=config.max_nodes,
        page_size=config.page_size,
        importer=importer,
    )
    try:
        verifier = build(target)
    except (TypeError, AttributeError, AssertionError, RuntimeError, ValueError, KeyError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise EngineUnfit(f"engine trtllm: the first steps failed ({reason})") from error
    assert isinstance(verifier.pool, EnginePool), "an engine's target makes an engine's pool"
    refuse_wrong_trees(target, verifier.pool)
    library = target.engine.library
    _LOG.info("trees are verified by TensorRT-LLM %s, contract %s", library.version, library.contract.name)
    return verifier


def load_native_chain(
    config: ServingConfig, draft: DraftCheckpoint, reason: str, importer: Importer = importlib.import_module
) -> NativeChainVerifier:
    """The engine's own decoding behind the stage contract.

    Raises:
        EngineUnfit: it does not start.
    """
    library = open_library(NATIVE, importer)
    target = loading.read_target_config(config.target)
    sizes = NativeSizes(
        vocab_size=int(target.get_text_config().vocab_size),
        context_length=target_config.context_length(target),
        max_nodes=config.max_nodes,
        max_sequences=config.max_sequences,
        draft_len=draft.config.block_size - 1,
        feature_size=draft.config.hidden_size,
        feature_dtype=loading.resolve_dtype(config.dtype, target),
        draft_hash=draft_hash(config.draft),
        session_ttl_s=float(config.session_ttl_s),
    )
    try:
        return NativeChainVerifier(library, config.target, config.draft, sizes, reason)
    except Exception as error:  # whatever it was, there is no engine
        raise EngineUnfit(f"TensorRT-LLM's engine did not start ({error})") from error
