"""Greedy decoding of every family of targets and every kind of draft equals transformers' own `generate`."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddtree import assembly
from ddtree.config import ServingConfig
from ddtree.params import DraftMode, GenerationParams
from ddtree.types import AUTO_BUDGET
from tests.fakes.pipeline import GreedyReference, generate_all, make_oracle, make_verifier, running_engine
from tests.fakes.random_draft import write_dflash2, write_draft, write_speculators
from tests.fakes.target_families import FAMILIES, LAYERS, make_family
from tests.fakes.tiny_models import EOS_ID, MASK_ID, VOCAB_SIZE

# One sequence ends inside the first window, the others pass it, with prompts on both sides of it.
LENGTHS = (2, 6, 27)
MODES: tuple[tuple[DraftMode, int], ...] = (("tree", AUTO_BUDGET), ("tree", 24), ("chain", 7))
# Variants that only differ inside a layer are held node by node in the unit tests.
SERVED = [name for name in FAMILIES if "rope dynamic" not in name and "some layers" not in name]


TAPS = {"mask_token_id": MASK_ID, "target_layer_ids": [0, 1, 2]}
PLAIN = {"vocab_size": VOCAB_SIZE, "num_target_layers": LAYERS}
SAID_ELSEWHERE: dict[str, Any] = {"mask_token_id": MASK_ID, "aux_hidden_state_layer_ids": [1, 2, 3]}
DRAFTS: dict[str, Callable[[Path], Path]] = {
    "dflash": lambda folder: write_draft(folder, **PLAIN, dflash_config=TAPS),
    "dflash 2": lambda folder: write_dflash2(folder, **PLAIN, dflash_config=TAPS),
    "speculators": lambda folder: write_speculators(
        folder, **SAID_ELSEWHERE, transformer_layer_config={"vocab_size": VOCAB_SIZE}
    ),
}


def make_requests() -> list[GenerationParams]:
    source = random.Random(5)
    return [
        GenerationParams(
            tuple(source.randrange(256) for _ in range(length)),
            max_tokens=max_tokens,
            draft_mode=mode,
            tree_budget=budget,
            stop_ids=frozenset({EOS_ID}),
        )
        for length, max_tokens, (mode, budget) in zip(LENGTHS, (4, 24, 24), MODES, strict=True)
    ]


@pytest.mark.parametrize("family", SERVED)
async def test_every_family_equals_generate(tmp_path: Path, family: str) -> None:
    folder = make_family(tmp_path, family)
    reference, requests = GreedyReference(folder), make_requests()
    verifier, drafter = make_verifier(folder), make_oracle(folder, noise=0.4)
    async with running_engine(verifier, drafter, folder) as engine:
        sinks = await generate_all(engine, requests)
    for params, sink in zip(requests, sinks, strict=True):
        assert sink.token_ids == reference(params.prompt_ids, params.max_tokens)
    for sink in sinks[1:]:
        assert sink.stats is not None
        assert sink.stats.accepted_tokens > 0, "drafts must count"


@pytest.mark.parametrize("kind", DRAFTS)
async def test_every_kind_of_draft_equals_generate(tmp_path: Path, kind: str) -> None:
    """Loaded from folders as a deployment loads them; random drafts are hardly ever accepted."""
    folder, draft = make_family(tmp_path / "target", "qwen3"), DRAFTS[kind](tmp_path / "draft")
    reference, requests = GreedyReference(folder), make_requests()
    config = ServingConfig(folder, draft, dtype="float32", kv_cache_mib=4, draft_kv_cache_mib=4, page_size=16)
    stages = assembly.load_in_process(config)
    async with running_engine(stages.verifier, stages.drafter, folder) as engine:
        sinks = await generate_all(engine, requests)
    for params, sink in zip(requests, sinks, strict=True):
        assert sink.token_ids == reference(params.prompt_ids, params.max_tokens)
    for sink in sinks[1:]:
        assert sink.stats is not None
        assert sink.stats.draft_tokens > sink.stats.rounds, "drafts must be made"
