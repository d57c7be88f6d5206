"""A prefix hit changes what is computed and nothing else: the same tokens from the same rounds as a miss."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree import assembly, drafting
from ddtree.config import ServingConfig
from ddtree.engine import Engine
from ddtree.events import Event, PrefixHit, RoundDone, StageCalled
from ddtree.params import GenerationParams
from ddtree.sampling_spec import Grammar, SamplingSpec
from ddtree.stages.in_process import InProcessStages
from ddtree.verify import TargetVerifier
from tests.fakes.collecting_sink import CollectingSink
from tests.fakes.pipeline import generate_all, make_oracle, make_verifier, running_engine
from tests.fakes.recording_drafter import RecordingDrafter
from tests.fakes.target_families import make_family
from tests.fakes.tiny_models import EOS_ID, make_draft
from tests.integration.stage_faults import ForgetfulVerifier

PAGE = 16
PROMPT = tuple(b"You are a helpful machine. Answer in one line, please: what is it?")  # 66 ids
CASES = {
    "greedy": SamplingSpec(),
    "sampled": SamplingSpec(temperature=0.5, top_p=0.9, seed=3),
    "penalties": SamplingSpec(
        temperature=0.4, repetition_penalty=1.5, presence_penalty=0.6, frequency_penalty=0.8, seed=6
    ),
    "bad words": SamplingSpec(bad_words=((63, 1), (63, 136)), min_tokens=8, stop_ids=(EOS_ID,)),
    "grammar": SamplingSpec(temperature=1.0, seed=5, grammar=Grammar("regex", "[a-z]{4} [0-9]{3,9}[.!]{12}")),
    "log-probs": SamplingSpec(temperature=0.5, seed=8, top_log_probs=2),
}


def request(spec: SamplingSpec, prompt: tuple[int, ...] = PROMPT, **options: Any) -> GenerationParams:
    options = {"max_tokens": 30, "tree_budget": 20, "stop_ids": frozenset({EOS_ID}), **options}
    return GenerationParams(prompt, sampling=spec, **options)


@dataclass
class Listener:
    """Keeps what was hit and what was called."""

    hits: list[int]
    calls: list[str]

    def __call__(self, event: Event) -> None:
        if isinstance(event, PrefixHit):
            self.hits.append(event.tokens)
        if isinstance(event, StageCalled):
            self.calls.append(event.operation)


@asynccontextmanager
async def engine_of(
    verifier: TargetVerifier, folder: Path, **options: Any
) -> AsyncIterator[tuple[Engine, Listener, RecordingDrafter]]:
    """An engine over a verifier that may know prompts already, and an oracle that never does."""
    listener, drafter = Listener([], []), RecordingDrafter(make_oracle(folder, noise=0.5))
    async with running_engine(verifier, drafter, folder, observe=listener, **options) as engine:
        yield engine, listener, drafter


async def run_alone(
    verifier: TargetVerifier, folder: Path, params: GenerationParams
) -> tuple[CollectingSink, Listener, RecordingDrafter]:
    async with engine_of(verifier, folder) as (engine, listener, drafter):
        (sink,) = await generate_all(engine, [params])
    return sink, listener, drafter


def assert_same(ours: CollectingSink, theirs: CollectingSink) -> None:
    """Tokens, rounds, drafted and accepted tokens; times aside everything that was counted."""
    assert ours.token_ids == theirs.token_ids
    assert ours.finish_reason == theirs.finish_reason
    assert ours.stats is not None
    assert theirs.stats is not None
    kept = {"arrival_ns": 0, "first_token_ns": 0}
    assert replace(ours.stats, **kept) == replace(theirs.stats, **kept)
    entries = [[entry for delta in sink.deltas for entry in delta.log_probs] for sink in (ours, theirs)]
    for one, other in zip(*entries, strict=True):
        assert one.model == pytest.approx(other.model, abs=1e-4)


@pytest.mark.parametrize("name", CASES)
async def test_a_hit_is_a_miss_that_ran_less(tiny_target: Path, name: str) -> None:
    params = request(CASES[name])
    verifier = make_verifier(tiny_target)
    miss, cold, told = await run_alone(verifier, tiny_target, params)
    hit, warm, told_again = await run_alone(verifier, tiny_target, params)
    assert (cold.hits, warm.hits) == ([], [4 * PAGE])
    assert "read_features" not in cold.calls
    assert_same(hit, miss)
    assert miss.stats is not None
    assert miss.stats.accepted_tokens > 0
    (first,), (second,) = told.contexts.values(), told_again.contexts.values()
    assert first.ids == second.ids
    assert torch.allclose(torch.cat(first.features), torch.cat(second.features), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("greedy", PAGE - 1), ("penalties", PAGE), ("sampled", PAGE + 1), ("penalties", 3 * PAGE),
        ("grammar", 3 * PAGE), ("penalties", len(PROMPT)),
    ],
)  # fmt: skip
async def test_prompts_that_share_a_beginning(tiny_target: Path, name: str, shared: int) -> None:
    """The other prompt's output must not count as this one's, nor its prompt."""
    verifier, fresh = make_verifier(tiny_target), make_verifier(tiny_target)
    params = request(CASES[name], (*PROMPT[:shared], *b" Hello!"))
    await run_alone(verifier, tiny_target, request(CASES["greedy"]))
    hit, listener, _ = await run_alone(verifier, tiny_target, params)
    miss, _, _ = await run_alone(fresh, tiny_target, params)
    assert sum(listener.hits) == shared // PAGE * PAGE
    assert_same(hit, miss)


@pytest.mark.parametrize("name", ["greedy", "penalties"])
async def test_a_conversation_goes_on_from_its_answer(tiny_target: Path, name: str) -> None:
    """What was generated is committed like what was read: the next turn begins with both."""
    verifier = make_verifier(tiny_target)
    first, _, _ = await run_alone(verifier, tiny_target, request(CASES[name], ignore_eos=True))
    turn = (*PROMPT, *first.token_ids, *b"\nAnd then?")
    hit, listener, _ = await run_alone(verifier, tiny_target, request(CASES[name], turn))
    # The last token of the answer is not in the cache: nothing was to follow it.
    assert listener.hits == [(len(PROMPT) + 29) // PAGE * PAGE]
    assert_same(
        hit, (await run_alone(make_verifier(tiny_target), tiny_target, request(CASES[name], turn)))[0]
    )


@pytest.mark.parametrize("name", ["greedy", "penalties", "grammar"])
async def test_a_lost_session_comes_back_from_its_own_pages(tiny_target: Path, name: str) -> None:
    """Prompt and answer: the sampler counts, and the grammar follows, what is not read again."""
    params = request(CASES[name])
    expected, _, _ = await run_alone(make_verifier(tiny_target), tiny_target, params)
    verifier = make_verifier(tiny_target)
    verifier.__class__ = ForgetfulVerifier
    rounds = 0

    def is_forgetful() -> bool:
        nonlocal rounds
        rounds += 1
        return rounds in (1, 6)

    verifier.is_forgetful = is_forgetful  # type: ignore[attr-defined]
    sink, listener, _ = await run_alone(verifier, tiny_target, params)
    assert sink.token_ids == expected.token_ids
    assert len(listener.hits) == 2
    assert listener.hits[0] == 4 * PAGE <= listener.hits[1]
    assert listener.calls.count("read_features") >= 2 * 4 * PAGE // 8


@pytest.mark.parametrize("name", ["greedy", "sampled"])
async def test_a_drafter_that_is_lost_after_a_hit(tiny_target: Path, name: str) -> None:
    verifier, params = make_verifier(tiny_target), request(CASES[name])
    expected, _, _ = await run_alone(verifier, tiny_target, params)
    oracle = make_oracle(tiny_target, noise=0.5)
    rounds = 0

    def lose(event: Event) -> None:
        nonlocal rounds
        rounds += isinstance(event, RoundDone)
        oracle.lose_next = oracle.lose_next or (rounds in (1, 4) and isinstance(event, RoundDone))

    async with running_engine(verifier, oracle, tiny_target, observe=lose) as engine:
        (sink,) = await generate_all(engine, [params])
    assert rounds > 4
    assert sink.token_ids == expected.token_ids


async def test_what_a_drafter_lacks_is_read_back_over_several_steps(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile rounds go on without drafts, and prompts are read on."""
    monkeypatch.setattr(drafting, "_MOST_READ_BACK", 20)
    verifier, params = make_verifier(tiny_target), request(CASES["sampled"])
    expected, _, _ = await run_alone(verifier, tiny_target, params)
    sink, listener, _ = await run_alone(verifier, tiny_target, params)
    assert sink.token_ids == expected.token_ids
    assert sink.stats is not None
    assert sink.stats.accepted_tokens > 0
    assert listener.calls[: listener.calls.index("build_tree")].count("verify") == 64 // 20
    longer = request(CASES["greedy"], (*PROMPT, *b", and then what? Say it in many more words than before."))
    hit, listener, _ = await run_alone(verifier, tiny_target, longer)
    assert listener.hits == [64]
    assert hit.token_ids == (await run_alone(make_verifier(tiny_target), tiny_target, longer))[0].token_ids


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss"])
async def test_windows_of_a_target_see_over_shared_pages(tmp_path: Path, family: str) -> None:
    folder = make_family(tmp_path, family)
    verifier = make_verifier(folder)
    miss, _, _ = await run_alone(verifier, folder, request(CASES["sampled"]))
    hit, listener, _ = await run_alone(verifier, folder, request(CASES["sampled"]))
    assert listener.hits == [4 * PAGE]
    assert_same(hit, miss)


async def test_salts_and_the_switch_keep_prompts_apart(tiny_target: Path) -> None:
    verifier = make_verifier(tiny_target)
    for salt, hits in (("", []), ("a", []), ("b", []), ("a", [64]), ("", [64])):
        _, listener, _ = await run_alone(verifier, tiny_target, request(SamplingSpec(), cache_salt=salt))
        assert listener.hits == hits, salt
    off = make_verifier(tiny_target, prefix_cache=False)
    for _ in range(2):
        _, listener, _ = await run_alone(off, tiny_target, request(SamplingSpec()))
        assert listener.hits == []
        assert off.pool.pages_cached == 0


async def test_many_at_once_share_and_one_is_cancelled(tiny_target: Path) -> None:
    """Eight of one beginning, two of them the same, one given up on the way: each is as if alone."""
    verifier = make_verifier(tiny_target)
    work = [request(CASES["sampled"], (*PROMPT, *range(1, 1 + count))) for count in (1, 2, 3, 4, 5, 6, 6)]
    async with engine_of(verifier, tiny_target, prefill_chunk=32) as (engine, listener, _):
        leaving = CollectingSink(cancel_after=2)
        sinks = [CollectingSink() for _ in work]
        await asyncio.gather(
            engine.generate(request(SamplingSpec(), max_tokens=200, ignore_eos=True), leaving),
            *(engine.generate(params, sink) for params, sink in zip(work, sinks, strict=True)),
        )
    assert leaving.finish_reason == "cancelled"
    assert sum(listener.hits) > 4 * len(PROMPT)
    for params, sink in zip(work, sinks, strict=True):
        alone, _, _ = await run_alone(make_verifier(tiny_target), tiny_target, params)
        assert sink.token_ids == alone.token_ids


async def test_a_pool_that_is_full_of_cached_pages_serves_on(tiny_target: Path) -> None:
    """Cached pages make room; a prompt whose pages went is read again."""
    verifier = make_verifier(tiny_target, max_nodes=32)
    small = make_verifier(
        tiny_target, max_nodes=32, kv_cache_bytes=verifier.pool.shape.bytes_per_slot * PAGE * 12
    )
    expected: dict[int, list[int]] = {}
    for turn in range(2):
        for begin in range(4):
            params = request(SamplingSpec(), (begin, *PROMPT), tree_budget=8, max_tokens=12)
            sink, listener, _ = await run_alone(small, tiny_target, params)
            assert sink.token_ids == expected.setdefault(begin, sink.token_ids)
            assert sum(listener.hits) < 64 or not turn
    assert small.pool.pages_cached > 4


def load(tmp_path: Path, target: Path, **options: Any) -> InProcessStages:
    draft = tmp_path / "draft"
    if not draft.exists():
        make_draft(draft)
    config = ServingConfig(
        target,
        draft,
        dtype="float32",
        device="cpu",
        page_size=PAGE,
        kv_cache_mib=4,
        draft_kv_cache_mib=2,
        **options,
    )
    return assembly.load_in_process(config)


async def run_real(
    stages: InProcessStages, folder: Path, params: GenerationParams
) -> tuple[CollectingSink, Listener]:
    """Through the product's own drafter."""
    listener = Listener([], [])
    async with running_engine(stages.verifier, stages.drafter, folder, observe=listener) as engine:
        (sink,) = await generate_all(engine, [params])
    stages.drafter.check_integrity()  # type: ignore[attr-defined]
    return sink, listener


async def test_the_drafter_begins_with_its_own_pages(tmp_path: Path, tiny_target: Path) -> None:
    """Nothing is read back where both caches know the prompt; what it lacks comes from the verifier."""
    stages = load(tmp_path, tiny_target)
    params = request(SamplingSpec(), tree_budget=200)
    miss, _ = await run_real(stages, tiny_target, params)
    hit, listener = await run_real(stages, tiny_target, params)
    assert listener.hits == [4 * PAGE]
    assert "read_features" not in listener.calls
    assert_same(hit, miss)
    assert miss.stats is not None
    assert miss.stats.accepted_tokens > 0
    forgetful = load(tmp_path, tiny_target).drafter
    stages.drafter = forgetful
    again, listener = await run_real(stages, tiny_target, params)
    assert listener.calls.count("read_features") == 4 * PAGE // 8
    assert_same(again, miss)
    await stages.close()
