"""The small target in the stub engine, and a verifier over it, as `pipeline` makes them over torch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ddtree.trtllm.loading import load_engine_target
from ddtree.trtllm.pool import EnginePool
from ddtree.trtllm.target import EngineTarget
from ddtree.verify import TargetVerifier, VerifierLimits
from tests.fakes.tiny_models import HIDDEN, TAPS
from tests.fakes.trtllm_library import FakeLibrary

MAX_NODES = 64


def load(folder: Path, library: FakeLibrary, taps: tuple[int, ...] = TAPS) -> EngineTarget:
    return load_engine_target(
        folder,
        dtype="float32",
        device=torch.device("cpu"),
        taps=taps,
        max_nodes=MAX_NODES,
        page_size=32,
        importer=library,
    )


def verifier_over(target: EngineTarget, kv_cache_bytes: int = 1 << 22) -> TargetVerifier:
    """As `pipeline.make_verifier`, over the engine."""
    torch.manual_seed(5)
    projection = nn.Linear(len(TAPS) * HIDDEN, HIDDEN, bias=False).requires_grad_(False)
    limits = VerifierLimits(kv_cache_bytes, page_size=32, max_nodes=MAX_NODES, session_ttl_s=600)
    return TargetVerifier(target, projection, limits, draft_hash="tiny", feature_size=HIDDEN)


def pool_of(verifier: TargetVerifier) -> EnginePool:
    assert isinstance(verifier.pool, EnginePool)
    return verifier.pool
