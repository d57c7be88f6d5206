"""Guided decoding over the in-process stages: every document is valid, and the same in every draft mode."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ddtree.errors import InvalidArgument
from ddtree.params import DraftMode, GenerationParams
from ddtree.sampling_spec import Grammar, SamplingSpec
from ddtree.text import TextCodec
from ddtree.types import AUTO_BUDGET
from tests.fakes.collecting_sink import CollectingSink
from tests.fakes.ngram_drafter import NgramDrafter
from tests.fakes.pipeline import generate_all, make_verifier, running_engine
from tests.fakes.tiny_models import BLOCK_SIZE, EOS_ID, make_target

DOCUMENTS = 200
MODES: list[tuple[DraftMode, int]] = [("tree", 24), ("chain", 6), ("off", AUTO_BUDGET)]


@dataclass(frozen=True)
class Case:
    """A grammar, a document of it for the drafter to learn from, and what is valid by other means."""

    grammar: Grammar
    sample: str
    is_valid: Callable[[str], bool]


def person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 4
        and type(value["age"]) is int
        and 0 <= value["age"] <= 130
        and len(value["tags"]) <= 3
        and set(value["tags"]) <= {"red", "green"}
    )


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]( at (noon|night))?"
EXPRESSION = """
root ::= term (" + " term)?
term ::= "(" factor "*" factor ")" | factor
factor ::= [1-9] [0-9]? | "-" [1-9]
"""
CASES = {
    "json": Case(
        Grammar("json", json.dumps(PERSON)), '{"name": "abc", "age": 12, "tags": ["red", "green"]}', person
    ),
    "regex": Case(
        Grammar("regex", DATE), "1987-12-31 at noon", lambda text: re.fullmatch(DATE, text) is not None
    ),
    "ebnf": Case(
        Grammar("grammar", EXPRESSION),
        "(12*-3) + 45",
        lambda text: re.fullmatch(r"[-0-9()*+ ]+", text) is not None and isinstance(eval(text), int),  # noqa: S307
    ),
    "choice": Case(
        Grammar("choice", json.dumps(["certainly", "certainly not", "né (1.5)"])),
        "certainly not",
        lambda text: text in ("certainly", "certainly not", "né (1.5)"),
    ),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


def requests(case: Case, mode: tuple[DraftMode, int], count: int, **sampling: Any) -> list[GenerationParams]:
    return [
        GenerationParams(
            (65, seed % 200),
            max_tokens=200,
            draft_mode=mode[0],
            tree_budget=mode[1],
            stop_ids=frozenset({EOS_ID}),
            sampling=SamplingSpec(**{"temperature": 1.0, "seed": seed, "grammar": case.grammar, **sampling}),
        )
        for seed in range(count)
    ]


async def run(target: Path, case: Case, params: list[GenerationParams]) -> list[CollectingSink]:
    sample = TextCodec.from_folder(target).encode(case.sample)
    drafter = NgramDrafter(sample, block_size=BLOCK_SIZE, draft_hash="tiny")
    async with running_engine(
        make_verifier(target, kv_cache_bytes=1 << 25),
        drafter,
        target,
        max_waiting=len(params),
    ) as engine:
        return await generate_all(engine, params)


@pytest.mark.parametrize("name", CASES)
async def test_every_document_is_valid_and_the_same_in_every_mode(target: Path, name: str) -> None:
    case = CASES[name]
    texts = {}
    for mode in MODES:
        sinks = await run(target, case, requests(case, mode, DOCUMENTS))
        assert {sink.finish_reason for sink in sinks} == {"stop"}
        texts[mode[0]] = [sink.text for sink in sinks]
        invalid = [text for text in texts[mode[0]] if not case.is_valid(text)]
        assert not invalid, mode
        if mode[0] != "off":
            assert sum(sink.stats.accepted_tokens for sink in sinks if sink.stats) > DOCUMENTS / 4
    assert len(set(texts["off"])) > (DOCUMENTS / 4 if name != "choice" else 2)
    assert texts["tree"] == texts["chain"] == texts["off"]


@pytest.mark.parametrize("temperature", [0.0, 0.5])
async def test_guided_and_free_sequences_share_a_batch(target: Path, temperature: float) -> None:
    """Each case in each mode beside an unguided one; every sequence is what it is alone in mode off."""
    params = [
        params
        for case in CASES.values()
        for mode in MODES
        for params in requests(case, mode, 1, temperature=temperature, seed=5)
    ]
    unguided = replace(params[0].sampling, grammar=None)
    free = [
        replace(params[0], draft_mode=mode, tree_budget=budget, max_tokens=20, sampling=unguided)
        for mode, budget in MODES
    ]
    together = await run(target, CASES["json"], [*params, *free])
    for start in range(0, len(together), len(MODES)):
        texts = [sink.token_ids for sink in together[start : start + len(MODES)]]
        assert texts[0] == texts[1] == texts[2]
    alone = [await run(target, CASES["json"], [each]) for each in [*params, *free][2 :: len(MODES)]]
    assert [sinks[0].token_ids for sinks in alone] == [sink.token_ids for sink in together[2 :: len(MODES)]]


async def test_a_budget_holds_after_the_grammar_has_pruned(target: Path) -> None:
    """More nodes are asked for than are verified, so that forbidden ones leave no gaps."""
    case = CASES["json"]
    for budget in (1, 5):
        (sink,) = await run(target, case, requests(case, ("tree", budget), 1))
        assert sink.stats is not None
        assert 0 < sink.stats.draft_tokens <= budget * sink.stats.rounds


async def test_a_lost_session_finds_its_place_in_the_grammar_again(target: Path) -> None:
    case = CASES["json"]
    (params,) = requests(case, MODES[0], 1)
    (undisturbed,) = await run(target, case, [params])
    verifier = make_verifier(target)
    emitted = 0

    def lose() -> None:
        nonlocal emitted
        emitted += 1
        if emitted in (2, 5, 6):
            verifier.release([session.session_id for session in verifier.sessions])

    sink = CollectingSink(on_emit=lose)
    drafter = NgramDrafter(list(case.sample.encode()), block_size=BLOCK_SIZE, draft_hash="tiny")
    async with running_engine(verifier, drafter, target) as engine:
        await engine.generate(params, sink)
    assert emitted > 6
    assert sink.text == undisturbed.text


async def test_a_grammar_that_grows_too_complex_ends_its_own_sequence_only(target: Path) -> None:
    optional = {"type": "object", "properties": {f"p{index}": {"type": "null"} for index in range(1500)}}
    (hard,) = requests(Case(Grammar("json", json.dumps(optional)), "", bool), MODES[0], 1)
    (easy,) = requests(CASES["json"], MODES[0], 1)
    sinks = [CollectingSink(), CollectingSink()]
    drafter = NgramDrafter(list(range(3)), block_size=BLOCK_SIZE, draft_hash="tiny")
    async with running_engine(make_verifier(target), drafter, target) as engine:
        outcomes = await asyncio.gather(
            engine.generate(hard, sinks[0]), engine.generate(easy, sinks[1]), return_exceptions=True
        )
    assert isinstance(outcomes[0], InvalidArgument)
    assert "too complex" in str(outcomes[0])
    assert outcomes[1] is None
    assert person(sinks[1].text)
