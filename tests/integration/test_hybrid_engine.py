"""Targets with recurrent layers behind the engine: greedy equals transformers' own, whatever caches do."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree import assembly
from ddtree.attention.plan import StepPlan
from ddtree.config import ServingConfig
from ddtree.errors import CheckpointError, ConfigError
from ddtree.events import Event, PrefixHit
from ddtree.hybrid_cache import HybridPool
from ddtree.models.loading import read_target_config
from ddtree.models.target import TargetStep
from ddtree.params import DraftMode, GenerationParams
from ddtree.sampling_spec import SamplingSpec
from ddtree.train.targets import load_frozen
from ddtree.trtllm.library import EngineUnfit
from ddtree.trtllm.loading import _check_target as check_engine_target
from ddtree.types import AUTO_BUDGET, PrefillRequest, SessionBatch, Status, TreeBatch, VerifyRequest
from ddtree.verify import TargetVerifier
from tests.fakes.hybrid_families import HYBRIDS, make_hybrid
from tests.fakes.pipeline import GreedyReference, generate_all, make_oracle, make_verifier, running_engine
from tests.fakes.random_draft import write_dflash2, write_draft
from tests.fakes.target_families import LAYERS
from tests.fakes.tiny_models import EOS_ID, MASK_ID, VOCAB_SIZE

MODES: tuple[tuple[DraftMode, int], ...] = (("tree", AUTO_BUDGET), ("tree", 24), ("chain", 7), ("off", 0))
TAPS = {"mask_token_id": MASK_ID, "target_layer_ids": [0, 1, 2]}
PLAIN: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "num_target_layers": LAYERS}
# As drafts for these targets are published: sliding layers that are causal, and DFlash 2.
SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    "use_sliding_window": True,
    "sliding_window": 9,
}
DRAFTS: dict[str, Callable[[Path], Path]] = {
    "dflash, causal sliding layers": lambda folder: write_draft(
        folder, **PLAIN, **SLIDING, dflash_config=TAPS
    ),
    "dflash 2": lambda folder: write_dflash2(folder, **PLAIN, dflash_config=TAPS),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hybrid(tmp_path_factory.mktemp("hybrid"), "qwen3.5")


def requests_of(source: random.Random, lengths: tuple[int, ...] = (2, 6, 47, 21)) -> list[GenerationParams]:
    return [
        GenerationParams(
            tuple(source.randrange(256) for _ in range(length)), max_tokens=16, draft_mode=mode,
            tree_budget=budget, stop_ids=frozenset({EOS_ID}),
        )
        for length, (mode, budget) in zip(lengths, MODES, strict=False)
    ]  # fmt: skip


def pool_of(verifier: TargetVerifier) -> HybridPool:
    assert isinstance(verifier.pool, HybridPool)
    return verifier.pool


@pytest.mark.parametrize("family", HYBRIDS)
async def test_every_family_equals_generate(tmp_path: Path, family: str) -> None:
    """Four sequences with trees, chains and nothing in one step, prompts in chunks; then each alone."""
    folder = make_hybrid(tmp_path, family)
    reference, requests = GreedyReference(folder), requests_of(random.Random(5))
    verifier, drafter = make_verifier(folder), make_oracle(folder, noise=0.4)
    async with running_engine(verifier, drafter, folder) as engine:
        sinks = await generate_all(engine, requests)
        (alone,) = await generate_all(engine, requests[1:2])
    assert alone.token_ids == sinks[1].token_ids
    for params, sink in zip(requests, sinks, strict=True):
        assert sink.token_ids == reference(params.prompt_ids, params.max_tokens)
        assert sink.stats is not None
        assert (sink.stats.accepted_tokens > 0) == (params.draft_mode != "off"), "drafts must count"


@pytest.mark.parametrize("kind", DRAFTS)
async def test_every_kind_of_draft_equals_generate(tmp_path: Path, folder: Path, kind: str) -> None:
    """Loaded from folders as a deployment loads them, taps on recurrent layers included."""
    reference, requests = GreedyReference(folder), requests_of(random.Random(6))
    config = ServingConfig(folder, DRAFTS[kind](tmp_path), dtype="float32", kv_cache_mib=4,
                           draft_kv_cache_mib=4, state_cache_mib=4, page_size=16)  # fmt: skip
    stages = assembly.load_in_process(config)
    async with running_engine(stages.verifier, stages.drafter, folder) as engine:
        sinks = await generate_all(engine, requests)
    for params, sink in zip(requests, sinks, strict=True):
        assert sink.token_ids == reference(params.prompt_ids, params.max_tokens)
    assert sinks[1].stats is not None
    assert sinks[1].stats.draft_tokens > sinks[1].stats.rounds, "drafts must be made"


async def test_sampling_is_the_same_for_every_tree(folder: Path) -> None:
    spec = SamplingSpec(temperature=0.7, top_p=0.95, seed=4, repetition_penalty=1.2)
    outputs = []
    for mode, budget in MODES:
        params = GenerationParams(
            (5, 6, 7), max_tokens=16, draft_mode=mode, tree_budget=budget, sampling=spec, ignore_eos=True
        )
        async with running_engine(make_verifier(folder), make_oracle(folder, noise=0.3), folder) as engine:
            (sink,) = await generate_all(engine, [params])
        outputs.append(sink.token_ids)
    assert outputs[1:] == outputs[:-1]
    assert len(outputs[0]) == 16


async def test_a_prefix_hit_brings_state_and_convolution(folder: Path) -> None:
    """The same answers from the same rounds; what was not read again stands in the hits."""
    source, hits = random.Random(7), []
    system = tuple(source.randrange(256) for _ in range(64))
    prompts = [(*system, *(source.randrange(256) for _ in range(n))) for n in (5, 9, 1)]
    other = GenerationParams((3, 1, 4, 1, 5), max_tokens=8, tree_budget=4, ignore_eos=True)

    def listen(event: Event) -> None:
        if isinstance(event, PrefixHit):
            hits.append(event.tokens)

    found: dict[bool, list[Any]] = {}
    for is_cached in (False, True):
        verifier = make_verifier(folder, prefix_cache=is_cached)
        drafter = make_oracle(folder, noise=0.4)
        async with running_engine(verifier, drafter, folder, observe=listen) as engine:
            found[is_cached] = []
            for prompt in (*prompts, prompts[0]):
                params = GenerationParams(prompt, max_tokens=8, tree_budget=16, ignore_eos=True)
                # Behind another one: chunks then end anywhere, not where pages do.
                beside, sink = await generate_all(engine, [other, params])
                found[is_cached] += [sink.token_ids, beside.token_ids]
                assert is_cached or not hits
    assert found[True] == found[False]
    assert found[True][0] == GreedyReference(folder)(prompts[0], 8)
    assert hits == [64, 64, 64]
    assert pool_of(verifier).num_snapshots >= 4


async def test_when_states_run_out_sequences_wait(folder: Path) -> None:
    """Room for two states: five sequences are served all the same, and snapshots make room for them."""
    target = make_verifier(folder).target
    shape = target.state_shape()  # type: ignore[attr-defined]
    room = 2 * shape.bytes_per_state + 33 * shape.bytes_per_row
    verifier = make_verifier(folder, max_nodes=32, state_bytes=room)
    assert pool_of(verifier).states.size.states == 2
    reference, requests = GreedyReference(folder), requests_of(random.Random(8))
    requests += requests_of(random.Random(9), (30,))
    async with running_engine(verifier, make_oracle(folder, noise=0.4), folder) as engine:
        sinks = await generate_all(engine, requests)
    for params, sink in zip(requests, sinks, strict=True):
        assert sink.token_ids == reference(params.prompt_ids, params.max_tokens)


async def test_trees_beyond_the_stash_take_several_steps(folder: Path) -> None:
    """The stash has room for one large tree; three sequences bring one each."""
    shape = make_verifier(folder).target.state_shape()  # type: ignore[attr-defined]
    room = 6 * shape.bytes_per_state + 25 * shape.bytes_per_row
    verifier = make_verifier(folder, max_nodes=24, state_bytes=room)
    assert verifier.pool.most_rows is not None
    assert 25 <= verifier.pool.most_rows < 3 * 25
    calls: list[int] = []
    forward = verifier.target.forward

    def count(token_ids: torch.Tensor, plan: StepPlan, keep: torch.Tensor) -> TargetStep:
        calls.append(len(token_ids))
        return forward(token_ids, plan, keep)

    verifier.target.forward = count  # type: ignore[method-assign]
    reference, source = GreedyReference(folder), random.Random(10)
    requests = [
        GenerationParams(tuple(source.randrange(256) for _ in range(5)), max_tokens=12, tree_budget=24)
        for _ in range(3)
    ]
    async with running_engine(verifier, make_oracle(folder, noise=0.4), folder) as engine:
        sinks = await generate_all(engine, requests)
    assert max(calls) <= verifier.pool.most_rows
    for params, sink in zip(requests, sinks, strict=True):
        assert sink.token_ids == reference(params.prompt_ids, params.max_tokens)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def sessions(*lengths: int) -> SessionBatch:
    return SessionBatch(torch.arange(len(lengths)), ints(*[0] * len(lengths)), ints(*lengths))


def test_a_call_in_parts_is_the_call_at_once(folder: Path) -> None:
    """Trees of other widths and log-probs; a session that is not there stands in its place."""
    shape = make_verifier(folder).target.state_shape()  # type: ignore[attr-defined]
    room = 4 * shape.bytes_per_state + 5 * shape.bytes_per_row
    small = make_verifier(folder, max_nodes=4, state_bytes=room)
    large = make_verifier(folder, max_nodes=4)
    assert small.pool.most_rows == 5
    trees = TreeBatch(ints(7, 8, 9, 1, 0, 0, 3, 4, 5).view(3, 3), ints(0, 1, 0, 0, 0, 0, 0, 0, 2).view(3, 3),
                      ints(1, 2, 1, 1, 0, 0, 1, 1, 2).view(3, 3), ints(3, 1, 3))  # fmt: skip
    spec = SamplingSpec(temperature=0.5, top_log_probs=2, seed=1).to_json()
    results = []
    for verifier in (small, large):
        prompts = PrefillRequest(sessions(0, 0), ints(1, 2, 3, 4, 5), ints(3, 2), ints(40, 40), ("", spec))
        assert verifier.prefill(prompts).status.tolist() == [Status.OK, Status.OK]
        request = VerifyRequest(sessions(3, 2, 4), ints(6, 7, 8), trees)
        results.append(verifier.verify(request))
    for name in vars(results[0]):
        if name != "commit_ms":
            first, second = getattr(results[0], name), getattr(results[1], name)
            assert torch.allclose(first[..., : second.shape[-1]], second, atol=1e-5), name
            assert not first[..., second.shape[-1] :].any()
    assert results[0].status.tolist() == [Status.OK, Status.OK, Status.SESSION_LOST]


def test_a_prompt_that_failed_half_way_is_forgotten(folder: Path) -> None:
    """Some layers have taken it in: whoever came back to that state would be told nonsense."""
    verifier = make_verifier(folder)
    request = PrefillRequest(sessions(0), ints(1, 2, 3), ints(3), ints(40))
    verifier.prefill(request)
    broken = verifier.target.model.model.layers[2].mlp  # type: ignore[attr-defined]
    hook = broken.register_forward_hook(lambda *_: 1 / 0)
    more = PrefillRequest(sessions(3), ints(4, 5), ints(2), ints(40))
    with pytest.raises(ZeroDivisionError):
        verifier.prefill(more)
    hook.remove()
    assert verifier.prefill(more).status.tolist() == [Status.SESSION_LOST]
    verifier.check_integrity()
    assert verifier.usage().pages_used == len(pool_of(verifier).states) == 0


def test_what_cannot_run_them_says_so(folder: Path) -> None:
    """Training decodes with keys and values alone, and TensorRT-LLM's trees pass attention alone."""
    with pytest.raises(CheckpointError, match=r"3 layers of .* are recurrent"):
        load_frozen(folder, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(EngineUnfit, match="3 of the target's layers are recurrent; set engine to torch"):
        check_engine_target(read_target_config(folder), page_size=64, max_nodes=32)


def test_a_budget_that_holds_no_sequence_is_refused_at_load(tmp_path: Path, folder: Path) -> None:
    draft = write_draft(tmp_path, **PLAIN, dflash_config=TAPS)
    config = ServingConfig(folder, draft, dtype="float32", max_nodes=5000, state_cache_mib=1)
    with pytest.raises(ConfigError, match="raise state_cache_mib or lower max_nodes"):
        assembly.load_verifier(config)
    with pytest.raises(CheckpointError, match="num_target_layers"):
        assembly.load_verifier(
            ServingConfig(folder, write_draft(tmp_path / "other", **{**PLAIN, "num_target_layers": 3},
                                              dflash_config=TAPS))
        )  # fmt: skip
