"""Greedy decoding over the in-process stages equals transformers' own, whatever the drafts are."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ddtree.events import RoundRecord, rounds_only
from ddtree.params import DraftMode, GenerationParams
from ddtree.types import AUTO_BUDGET
from tests.fakes.pipeline import GreedyReference, generate_all, make_oracle, make_verifier, running_engine
from tests.fakes.tiny_models import BLOCK_SIZE, EOS_ID, make_target

MODES: list[tuple[DraftMode, int]] = [
    ("tree", 1), ("tree", 4), ("tree", BLOCK_SIZE - 2), ("tree", BLOCK_SIZE - 1), ("tree", BLOCK_SIZE),
    ("tree", 16), ("tree", 4 * BLOCK_SIZE), ("tree", 64), ("tree", 256), ("tree", AUTO_BUDGET), ("tree", 0),
    ("chain", AUTO_BUDGET), ("chain", 3), ("off", AUTO_BUDGET),
]  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def reference(target: Path) -> GreedyReference:
    return GreedyReference(target)


def prompts(count: int, seed: int = 3) -> list[tuple[int, ...]]:
    source = random.Random(seed)
    return [tuple(source.randrange(256) for _ in range(source.randrange(1, 60))) for _ in range(count)]


def request(prompt: tuple[int, ...], mode: DraftMode, budget: int, max_tokens: int = 48) -> GenerationParams:
    return GenerationParams(
        prompt, max_tokens=max_tokens, draft_mode=mode, tree_budget=budget, stop_ids=frozenset({EOS_ID})
    )


@pytest.mark.parametrize(("mode", "budget"), MODES)
async def test_alone_equals_generate(
    target: Path, reference: GreedyReference, mode: DraftMode, budget: int
) -> None:
    async with running_engine(make_verifier(target), make_oracle(target, noise=0.6), target) as engine:
        for prompt in prompts(3):
            (sink,) = await generate_all(engine, [request(prompt, mode, budget)])
            assert sink.token_ids == reference(prompt, 48)


async def test_eight_at_once_with_different_budgets_and_lengths(
    target: Path, reference: GreedyReference
) -> None:
    requests = [
        request(prompt, *MODES[index % len(MODES)], max_tokens=10 + 7 * (index % 6))
        for index, prompt in enumerate(prompts(24, seed=9))
    ]
    async with running_engine(
        make_verifier(target), make_oracle(target, noise=0.6), target, max_sequences=8
    ) as engine:
        sinks = await generate_all(engine, requests)
    for params, sink in zip(requests, sinks, strict=True):
        assert sink.token_ids == reference(params.prompt_ids, params.max_tokens)


async def test_a_perfect_oracle_is_accepted_in_full_depth_each_round(target: Path) -> None:
    rounds: list[RoundRecord] = []
    depth = BLOCK_SIZE - 1
    async with running_engine(
        make_verifier(target), make_oracle(target, noise=0), target, observe=rounds_only(rounds.append)
    ) as engine:
        for prompt in prompts(3):
            params = GenerationParams(
                prompt, max_tokens=1 + 4 * BLOCK_SIZE, tree_budget=depth, ignore_eos=True
            )
            await generate_all(engine, [params])
    assert [record.emitted for record in rounds] == [BLOCK_SIZE] * 12
