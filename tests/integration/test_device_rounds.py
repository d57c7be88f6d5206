"""Rounds on the device behind the engine: the target's own tokens, whoever else is in the batch.

And after many rounds both caches hold what reading everything at once leaves there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree import drafting, staging
from ddtree.config import ServingConfig
from ddtree.device.buffers import StepSize
from ddtree.device.loading import Preparation
from ddtree.device.messages import RoundRequest, RoundResult
from ddtree.params import DraftMode, GenerationParams
from ddtree.sampling_spec import SamplingSpec
from ddtree.stages.in_process import InProcessStages
from ddtree.types import AUTO_BUDGET, SessionBatch, Status
from tests.fakes.device_stages import Rounds, engine_over, open_both, scripted_stages
from tests.fakes.pipeline import GreedyReference, generate_all
from tests.fakes.plain_kernels import in_place_of_kernels
from tests.fakes.scripted_draft import Script
from tests.fakes.tiny_models import make_draft, make_target

SIZES = tuple(StepSize(places, nodes) for places in (1, 3) for nodes in (0, 3, 12))
TEXT, TOKENS = 400, 40


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return make_target(folder / "target"), make_draft(folder / "draft")


@pytest.fixture(scope="module")
def text(pair: tuple[Path, Path]) -> list[int]:
    """How the target goes on from one byte, end tokens or not."""
    model = GreedyReference(pair[0]).model
    ids = [72]
    with torch.inference_mode():
        while len(ids) < TEXT:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


@pytest.fixture(scope="module", autouse=True)
def plain_kernels() -> Iterator[None]:
    with in_place_of_kernels():
        yield


@pytest.fixture(scope="module")
def script(text: list[int]) -> Script:
    return Script(text)


@pytest.fixture(scope="module")
def stages(pair: tuple[Path, Path], script: Script) -> InProcessStages:
    config = ServingConfig(
        *pair, dtype="float32", device="cpu", page_size=16, kv_cache_mib=2, draft_kv_cache_mib=1
    )
    return scripted_stages(config, script, Preparation(SIZES, TEXT, config.max_nodes, repeats=1))


def request(
    text: Sequence[int], length: int, mode: DraftMode, budget: int, max_tokens: int = TOKENS
) -> GenerationParams:
    prompt = tuple(text[:length])
    return GenerationParams(
        prompt, max_tokens=max_tokens, draft_mode=mode, tree_budget=budget, ignore_eos=True
    )


MODES: list[tuple[DraftMode, int]] = [
    ("tree", 1), ("tree", 12), ("tree", AUTO_BUDGET), ("tree", 0), ("chain", 3), ("off", AUTO_BUDGET),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "budget"), MODES)
async def test_alone(
    stages: InProcessStages, pair: tuple[Path, Path], text: list[int], mode: DraftMode, budget: int
) -> None:
    rounds = Rounds()
    async with engine_over(stages, pair[0], rounds) as engine:
        for length in (1, 15, 16, 17, 40):
            (sink,) = await generate_all(engine, [request(text, length, mode, budget)])
            assert sink.token_ids == text[length : length + TOKENS]
    nodes = sum(sum(done.tree_sizes) for done in rounds)
    assert (nodes > 0) == (mode != "off" and budget != 0)
    if budget == 12:
        assert len(rounds) < 5 * TOKENS / 1.5  # drafts are accepted


async def test_prompts_are_read_by_prepared_steps(
    stages: InProcessStages, pair: tuple[Path, Path], text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As chains, several prompts in one step; only a chunk beyond every size is read the general way."""
    general = list[list[int]]()
    read = staging.read

    def noted(*arguments: Any) -> staging.Read:
        general.append([len(chunk) for chunk in arguments[3]])
        return read(*arguments)

    monkeypatch.setattr(staging, "read", noted)
    async with engine_over(stages, pair[0], Rounds()) as engine:
        requests = [request(text, length, "tree", 3, max_tokens=6) for length in (1, 9, 5, 12)]
        sinks = await generate_all(engine, requests)
        assert not general
        (long,) = await generate_all(engine, [request(text, 14, "off", 0, max_tokens=6)])
    assert [sink.token_ids for sink in sinks] == [text[length : length + 6] for length in (1, 9, 5, 12)]
    assert long.token_ids == text[14:20]
    assert general == [[14]]


async def test_together_with_different_budgets(
    stages: InProcessStages, pair: tuple[Path, Path], text: list[int]
) -> None:
    requests = [
        request(text, 3 + 7 * index, *MODES[index % len(MODES)], max_tokens=16 + 13 * (index % 3))
        for index in range(12)
    ]
    rounds = Rounds()
    async with engine_over(stages, pair[0], rounds) as engine:
        sinks = await generate_all(engine, requests)
    for params, sink in zip(requests, sinks, strict=True):
        start = len(params.prompt_ids)
        assert sink.token_ids == text[start : start + params.max_tokens]
    assert any(len(done.batch) == 3 for done in rounds)


async def test_in_turns_with_the_general_way(
    stages: InProcessStages, pair: tuple[Path, Path], text: list[int]
) -> None:
    """A sequence that samples sends the whole batch the general way while it lives."""
    sampling = replace(
        request(text, 20, "tree", 3, max_tokens=8), sampling=SamplingSpec(temperature=0.7, seed=3)
    )
    requests = [request(text, 5, "tree", 12), sampling, request(text, 30, "tree", AUTO_BUDGET)]
    requests += [replace(sampling, max_tokens=5), request(text, 9, "chain", 3)]
    rounds = Rounds()
    async with engine_over(stages, pair[0], rounds) as engine:
        alone = [(await generate_all(engine, [params]))[0].token_ids for params in requests]
        sinks = await generate_all(engine, requests)
    assert [sink.token_ids for sink in sinks] == alone
    for params, ids in zip(requests, alone, strict=True):
        start = len(params.prompt_ids)
        assert params is sampling or params.sampling.temperature or ids == text[start : start + TOKENS]


async def test_a_budget_beyond_every_prepared_size(
    stages: InProcessStages, pair: tuple[Path, Path], text: list[int]
) -> None:
    """Such a sequence holds more pages; where it drafts nothing, its step is of a prepared size."""
    async with engine_over(stages, pair[0], Rounds()) as engine:
        (sink,) = await generate_all(engine, [request(text, 300, "tree", 256, max_tokens=2)])
    assert sink.token_ids == text[300:302]


async def test_a_drafter_far_behind_is_brought_up_in_several_rounds(
    stages: InProcessStages, pair: tuple[Path, Path], text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verifier has cached a prompt that the drafter never saw; what was owed is not delivered twice."""
    monkeypatch.setattr(drafting, "_MOST_READ_BACK", 32)
    rounds = Rounds()
    async with engine_over(stages, pair[0], rounds) as engine:
        requests = [request(text, 100, "off", 0, 2), request(text, 110, "tree", 12)]
        for params in requests:
            (sink,) = await generate_all(engine, [replace(params, cache_salt="of nobody else")])
    assert sink.token_ids == text[110 : 110 + TOKENS]
    sizes = [sum(done.tree_sizes) for done in rounds[1:]]
    assert not any(sizes[:3]), "96 tokens are cached, and some are committed meanwhile"
    assert all(sizes[4:-1])


def held(stages: InProcessStages, session: int, count: int) -> list[torch.Tensor]:
    """Keys, values and features of the first tokens in both caches."""
    found = []
    for stage in (stages.verifier, stages.drafter):
        table, pool = stage.sessions, stage.pool  # type: ignore[union-attr]
        (one,) = [each for each in table if each.session_id == session]
        assert one.length >= count
        slots = one.pages.slots[:count]
        found += [pool.keys_values[:, :, slots], pool.features[slots]]
    return found


def test_both_caches_hold_what_reading_everything_leaves_there(
    stages: InProcessStages, text: list[int], script: Script
) -> None:
    """A hundred rounds of three sequences with every kind of acceptance; each in step with its drafter."""
    starts = {1: 2, 2: 30, 3: 47}
    for session, start in starts.items():
        open_both(stages, session, text[: start + 1])
    lengths, rounds, accepted, kept = dict(starts), 0, [], []
    while min(lengths.values()) < TEXT - 60:
        script.noise = (0.02, 0.4, 0.8)[rounds % 3]
        live = [session for session, length in lengths.items() if length < TEXT - 60]
        count = len(live)
        ints = partial(torch.tensor, dtype=torch.int32)
        batch = SessionBatch(torch.tensor(live), ints([0] * count), ints([lengths[s] for s in live]))
        roots = ints([text[lengths[s]] for s in live])
        budgets = ints([(3, 12, 0)[(rounds + s) % 3] for s in live])
        is_chain = torch.tensor([rounds % 4 == 0] * count)
        asked = RoundRequest(batch, ints([0] * count), roots, budgets, ints([7] * count), is_chain, 12)
        assert stages._rounds is not None
        result = stages._rounds.run(asked)
        assert not result.status.any()
        assert not result.draft_status.any()
        for place, session in enumerate(live):
            took = int(result.accepted_counts[place])
            start = lengths[session] + 1
            assert result.accepted_tokens[place, :took].tolist() == text[start : start + took]
            assert int(result.bonus_tokens[place]) == text[start + took]
            lengths[session] += took + 1
            accepted.append(took)
        kept.append((result, result.bonus_tokens.tolist(), result.accepted_tokens.tolist()))
        rounds += 1
    for result, bonus, paths in kept:  # the rounds that followed have left it as it was
        assert (result.bonus_tokens.tolist(), result.accepted_tokens.tolist()) == (bonus, paths)
    assert {0, 1, 2, 3, 4, 7} <= set(accepted)
    for session, length in lengths.items():
        open_both(stages, 10 + session, text[: length + 1])
        for after, read in zip(
            held(stages, session, length), held(stages, 10 + session, length), strict=True
        ):
            torch.testing.assert_close(after, read, rtol=0, atol=2e-5)
    for stage in (stages.verifier, stages.drafter):
        stage.release([*lengths, *(10 + session for session in lengths)])


def test_lost_sessions_are_told_and_the_others_served(stages: InProcessStages, text: list[int]) -> None:
    for session in (1, 2, 3):
        open_both(stages, session, text[:20])
    stages.verifier.release([1])
    stages.drafter.release([3])
    ints = partial(torch.tensor, dtype=torch.int32)
    batch = SessionBatch(torch.tensor([1, 2, 3]), ints([0, 0, 0]), ints([19, 19, 19]))
    roots = ints([text[19]] * 3)
    asked = RoundRequest(
        batch, ints([0, 0, 0]), roots, ints([3, 2, 1]), ints([7, 7, 7]), torch.tensor([False] * 3), 3
    )
    assert stages._rounds is not None
    result = stages._rounds.run(asked)
    assert result.status.tolist() == [Status.SESSION_LOST, Status.OK, Status.OK]
    assert result.draft_status.tolist() == [Status.OK, Status.OK, Status.SESSION_LOST]
    assert result.node_counts.tolist() == [0, 2, 0]
    assert result.path_log_probs.isfinite().tolist() == [[False] * 3, [True, True, False], [False] * 3]
    assert result.accepted_counts[2] == 0
    assert result.bonus_tokens[2] == text[20]
    for stage in (stages.verifier, stages.drafter):
        stage.release([1, 2, 3])


async def test_a_drafter_that_keeps_losing_a_sequence_is_given_up(
    stages: InProcessStages, pair: tuple[Path, Path], text: list[int]
) -> None:
    rounds = Rounds()
    async with engine_over(stages, pair[0], rounds) as engine:
        assert stages._rounds is not None
        run = stages._rounds.run

        def losing(asked: RoundRequest) -> RoundResult:
            stages.drafter.release(asked.sessions.ids.tolist())
            return run(asked)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stages._rounds, "run", losing)
            (sink,) = await generate_all(engine, [request(text, 20, "tree", 3)])
    assert sink.token_ids == text[20 : 20 + TOKENS]
    assert [bool(done.drafting) for done in rounds] == [True] * 4 + [False] * (TOKENS - 5)
