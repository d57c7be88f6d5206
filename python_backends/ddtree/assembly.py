"""Builds stage objects from a deployment's settings: the only place that knows all their parts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from ddtree.config import ServingConfig
from ddtree.draft import Drafter, DrafterLimits
from ddtree.models import loading
from ddtree.models.dflash import DFlashDraft, FeatureProjection
from ddtree.models.draft_checkpoint import DraftCheckpoint, draft_hash, open_checkpoint
from ddtree.models.packed import can_pack, pack, packed_linear
from ddtree.models.pairing import pair_checks, refuse_failures
from ddtree.models.probe import check_trees_work
from ddtree.models.target import Target, TargetModel
from ddtree.parallel.division import check_division
from ddtree.parallel.group import WorkerGroup
from ddtree.parallel.target import ParallelTarget
from ddtree.recurrent.state_pool import StateBudget
from ddtree.stages.in_process import InProcessStages, LoadedStages
from ddtree.text import TextCodec
from ddtree.trtllm.native import NativeChainVerifier
from ddtree.trtllm.stage import load_engine_verifier
from ddtree.verify import TargetVerifier, VerifierLimits

if TYPE_CHECKING:
    from ddtree.device.loading import Acceleration

_LOG = logging.getLogger(__name__)
_MIB = 1 << 20


def load_verifier(config: ServingConfig) -> TargetVerifier | NativeChainVerifier:
    """Load the target with the drafter's projection and measure what verifying costs here.

    Raises:
        CheckpointError: target or draft cannot be used, or do not fit each other, or the engine cannot run.
    """
    draft = _open_draft(config)
    if config.engine != "torch":
        return load_engine_verifier(config, draft, lambda target: build_verifier(config, draft, target))
    target = _load_target(config, draft)
    fast = _acceleration(config, draft, target.device)
    if fast is None or not isinstance(target, TargetModel):
        return build_verifier(config, draft, target)
    fast.take_target(target)
    verifier = build_verifier(config, draft, target)
    fast.finish(verifier, None)
    return verifier


def load_drafter(config: ServingConfig) -> Drafter:
    """Load the drafter with the target's embedding and head, for a process of its own.

    Raises:
        CheckpointError: target or draft cannot be used, or do not fit each other.
    """
    _set_threads(config)
    _make_current(_draft_device(config))
    draft = _open_draft(config)
    drafter = _build_apart(config, draft)
    fast = _acceleration(config, draft, drafter.pool.features.device)
    if fast is not None:
        fast.finish(None, drafter)
    return drafter


def load_in_process(config: ServingConfig) -> InProcessStages:
    """Load both stages into this process.

    Embedding and head exist once, except where the drafter has a device of its own or the target's are
    divided.

    Raises:
        CheckpointError: target or draft cannot be used, or do not fit each other.
    """

    def load() -> LoadedStages:
        draft = _open_draft(config)
        target = _load_target(config, draft)
        fast = _acceleration(config, draft, target.device)
        if fast is not None and isinstance(target, TargetModel):
            fast.take_target(target)
        if isinstance(target, TargetModel) and _draft_device(config) == loading.place(target.device):
            drafter = build_drafter(config, draft, target.embedding, target.head)
        else:
            drafter = _build_apart(config, draft)
        verifier = build_verifier(config, draft, target)
        if fast is None:
            return LoadedStages(verifier, drafter)
        # Kernels and graphs go to this thread's device: a drafter that has another stays as it was loaded.
        is_beside = drafter.pool.features.device == verifier.pool.features.device
        return LoadedStages(verifier, drafter, fast.finish(verifier, drafter if is_beside else None))

    return InProcessStages.build(load)


def _acceleration(config: ServingConfig, draft: DraftCheckpoint, device: torch.device) -> Acceleration | None:
    """What makes stages fast on a GPU; None on a CPU, and where it is switched off."""
    if not config.cuda_graphs or device.type != "cuda":
        return None
    try:
        from ddtree.device.loading import Acceleration  # kernels: not everywhere installed
    except ImportError as error:
        _LOG.warning("the GPU is used without kernels and graphs, much more slowly: %s", error)
        return None
    return Acceleration(config, device, draft.config.block_size - 1)


def _build_apart(config: ServingConfig, draft: DraftCheckpoint) -> Drafter:
    """Build a drafter over tables of its own, read from the target's checkpoint."""
    dtype = loading.resolve_dtype(config.dtype, loading.read_target_config(config.target))
    tables = loading.load_tables(config.target, dtype=dtype, device=_draft_device(config))
    return build_drafter(config, draft, tables.embedding, packed_linear(tables.head))


def _draft_device(config: ServingConfig) -> torch.device:
    name = config.device if config.draft_device == "target" else config.draft_device
    return loading.place(loading.choose_device(name))


def _load_target(config: ServingConfig, draft: DraftCheckpoint) -> TargetModel | ParallelTarget:
    _set_threads(config)
    taps = draft.config.target_layer_ids
    device = loading.choose_device(config.device)
    _make_current(device)
    if config.tensor_parallel > 1:
        check_division(loading.read_target_config(config.target), config.tensor_parallel)
        group = WorkerGroup.start(config.tensor_parallel, device)
        return ParallelTarget.load(group, config.target, dtype=config.dtype, taps=taps)
    most_rows = config.max_step_nodes + config.max_sequences
    states = StateBudget(config.state_cache_mib * _MIB, config.max_nodes, most_rows)
    target = TargetModel.load(
        config.target, dtype=config.dtype, device=device, taps=taps, state_budget=states
    )
    check_trees_work(target)
    return target


def build_verifier(config: ServingConfig, draft: DraftCheckpoint, target: Target) -> TargetVerifier:
    """Build the verifier of a loaded target, with the draft's projection; and measure what it costs."""
    projection = FeatureProjection.load(draft, dtype=target.dtype, device=target.device).requires_grad_(False)
    if can_pack(target.device, target.dtype):
        pack(projection)
    grammars = TextCodec.from_folder(config.target).grammars(target.vocab_size)
    grammars.warm_up()
    verifier = TargetVerifier(
        target,
        projection,
        VerifierLimits(
            kv_cache_bytes=config.kv_cache_mib * _MIB,
            page_size=config.page_size,
            max_nodes=config.max_nodes,
            session_ttl_s=float(config.session_ttl_s),
            prefix_cache=config.prefix_cache,
        ),
        draft_hash=draft_hash(config.draft),
        feature_size=draft.config.hidden_size,
        grammars=grammars,
    )
    verifier.measure_cost(repeats=5)
    _LOG.info("target loaded from %s", config.target)
    return verifier


def build_drafter(
    config: ServingConfig, draft: DraftCheckpoint, embedding: torch.Tensor, head: torch.nn.Module
) -> Drafter:
    """Build a drafter over tables that its target has loaded.

    Args:
        config: settings.
        draft: the draft's checkpoint.
        embedding: the target's embedding `[V, H]`.
        head: the target's output head; replaced where the draft brings its own.

    Raises:
        CheckpointError: the draft brings an embedding that is not the target's, or a map that is none.
    """
    draft.check_embedding(embedding)
    model = DFlashDraft.load(draft, embedding.dtype, embedding.device).requires_grad_(False)
    if can_pack(embedding.device, embedding.dtype):
        pack(model)
    own_head = draft.load_head(embedding.dtype, embedding.device)
    if own_head is not None:  # never the target's: it was trained over other tokens
        head = packed_linear(own_head.weight)
    drafter = Drafter(
        model,
        DrafterLimits(
            kv_cache_bytes=config.draft_kv_cache_mib * _MIB,
            page_size=config.page_size,
            session_ttl_s=float(config.session_ttl_s),
            prefix_cache=config.prefix_cache,
        ),
        embedding=embedding,
        head=head,
        draft_hash=draft_hash(config.draft),
        target_ids=None if own_head is None else own_head.target_ids,
    )
    drafter.measure_cost(repeats=10)
    _LOG.info("drafter loaded from %s", config.draft)
    return drafter


def _open_draft(config: ServingConfig) -> DraftCheckpoint:
    draft = open_checkpoint(config.draft)
    checks = pair_checks(draft.config, loading.read_target_config(config.target))
    path = config.draft / "config.json"
    for warning in refuse_failures(checks, path):
        _LOG.warning("%s", warning.message(path))
    return draft


def _make_current(device: torch.device) -> None:
    """Let this thread, which will run the stage, use the device: Triton's kernels go to the current one."""
    if device.type == "cuda":
        torch.cuda.set_device(loading.place(device))


def _set_threads(config: ServingConfig) -> None:
    if config.threads:
        torch.set_num_threads(config.threads)
