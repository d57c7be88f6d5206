"""The verifier over the stub engine: the torch verifier's tokens, logits, features and cache."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from ddtree.attention.plan import Segment, StepPlan
from ddtree.engine import Engine
from ddtree.params import GenerationParams
from ddtree.sampling_spec import SamplingSpec
from ddtree.trtllm.contract import TREE, Contract, load_contracts
from ddtree.trtllm.pool import EnginePool
from ddtree.trtllm.target import EngineTarget
from ddtree.types import PrefillRequest, SessionBatch, Status, TreeBatch, VerifyRequest, VerifyResult
from ddtree.verify import TargetVerifier
from tests.fakes.pipeline import GreedyReference, generate_all, make_oracle, make_verifier, running_engine
from tests.fakes.tiny_models import VOCAB_SIZE, make_target
from tests.fakes.trtllm_library import FakeLibrary
from tests.fakes.trtllm_pipeline import MAX_NODES, load, pool_of, verifier_over

CONTRACTS = {contract.name: contract for contract in load_contracts()}
NEWEST = load_contracts()[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> GreedyReference:
    return GreedyReference(folder)


async def tokens(engine: Engine, requests: list[GenerationParams]) -> list[list[int]]:
    return [list(sink.token_ids) for sink in await generate_all(engine, requests)]


def requests_of(seed: int) -> list[GenerationParams]:
    """Prompts over and under a block, budgets over and under a mask word, a chain and plain decoding."""
    source = random.Random(seed)
    kinds: tuple[tuple[Literal["tree", "chain", "off"], int], ...] = (
        ("tree", 40), ("tree", 5), ("chain", -1), ("off", 0), ("tree", 64),
    )  # fmt: skip
    return [
        GenerationParams(
            tuple(source.randrange(256) for _ in range(length)),
            max_tokens=20,
            draft_mode=mode,
            tree_budget=budget,
        )
        for length, (mode, budget) in zip((40, 3, 31, 32, 1), kinds, strict=True)
    ]


@pytest.mark.parametrize(
    ("contract", "by_position_ids"),
    [*((contract, False) for contract in CONTRACTS.values()), (NEWEST, True)],
    ids=[*CONTRACTS, "rope by position ids"],
)
async def test_the_whole_loop_gives_the_targets_tokens(
    folder: Path, reference: GreedyReference, contract: Contract, by_position_ids: bool
) -> None:
    """In every recorded state of the library, for both families; every recorded keyword is really passed."""
    library = FakeLibrary(contract, turns_by_position_ids=by_position_ids)
    verifier = verifier_over(load(folder, library))
    requests = requests_of(1)
    async with running_engine(verifier, make_oracle(folder, noise=0.5), folder) as engine:
        got = await tokens(engine, requests)
    assert got == [reference(request.prompt_ids, 20) for request in requests]
    for key, symbol in contract.symbols.items():
        if symbol.group == TREE and symbol.kind != "members" and key in library.calls:
            assert library.calls[key] == set(symbol.used), key
    pool = pool_of(verifier)
    assert pool.pages_used == 0
    verifier_target = verifier.target
    assert isinstance(verifier_target, EngineTarget)
    verifier_target.engine.shutdown()  # asserts that no request is open


async def test_sampling_is_the_torch_verifiers_to_the_token(folder: Path) -> None:
    """Draws, penalties and log-probs are the verifier's own, so they do not depend on the engine."""
    spec = SamplingSpec(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=7)
    requests = [replace(request, sampling=spec) for request in requests_of(2)]
    outputs = []
    for verifier in (make_verifier(folder), verifier_over(load(folder, FakeLibrary(NEWEST)))):
        async with running_engine(verifier, make_oracle(folder, noise=0.4), folder) as engine:
            outputs.append(await tokens(engine, requests))
    assert outputs[0] == outputs[1]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def sessions(*rows: tuple[int, int]) -> SessionBatch:
    ids, lengths = zip(*rows, strict=True)
    return SessionBatch(torch.tensor(ids), ints(*[0] * len(ids)), ints(*lengths))


def trees_of(*trees: list[tuple[int, int]]) -> TreeBatch:
    width = max(len(tree) for tree in trees)
    tokens_, parents, depths = (torch.zeros((len(trees), width), dtype=torch.int32) for _ in range(3))
    for row, tree in enumerate(trees):
        for column, (token, parent) in enumerate(tree):
            tokens_[row, column], parents[row, column] = token, parent
            depths[row, column] = 1 + (depths[row, parent - 1] if parent else 0)
    return TreeBatch(tokens_, parents, depths, ints(*(len(tree) for tree in trees)))


def prefill(verifier: TargetVerifier, prompts: list[list[int]]) -> list[int]:
    flat = [token for prompt in prompts for token in prompt]
    request = PrefillRequest(
        sessions(*((index, 0) for index in range(len(prompts)))),
        ints(*flat),
        ints(*(len(prompt) for prompt in prompts)),
        ints(*[150] * len(prompts)),
    )
    result = verifier.prefill(request)
    assert result.status.tolist() == [Status.OK] * len(prompts)
    return [int(token) for token in result.next_tokens]


def right_siblings(reference: GreedyReference, ids: list[int], decoys: int) -> list[tuple[int, int]]:
    """A tree whose right path runs through the last of `decoys` + 1 siblings at each of three depths."""
    tree: list[tuple[int, int]] = []
    parent = 0
    for token in reference(ids, 3):
        wrong = [value for value in range(VOCAB_SIZE) if value != token][:decoys]
        tree += [(value, parent) for value in (*wrong, token)]
        parent = len(tree)
    return tree


def verify_both(
    folder: Path, engine: TargetVerifier, reference: GreedyReference
) -> tuple[list[VerifyResult], list[VerifyResult]]:
    """Two rounds of three sequences on both verifiers: much is accepted, mostly not the first sibling."""
    source = random.Random(5)
    prompts = [[source.randrange(256) for _ in range(length)] for length in (30, 31, 62)]
    results: tuple[list[VerifyResult], list[VerifyResult]] = ([], [])
    for verifier, kept in zip((make_verifier(folder), engine), results, strict=True):
        committed = [list(prompt) for prompt in prompts]
        roots = prefill(verifier, prompts)
        for decoys in ((1, 9, 0), (3, 9, 2)):
            trees = [
                right_siblings(reference, [*ids, root], count)
                for ids, root, count in zip(committed, roots, decoys, strict=True)
            ]
            request = VerifyRequest(
                sessions(*((index, len(ids)) for index, ids in enumerate(committed))),
                ints(*roots),
                trees_of(*trees),
            )
            result = verifier.verify(request)
            for index, ids in enumerate(committed):
                count = int(result.accepted_counts[index])
                ids += [roots[index], *result.accepted_tokens[index, :count].tolist()]
            roots = result.bonus_tokens.tolist()
            kept.append(result)
    return results


def test_late_siblings_over_block_boundaries_leave_the_right_cache(
    folder: Path, reference: GreedyReference
) -> None:
    engine = verifier_over(load(folder, FakeLibrary(NEWEST)))
    ours, theirs = verify_both(folder, engine, reference)
    for expected, got in zip(ours, theirs, strict=True):
        assert got.accepted_counts.tolist() == expected.accepted_counts.tolist() == [3, 3, 3]
        assert got.accepted_tokens.tolist() == expected.accepted_tokens.tolist()
        assert got.bonus_tokens.tolist() == expected.bonus_tokens.tolist()
        torch.testing.assert_close(got.features, expected.features, atol=1e-4, rtol=1e-4)
    engine.check_integrity()


def test_the_model_is_built_in_the_asked_dtype_whatever_the_checkpoint_says(
    folder: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(folder, tmp_path / "target")
    values = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(values | {"dtype": "bfloat16"}))
    assert load(other, FakeLibrary(NEWEST)).dtype == torch.float32


def test_taps_come_in_the_drafters_order(folder: Path) -> None:
    """The engine sorts the layers; a draft may list them otherwise."""
    plain, turned = (load(folder, FakeLibrary(NEWEST), taps) for taps in ((0, 2), (2, 0)))
    found = []
    for target in (plain, turned):
        pool = target.make_pool(8, budget_bytes=1 << 20, page_size=32)
        assert isinstance(pool, EnginePool)
        pages = pool.reserve(8)
        assert pages is not None
        depths = torch.arange(4)
        plan = StepPlan.build(pool, (Segment(0, 4, pages, 0, depths, None),))
        found.append(target.forward(torch.tensor([5, 6, 7, 8]), plan, torch.arange(4)).taps)
    torch.testing.assert_close(found[0], found[1][::-1])


def test_steps_are_split_where_rows_or_requests_are_too_many(
    folder: Path, reference: GreedyReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddtree.trtllm.loading.MAX_ROWS", MAX_NODES + 1)
    engine = verifier_over(load(folder, FakeLibrary(NEWEST)))
    ours, theirs = verify_both(folder, engine, reference)
    assert [r.bonus_tokens.tolist() for r in ours] == [r.bonus_tokens.tolist() for r in theirs]
    assert len(pool_of(engine).staged) > 1


def test_a_full_pool_says_so_and_gives_all_back(folder: Path) -> None:
    engine = verifier_over(load(folder, FakeLibrary(NEWEST)), kv_cache_bytes=200_000)
    pool = pool_of(engine)
    held = []
    while (pages := pool.reserve(100)) is not None:
        held.append(pages)
    assert 0 < len(held) < pool.num_pages
    for pages in held:
        pool.release(pages)
    assert pool.pages_used == 0
    assert pool.reserve(100) is not None
