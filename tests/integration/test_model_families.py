"""Greedy decoding of every family of targets, drafted and packed, equals transformers' own `generate`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ddtree.params import DraftMode, GenerationParams
from ddtree.types import AUTO_BUDGET
from tests.fakes.pipeline import GreedyReference, generate_all, make_oracle, make_verifier, running_engine
from tests.fakes.target_families import FAMILIES, make_family
from tests.fakes.tiny_models import EOS_ID

# One sequence ends inside the first window, the others pass it, with prompts on both sides of it.
LENGTHS = (2, 6, 27)
MODES: tuple[tuple[DraftMode, int], ...] = (("tree", AUTO_BUDGET), ("tree", 24), ("chain", 7))
# Variants that only differ inside a layer are held node by node in the unit tests.
SERVED = [name for name in FAMILIES if "rope dynamic" not in name and "some layers" not in name]


@pytest.mark.parametrize("family", SERVED)
async def test_greedy_equals_generate(tmp_path: Path, family: str) -> None:
    folder = make_family(tmp_path, family)
    reference = GreedyReference(folder)
    source = random.Random(5)
    requests = [
        GenerationParams(
            tuple(source.randrange(256) for _ in range(length)),
            max_tokens=max_tokens,
            draft_mode=mode,
            tree_budget=budget,
            stop_ids=frozenset({EOS_ID}),
        )
        for length, max_tokens, (mode, budget) in zip(LENGTHS, (4, 24, 24), MODES, strict=True)
    ]
    verifier, drafter = make_verifier(folder), make_oracle(folder, noise=0.4)
    async with running_engine(verifier, drafter, folder) as engine:
        sinks = await generate_all(engine, requests)
    for params, sink in zip(requests, sinks, strict=True):
        assert sink.token_ids == reference(params.prompt_ids, params.max_tokens)
    assert all(sink.stats is not None and sink.stats.accepted_tokens for sink in sinks[1:]), (
        "drafts must count"
    )
