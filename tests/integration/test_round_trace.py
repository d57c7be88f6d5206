"""What a trace says of a sequence's rounds, and that nothing is looked at where nobody traces."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree.live import DraftContext, Live
from ddtree.params import DraftMode, GenerationParams
from ddtree.promise import Promise
from ddtree.round_trace import SequenceTrace, follow, note_round
from ddtree.sampling_spec import Grammar, SamplingSpec
from ddtree.sequence import Sequence
from ddtree.text import TextCodec
from ddtree.types import AUTO_BUDGET, TreeBatch, TreeRequest
from tests.fakes.collecting_sink import CollectingSink
from tests.fakes.ngram_drafter import NgramDrafter
from tests.fakes.pipeline import make_oracle, make_verifier, running_engine
from tests.fakes.tiny_models import BLOCK_SIZE
from tests.integration.stage_faults import until, world_of

PROMPT = tuple(b"What does the tree look like?")


def params(mode: DraftMode = "tree", budget: int = 12, max_tokens: int = 40) -> GenerationParams:
    return GenerationParams(
        PROMPT, max_tokens=max_tokens, draft_mode=mode, tree_budget=budget, ignore_eos=True
    )


async def traced(target: Path, wanted: GenerationParams, noise: float = 0.5) -> CollectingSink:
    sink = CollectingSink(trace=SequenceTrace(TextCodec.from_folder(target)))
    other = CollectingSink()  # beside it, one that nobody traces
    async with running_engine(make_verifier(target), make_oracle(target, noise=noise), target) as engine:
        await asyncio.gather(engine.generate(params(budget=5), other), engine.generate(wanted, sink))
    assert other.rounds == []
    return sink


def rounds_of(sink: CollectingSink) -> list[dict[str, Any]]:
    records = [json.loads(each) for each in sink.rounds]
    assert [each["round"] for each in records] == list(range(len(records)))
    assert records[0]["drafting"] == "prefill"
    assert "nodes" not in records[0]
    return records[1:]


@pytest.mark.parametrize(
    ("mode", "budget"), [("tree", 12), ("tree", 64), ("tree", AUTO_BUDGET), ("chain", AUTO_BUDGET)]
)
async def test_every_round_tells_its_tree_and_what_came_of_it(
    tiny_target: Path, mode: DraftMode, budget: int
) -> None:
    sink = await traced(tiny_target, params(mode, budget))
    rounds = rounds_of(sink)
    assert sink.stats is not None
    assert len(rounds) == sink.stats.rounds
    before = json.loads(sink.rounds[0])["emitted"]["ids"][-1]
    for each in rounds:
        nodes, emitted = each["nodes"], each["emitted"]["ids"]
        assert each["root"]["id"] == before
        path = each["accepted_path"]
        assert [nodes["ids"][node - 1] for node in path] == emitted[: len(path)]
        assert [nodes["parents"][node - 1] for node in path] == [0, *path[:-1]][: len(path)]
        assert emitted[len(path) :] == [each["bonus"]["id"]]
        assert all(parent <= index for index, parent in enumerate(nodes["parents"]))
        depth_of = [0, *nodes["depths"]]
        assert nodes["depths"] == [depth_of[parent] + 1 for parent in nodes["parents"]]
        probability_of = [1.0, *nodes["path_probabilities"]]
        assert all(
            0 < own <= probability_of[parent]
            for own, parent in zip(nodes["path_probabilities"], nodes["parents"], strict=True)
        )
        # Best first: what a tree of the most probable nodes must look like.
        assert nodes["path_probabilities"] == sorted(nodes["path_probabilities"], reverse=True)
        assert set(each["stage_ms"]) == {"draft", "build_tree", "verify", "commit"}
        assert min(each["stage_ms"].values()) >= 0
        assert each["stage_ms"]["verify"] > 0
        before = emitted[-1]
    assert [token for each in sink.rounds for token in json.loads(each)["emitted"]["ids"]] == sink.token_ids
    assert "".join(t for each in sink.rounds for t in json.loads(each)["emitted"]["texts"]) == sink.text
    assert sum(len(each["accepted_path"]) for each in rounds) == sink.stats.accepted_tokens > 0
    assert sum(each["nodes_verified"] for each in rounds) == sink.stats.draft_tokens
    assert json.loads(sink.rounds[-1])["finish_reason"] == "length"


async def test_a_round_without_a_draft_says_why(tiny_target: Path) -> None:
    off = rounds_of(await traced(tiny_target, params("off")))
    assert {each["drafting"] for each in off} == {"off"}
    none = rounds_of(await traced(tiny_target, params("tree", 0)))
    assert {each["drafting"] for each in none} == {"off"}
    plain = await traced(tiny_target, params("tree", 12, max_tokens=2))
    assert [each["drafting"] for each in rounds_of(plain)] == ["last_token"]
    assert rounds_of(plain)[0]["nodes"]["ids"] == []


async def test_a_lost_drafter_is_told(tiny_target: Path) -> None:
    async with world_of(tiny_target) as world:
        sink = CollectingSink(trace=SequenceTrace(TextCodec.from_folder(tiny_target)))
        told = world.begin(params(max_tokens=60), sink)
        await until(lambda: len(sink.deltas) >= 4)
        world.oracle.lose_next = True
        await told
    reasons = [each["drafting"] for each in rounds_of(sink)]
    assert reasons.count("drafter_lost") == 1
    assert reasons[-2] == "drafted"


async def test_nodes_that_a_grammar_forbids_were_drafted_and_not_verified(tiny_target: Path) -> None:
    sampling = SamplingSpec(grammar=Grammar("regex", "([ab]{4} )+"))
    wanted = GenerationParams(PROMPT, max_tokens=40, tree_budget=24, sampling=sampling, ignore_eos=True)
    codec = TextCodec.from_folder(tiny_target)
    sample = codec.encode("aaaa bbbb abab aabb abba x y z ")
    drafter = NgramDrafter(sample, block_size=BLOCK_SIZE, draft_hash="tiny")
    sink = CollectingSink(trace=SequenceTrace(codec))
    async with running_engine(make_verifier(tiny_target), drafter, tiny_target) as engine:
        await engine.generate(wanted, sink)
    rounds = rounds_of(sink)
    assert any(each["nodes_verified"] < len(each["nodes"]["ids"]) for each in rounds)
    assert any(each["accepted_path"] for each in rounds)
    for each in rounds:
        path, nodes = each["accepted_path"], each["nodes"]
        assert [nodes["ids"][node - 1] for node in path] == each["emitted"]["ids"][: len(path)]


def test_nothing_is_looked_at_where_nobody_traces() -> None:
    class Untouchable:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"{name} was looked at")

    batch = [
        Live(Sequence(params(), 1, _NoText()), CollectingSink(), None, DraftContext(True), 1)  # type: ignore[arg-type]
    ]
    note_round(batch, Untouchable())  # type: ignore[arg-type]


async def test_a_trace_that_fails_costs_the_trace_only(
    tiny_target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Clumsy(SequenceTrace):
        def note(self, *_: Any) -> None:
            raise ValueError("clumsy")

    sink, plain = CollectingSink(trace=Clumsy(TextCodec.from_folder(tiny_target))), CollectingSink()
    async with world_of(tiny_target) as world:
        await world.engine.generate(params(), sink)
        await world.engine.generate(params(), plain)
    assert sink.token_ids == plain.token_ids
    assert "cannot be traced" in caplog.text


class _NoText:
    def decode(self, token_ids: Any) -> str:
        return "".join(chr(97 + token % 26) for token in token_ids)

    def is_silent(self, token_id: int) -> bool:
        return token_id < 0

    def is_byte(self, token_id: int) -> bool:
        return token_id < 0


def test_a_paths_probability_is_the_product_along_it() -> None:
    #        root
    #      10 ── 11      position 1: 0.5, 0.25
    #      |     |
    #      20    21      position 2: 0.8, 0.1
    nodes = ([10, 20, 11, 21], [0, 1, 0, 3], [1, 2, 1, 2])
    # The second of two sequences; the first has no tree.
    tokens, parents, depths = (torch.tensor([[0] * 4, row]) for row in nodes)
    trees = TreeBatch(tokens, parents, depths, torch.tensor([0, 4]))
    top = torch.tensor([[[0, 0], [0, 0]], [[10, 11], [20, 21]]])
    log_probs = torch.tensor([[[1.0, 1.0], [1.0, 1.0]], [[0.5, 0.25], [0.8, 0.1]]]).log()
    request = TreeRequest(top, log_probs, trees.counts, torch.zeros(2, dtype=torch.bool), torch.zeros(0))
    assert Promise.of(trees, request).paths[1].tolist() == pytest.approx([0.5, 0.4, 0.25, 0.025])
    # Given its parent, 21 follows 11 surely: [position][parent][child].
    edges = torch.tensor([[[0.6, 0.4], [0.6, 0.4]], [[0.7, 0.3], [0.1, 0.9]]]).log().expand(2, 2, 2, 2)
    request = replace(request, edge_log_probs=edges)
    assert Promise.of(trees, request).paths[1].tolist() == pytest.approx([0.6, 0.42, 0.4, 0.36])


def test_the_accepted_path_goes_through_its_own_branch() -> None:
    # 7 stands under both children of the root.
    nodes = {"ids": [5, 6, 7, 7], "parents": [0, 0, 1, 2]}
    assert follow(nodes, [6, 7]) == [2, 4]
    assert follow(nodes, [5]) == [1]
    assert follow(nodes, []) == []
