"""The fallback: the engine's own chains behind the stage contract, chosen at load, told and counted."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

from ddtree import assembly
from ddtree.config import ServingConfig
from ddtree.engine import Engine
from ddtree.errors import ConfigError, InvalidArgument
from ddtree.events import Event, FellBack, RoundDone
from ddtree.models.draft_checkpoint import draft_hash, open_checkpoint
from ddtree.params import GenerationParams
from ddtree.sampling_spec import SamplingSpec
from ddtree.scheduler import Scheduler
from ddtree.stages.base import DRAFTER, TARGET_VERIFIER
from ddtree.stages.bls import BlsStages
from ddtree.text import TextCodec
from ddtree.trtllm.contract import NATIVE, load_contracts
from ddtree.trtllm.library import EngineUnfit
from ddtree.trtllm.native import NativeChainVerifier
from ddtree.trtllm.stage import load_engine_verifier
from ddtree.types import DrafterInfo, PrefillRequest, SessionBatch, Status, TreeBatch, Usage, VerifyRequest
from ddtree.verify import TargetVerifier
from ddtree.wire import decode, encode
from tests.fakes.collecting_sink import CollectingSink
from tests.fakes.pipeline import GreedyReference, generate_all, idle
from tests.fakes.tiny_models import BLOCK_SIZE, make_draft, make_target
from tests.fakes.trtllm_library import FakeLibrary, nothing_installed
from tests.fakes.trtllm_native import LLM

NEWEST = load_contracts()[0]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServingConfig:
    folder = tmp_path_factory.mktemp("pair")
    return ServingConfig(
        make_target(folder / "target"),
        make_draft(folder / "draft"),
        engine="trtllm",
        dtype="float32",
        page_size=32,
        kv_cache_mib=4,
        max_nodes=32,
        device="cpu",
    )


def load(config: ServingConfig, importer: Callable[[str], Any]) -> TargetVerifier | NativeChainVerifier:
    draft = open_checkpoint(config.draft)
    return load_engine_verifier(
        config, draft, lambda target: assembly.build_verifier(config, draft, target), importer
    )


def other_version() -> FakeLibrary:
    """Private calls of another form, the public ones as recorded."""
    library = FakeLibrary(NEWEST)

    def update_spec_dec_param(self: Any, scheduled_requests: Any) -> None:
        raise AssertionError(self, scheduled_requests)

    library.replace("TrtllmAttentionMetadata.update_spec_dec_param", update_spec_dec_param)
    return library


def test_where_the_private_calls_fit_trees_are_verified(config: ServingConfig) -> None:
    verifier = load(config, FakeLibrary(NEWEST))
    assert isinstance(verifier, TargetVerifier)
    assert verifier.info().fallback == ""


def test_where_they_do_not_the_chain_stands_in_and_says_why(
    config: ServingConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        verifier = load(config, other_version())
    assert isinstance(verifier, NativeChainVerifier)
    reason = verifier.info().fallback
    assert (
        "update_spec_dec_param: does not take batch_size, which we pass; it takes scheduled_requests"
        in reason
    )
    assert f"falling back to TensorRT-LLM's own DFlash chains: {reason}" in caplog.text
    assert json.loads(json.dumps(asdict(verifier.info())))["fallback"] == reason


@pytest.mark.parametrize("library", [FakeLibrary(NEWEST, has_tree_attention=False)])
def test_a_gpu_without_tree_attention_falls_back_too(config: ServingConfig, library: FakeLibrary) -> None:
    verifier = load(config, library)
    assert isinstance(verifier, NativeChainVerifier)
    assert "no tree attention for this GPU" in verifier.info().fallback


def test_the_chain_can_be_asked_for(config: ServingConfig) -> None:
    verifier = load(replace(config, engine="trtllm_chain"), FakeLibrary(NEWEST))
    assert isinstance(verifier, NativeChainVerifier)
    assert verifier.info().fallback == "engine trtllm_chain asks for its own chains"


def test_trees_that_are_wrong_fall_back_too(config: ServingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree.trtllm.pool.EnginePool.move", lambda *_: None)
    verifier = load(config, FakeLibrary(NEWEST))
    assert isinstance(verifier, NativeChainVerifier)
    assert "trees are verified wrongly here" in verifier.info().fallback


def test_without_the_package_nothing_is_loaded(config: ServingConfig) -> None:
    with pytest.raises(EngineUnfit, match="the package tensorrt_llm is not installed here; run in NVIDIA's"):
        load(config, nothing_installed)
    with pytest.raises(EngineUnfit, match="is not installed here"):
        assembly.load_verifier(config)


def test_the_topology_must_leave_the_engine_a_process(config: ServingConfig) -> None:
    with pytest.raises(ConfigError, match="topology must be bls with engine trtllm, got in_process"):
        ServingConfig(config.target, config.draft, engine="trtllm", topology="in_process")
    with pytest.raises(ConfigError, match="engine must be one of torch, trtllm, trtllm_chain, got 'vllm'"):
        ServingConfig(config.target, config.draft, engine="vllm")


class Hops:
    """Stage models reached as over BLS: encoded messages, a JSON description."""

    def __init__(self, verifier: NativeChainVerifier, hash_of_draft: str) -> None:
        self.verifier = verifier
        self._drafter = DrafterInfo(BLOCK_SIZE, hash_of_draft, 1.0, Usage(0, 0, 1))
        self.calls: list[tuple[str, str]] = []

    async def __call__(self, model: str, operation: str, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        self.calls.append((model, operation))
        if operation == "describe":
            info = self.verifier.info() if model == TARGET_VERIFIER else self._drafter
            return {"info": np.array([json.dumps(asdict(info)).encode()], dtype=np.object_)}
        if operation == "release":
            if model == TARGET_VERIFIER:
                self.verifier.release(arrays["session_ids"].tolist())
            return {}
        assert model != DRAFTER, "the engine drafts by itself"
        if operation == "prefill":
            return encode(self.verifier.prefill(decode(PrefillRequest, arrays, torch.float32)))
        assert operation == "verify"
        return encode(self.verifier.verify(decode(VerifyRequest, arrays, torch.float32)))


@asynccontextmanager
async def running(config: ServingConfig, events: list[Event]) -> AsyncIterator[tuple[Engine, Hops]]:
    verifier = load(config, other_version())
    assert isinstance(verifier, NativeChainVerifier)
    hops = Hops(verifier, draft_hash(config.draft))
    scheduler = Scheduler(max_sequences=8, max_waiting=8, prefill_chunk=16)
    stages = BlsStages(hops, events.append)
    engine = Engine(stages, TextCodec.from_folder(config.target), scheduler=scheduler, observe=events.append)
    await engine.start()
    try:
        yield engine, hops
        await idle(engine)
        assert verifier.usage().sessions == 0
        assert all(result.finished for result in LLM.open)
    finally:
        await engine.stop()


async def test_clients_get_the_same_tokens_from_the_chain(config: ServingConfig) -> None:
    """Prompts over several chunks, several sequences, a budget that no tree is built for."""
    LLM.open.clear()
    events: list[Event] = []
    reference = GreedyReference(config.target)
    prompts = [tuple(b"one"), tuple(b"a prompt that needs three chunks to be read"), (7,)]
    requests = [GenerationParams(prompt, max_tokens=21, tree_budget=16) for prompt in prompts]
    async with running(config, events) as (engine, hops):
        sinks = await generate_all(engine, requests)
    assert [list(sink.token_ids) for sink in sinks] == [reference(prompt, 21) for prompt in prompts]
    assert [event for event in events if isinstance(event, FellBack)] == [FellBack("native_chain")]
    rounds = [event.record for event in events if isinstance(event, RoundDone)]
    assert sum(record.emitted for record in rounds) > 1.5 * sum(record.sequences for record in rounds)
    assert not any(model == DRAFTER for model, operation in hops.calls if operation == "draft")


@pytest.mark.parametrize(
    "spec",
    [
        SamplingSpec(repetition_penalty=1.2),
        SamplingSpec(logit_bias=((3, 1.0),)),
        SamplingSpec(top_log_probs=2),
        SamplingSpec(min_tokens=4),
        SamplingSpec(temperature=1.0, min_p=0.1),
    ],
)
async def test_what_the_chain_cannot_do_is_refused_by_name(config: ServingConfig, spec: SamplingSpec) -> None:
    async with running(config, []) as (engine, _):
        with pytest.raises(InvalidArgument, match="need the tree verifier, which does not run"):
            await engine.generate(GenerationParams((5,), max_tokens=4, sampling=spec), CollectingSink())
        sink = CollectingSink()  # and the next one is served
        await engine.generate(GenerationParams((5,), max_tokens=4), sink)
        assert len(sink.token_ids) == 4


async def test_sampling_settings_are_passed_on(config: ServingConfig) -> None:
    seen: list[Any] = []
    verifier = load(config, other_version())
    assert isinstance(verifier, NativeChainVerifier)
    real = type(verifier._llm).generate_async

    def generate_async(self: Any, **values: Any) -> Any:
        seen.append(values["sampling_params"])
        return real(self, **values)

    type(verifier._llm).generate_async = generate_async
    spec = SamplingSpec(temperature=0.7, top_k=5, top_p=0.9, seed=11, sequence_index=2)
    ids = torch.tensor([5, 6], dtype=torch.int32)
    one = torch.tensor([1], dtype=torch.int32)
    request = PrefillRequest(
        sessions=_sessions(0), token_ids=ids, counts=one * 2, reserve=one * 50, sampling=(spec.to_json(),)
    )
    verifier.prefill(request)
    (params,) = seen
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.7, 5, 0.9, 13)
    assert (params.max_tokens, params.end_id) == (48, -1)
    verifier.release([1])


def test_a_root_that_is_not_the_streams_last_token_starts_anew(config: ServingConfig) -> None:
    """After a recovery the orchestrator knows its root; what the engine emits then follows that one."""
    verifier = load(config, other_version())
    assert isinstance(verifier, NativeChainVerifier)
    one = torch.tensor([1], dtype=torch.int32)
    first = verifier.prefill(PrefillRequest(_sessions(0), one * 5, one, one * 50))
    root = (int(first.next_tokens[0]) + 1) % 256
    emitted: list[int] = []
    length = 1
    for _ in range(3):
        token = emitted[-1] if emitted else root
        result = verifier.verify(VerifyRequest(_sessions(length), one * token, TreeBatch.empty(1)))
        count = int(result.accepted_counts[0])
        emitted += [*result.accepted_tokens[0, :count].tolist(), int(result.bonus_tokens[0])]
        length += count + 1
    assert emitted == GreedyReference(config.target)((5, root), len(emitted))
    assert verifier.verify(VerifyRequest(_sessions(1), one, TreeBatch.empty(1))).status.tolist() == [
        Status.SESSION_LOST
    ]
    verifier.release([1])


def test_a_late_opening_call_of_an_earlier_life_is_refused(config: ServingConfig) -> None:
    verifier = load(config, other_version())
    one = torch.tensor([1], dtype=torch.int32)
    held = verifier.prefill(PrefillRequest(_sessions(0, epoch=1), one * 5, one, one * 50))
    late = verifier.prefill(PrefillRequest(_sessions(0, epoch=0), one * 7, one, one * 50))
    assert (held.status.tolist(), late.status.tolist()) == ([Status.OK], [Status.SESSION_LOST])
    root = held.next_tokens.int()
    going_on = verifier.verify(VerifyRequest(_sessions(1, epoch=1), root, TreeBatch.empty(1)))
    assert going_on.status.tolist() == [Status.OK]
    verifier.release([1])


def _sessions(length: int, epoch: int = 0) -> SessionBatch:
    zero = torch.zeros(1, dtype=torch.int32)
    return SessionBatch(torch.tensor([1]), zero + epoch, zero + length)


def test_the_native_symbols_are_called_as_recorded(config: ServingConfig) -> None:
    library = other_version()
    verifier = load(config, library)
    assert isinstance(verifier, NativeChainVerifier)
    zero = torch.zeros(1, dtype=torch.int32)
    spec = SamplingSpec(temperature=0.7, top_k=5).to_json()
    verifier.prefill(PrefillRequest(_sessions(0), zero + 5, zero + 1, zero + 50, sampling=(spec,)))
    for key, symbol in NEWEST.symbols.items():
        if symbol.group == NATIVE:
            assert library.calls[key] <= set(symbol.used), key
    verifier.release([1])
