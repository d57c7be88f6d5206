"""A small target with an oracle drafter behind an engine, in this process, and the plain greedy reference."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ddtree.engine import Engine
from ddtree.events import Observe, ignore
from ddtree.models.target import TargetModel
from ddtree.params import GenerationParams
from ddtree.recurrent.state_pool import StateBudget
from ddtree.scheduler import Scheduler
from ddtree.stages.in_process import DraftStage, InProcessStages
from ddtree.text import TextCodec
from ddtree.verify import TargetVerifier, VerifierLimits
from tests.fakes.collecting_sink import CollectingSink
from tests.fakes.oracle_drafter import OracleDrafter
from tests.fakes.tiny_models import BLOCK_SIZE, HIDDEN, TAPS

CPU = torch.device("cpu")


def make_verifier(
    folder: Path,
    *,
    kv_cache_bytes: int = 1 << 22,
    max_nodes: int = 256,
    prefix_cache: bool = True,
    state_bytes: int = 1 << 22,
) -> TargetVerifier:
    """A verifier over the small target with a random projection."""
    torch.manual_seed(5)
    states = StateBudget(state_bytes, max_nodes)
    target = TargetModel.load(folder, dtype="float32", device=CPU, taps=TAPS, state_budget=states)
    projection = nn.Linear(len(TAPS) * HIDDEN, HIDDEN, bias=False).requires_grad_(False)
    limits = VerifierLimits(
        kv_cache_bytes, page_size=16, max_nodes=max_nodes, session_ttl_s=600, prefix_cache=prefix_cache
    )
    grammars = TextCodec.from_folder(folder).grammars(target.vocab_size)
    verifier = TargetVerifier(
        target, projection, limits, draft_hash="tiny", feature_size=HIDDEN, grammars=grammars
    )
    if verifier.pool.num_pages > 1:
        verifier.measure_cost(repeats=1)  # without a curve an open budget would never draft
    return verifier


def make_oracle(folder: Path, *, noise: float, seed: int = 0) -> OracleDrafter:
    """An oracle for the verifier of `make_verifier`."""
    return OracleDrafter(folder, block_size=BLOCK_SIZE, draft_hash="tiny", noise=noise, seed=seed)


@asynccontextmanager
async def running_engine(
    verifier: TargetVerifier,
    drafter: DraftStage,
    folder: Path,
    *,
    max_sequences: int = 32,
    max_waiting: int = 64,
    prefill_chunk: int = 16,
    observe: Observe = ignore,
) -> AsyncIterator[Engine]:
    """An engine over both stages; afterwards every session and page must have been given back."""
    scheduler = Scheduler(max_sequences=max_sequences, max_waiting=max_waiting, prefill_chunk=prefill_chunk)
    stages = InProcessStages(verifier, drafter, observe)
    engine = Engine(stages, TextCodec.from_folder(folder), scheduler=scheduler, feed_chunk=8, observe=observe)
    await engine.start()
    try:
        yield engine
        await idle(engine)
        verifier.check_integrity()
        assert verifier.usage().sessions == verifier.usage().pages_used == 0
        assert drafter.info().usage.sessions == 0
    finally:
        await engine.stop()


async def idle(engine: Engine) -> None:
    """Wait until the engine has nothing to do and has told the stages so."""
    for _ in range(6000):
        if engine.is_idle:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the engine did not become idle within 30 s")


async def generate_all(engine: Engine, requests: Sequence[GenerationParams]) -> list[CollectingSink]:
    """Run requests at the same time."""
    sinks = [CollectingSink() for _ in requests]
    await asyncio.gather(
        *(engine.generate(params, sink) for params, sink in zip(requests, sinks, strict=True))
    )
    return sinks


class GreedyReference:
    """transformers' own greedy decoding; asked again, it says what it said."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._said: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def __call__(self, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
        """The ids `generate` adds to a prompt."""
        asked = (tuple(prompt_ids), max_tokens)
        if asked not in self._said:
            self._said[asked] = self._generate(*asked)
        return list(self._said[asked])

    def _generate(self, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([list(prompt_ids)])
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            use_cache=True,
        )
        return list(output[0, len(prompt_ids) :].tolist())
