"""Sampled decoding over the in-process stages equals plain sampled decoding, token for token.

The reference runs one full forward a token and recomputes every setting from the whole prefix, so a penalty
taken once per round, noise keyed by the node's index or a cut over the wrong row all show.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree.params import DraftMode, GenerationParams
from ddtree.sampling_spec import SamplingSpec
from ddtree.types import AUTO_BUDGET
from tests.fakes.collecting_sink import CollectingSink
from tests.fakes.pipeline import GreedyReference, generate_all, make_oracle, make_verifier, running_engine
from tests.fakes.tiny_models import EOS_ID, make_target
from tests.oracles.sampled_decoding import SampledReference

MODES: list[tuple[DraftMode, int]] = [
    ("tree", 40), ("tree", 3), ("tree", AUTO_BUDGET), ("chain", 6), ("off", AUTO_BUDGET),
]  # fmt: skip
STOPS = frozenset({EOS_ID})
LARGE_SEED = 2**64 - 5
COOL, WARM = 0.35, 1.0
SETTINGS = {
    "temperature": SamplingSpec(temperature=COOL, seed=1),
    "hot": SamplingSpec(temperature=WARM, seed=LARGE_SEED, sequence_index=3),
    "top_k": SamplingSpec(temperature=WARM, top_k=4, seed=2),
    "top_p": SamplingSpec(temperature=COOL, top_p=0.8, seed=3),
    "min_p": SamplingSpec(temperature=WARM, min_p=0.2, seed=4),
    "all cuts": SamplingSpec(temperature=0.7, top_k=9, top_p=0.9, min_p=0.05, seed=5),
    "repetition": SamplingSpec(temperature=COOL, repetition_penalty=1.4, seed=6),
    "presence": SamplingSpec(presence_penalty=1.5, frequency_penalty=0.75),
    "penalties": SamplingSpec(
        temperature=COOL, repetition_penalty=0.8, presence_penalty=-0.5, frequency_penalty=0.9, seed=7
    ),
    "bias": SamplingSpec(temperature=COOL, logit_bias=((7, 4.0), (9, -100.0), (EOS_ID, 2.0)), seed=8),
    "min_tokens": SamplingSpec(
        temperature=COOL, logit_bias=((EOS_ID, 9.0),), min_tokens=12, stop_ids=(EOS_ID,), seed=9
    ),
    "greedy bias": SamplingSpec(logit_bias=((7, 3.0), (EOS_ID, -5.0))),
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def reference(target: Path) -> SampledReference:
    return SampledReference(target)


def prompts(count: int, seed: int = 3) -> list[tuple[int, ...]]:
    """Some of them longer than a prefill chunk."""
    source = random.Random(seed)
    return [tuple(source.randrange(256) for _ in range(length)) for length in (9, 40, 1)[:count]]


def request(
    prompt: tuple[int, ...], spec: SamplingSpec, mode: tuple[DraftMode, int], **options: Any
) -> GenerationParams:
    return GenerationParams(
        prompt, **{"max_tokens": 30, "stop_ids": STOPS, **options}, draft_mode=mode[0], tree_budget=mode[1],
        sampling=spec,
    )  # fmt: skip


async def run(target: Path, requests: list[GenerationParams], **options: Any) -> list[CollectingSink]:
    async with running_engine(
        make_verifier(target), make_oracle(target, noise=0.4), target, **options
    ) as engine:
        return await generate_all(engine, requests)


@pytest.mark.parametrize("name", SETTINGS)
async def test_every_setting_in_every_draft_mode(
    target: Path, reference: SampledReference, name: str
) -> None:
    """All modes at once: sequences of one batch do not disturb each other."""
    spec = SETTINGS[name]
    requests = [request(prompt, spec, mode) for prompt in prompts(2) for mode in MODES]
    sinks = await run(target, requests)
    for index, prompt in enumerate(prompts(2)):
        expected = reference(prompt, spec, 30, STOPS).tokens
        for mode, sink in zip(MODES, sinks[index * len(MODES) :], strict=False):
            assert sink.token_ids == expected, mode
    drafted = [sink.stats for sink in sinks if sink.stats is not None]
    assert sum(stats.accepted_tokens for stats in drafted) > 0, "no draft was ever accepted"


async def test_a_word_that_is_banned_never_comes_up(target: Path, reference: SampledReference) -> None:
    """Of one, two and three tokens, begun in the prompt, and completed inside an accepted path."""
    plain = SamplingSpec(temperature=COOL, seed=21)
    prompt = prompts(1)[0]
    free = reference(prompt, plain, 30, STOPS).tokens
    words = ((free[0],), (prompt[-1], free[1]), tuple(free[4:6]), tuple(free[9:12]))
    spec = replace(plain, bad_words=words)
    expected = reference(prompt, spec, 30, STOPS).tokens
    assert expected != free
    for sink in await run(target, [request(prompt, spec, mode) for mode in MODES]):
        assert sink.token_ids == expected


async def test_settings_of_one_batch_do_not_mix(target: Path, reference: SampledReference) -> None:
    """Greedy ones among them, more than run at a time."""
    specs = [SamplingSpec(), *SETTINGS.values()]
    requests = [
        request(prompt, spec, MODES[index % len(MODES)], max_tokens=8 + index)
        for index, spec in enumerate(specs)
        for prompt in prompts(2, seed=index)
    ]
    random.Random(1).shuffle(requests)
    for params, sink in zip(requests, await run(target, requests, max_sequences=7), strict=True):
        expected = reference(params.prompt_ids, params.sampling, params.max_tokens, STOPS)
        assert sink.token_ids == expected.tokens


async def test_a_vanishing_temperature_is_greedy(target: Path) -> None:
    greedy = GreedyReference(target)
    specs = [SamplingSpec(temperature=temperature, seed=4) for temperature in (1e-3, 1e-12, 1e-38)]
    prompt = prompts(1)[0]
    sinks = await run(target, [request(prompt, spec, MODES[0]) for spec in specs])
    assert [sink.token_ids for sink in sinks] == [greedy(prompt, 30)] * 3


async def test_sequences_of_a_request_differ_and_repeat(target: Path) -> None:
    params = replace(
        request(prompts(1)[0], SamplingSpec(temperature=WARM, seed=3), MODES[0]), num_return_sequences=4
    )
    first, second = [await run(target, params.sequences()) for _ in range(2)]
    assert [sink.token_ids for sink in first] == [sink.token_ids for sink in second]
    assert len({tuple(sink.token_ids) for sink in first}) == 4


async def test_a_lost_session_takes_its_settings_along(target: Path, reference: SampledReference) -> None:
    """Counts of the penalties, where the prompt ends, and the noise's position survive the second life."""
    spec = replace(SETTINGS["penalties"], bad_words=((40, 41),), min_tokens=20, stop_ids=(EOS_ID,))
    verifier = make_verifier(target)
    emitted = 0

    def lose() -> None:
        nonlocal emitted
        emitted += 1
        if emitted in (3, 6):
            verifier.release([session.session_id for session in verifier.sessions])

    sink = CollectingSink(on_emit=lose)
    async with running_engine(verifier, make_oracle(target, noise=0.4), target) as engine:
        await engine.generate(request(prompts(2)[1], spec, MODES[0]), sink)
    assert emitted > 6
    assert sink.token_ids == reference(prompts(2)[1], spec, 30, STOPS).tokens


@pytest.mark.parametrize("mode", MODES, ids=str)
async def test_log_probs_are_those_of_a_plain_forward(
    target: Path, reference: SampledReference, mode: tuple[DraftMode, int]
) -> None:
    specs = [
        replace(SETTINGS["all cuts"], top_log_probs=5),
        replace(SETTINGS["penalties"], top_log_probs=0),
        SamplingSpec(top_log_probs=2),
        SETTINGS["top_k"],
    ]
    prompt = prompts(2)[1]
    sinks = await run(target, [request(prompt, spec, mode) for spec in specs])
    for spec, sink in zip(specs, sinks, strict=True):
        entries = [entry for delta in sink.deltas for entry in delta.log_probs]
        expected = reference(prompt, spec, 30, STOPS)
        assert sink.token_ids == expected.tokens
        if spec.top_log_probs < 0:
            assert entries == []
            continue
        assert len(entries) == len(sink.token_ids)
        for token, entry, model, drawn in zip(
            expected.tokens, entries, expected.model, expected.drawn, strict=True
        ):
            assert math.isclose(entry.model, float(model[token]), abs_tol=1e-4)
            assert math.isclose(entry.drawn, drawn, abs_tol=1e-4)
            values, ids = model.topk(spec.top_log_probs)
            assert [token_id for token_id, _ in entry.top] == ids.tolist()
            assert torch.allclose(torch.tensor([value for _, value in entry.top]), values, atol=1e-4)


async def test_log_probs_end_with_the_tokens(target: Path, reference: SampledReference) -> None:
    """A stop in the middle of an accepted path takes the entries behind it away too."""
    spec = replace(SETTINGS["temperature"], top_log_probs=1)
    prompt = prompts(1)[0]
    tokens = reference(prompt, spec, 30, frozenset()).tokens
    for place in range(1, 8):
        stops = frozenset({tokens[place]})
        (sink,) = await run(target, [request(prompt, spec, ("tree", 60), stop_ids=stops)])
        assert sink.token_ids == tokens[: tokens.index(tokens[place]) + 1]
        assert sum(len(delta.log_probs) for delta in sink.deltas) == len(sink.token_ids)
