"""Stages that go wrong when told to, behind an engine over the small pair; and what must hold afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ddtree.detokenize import Decoder
from ddtree.engine import Engine
from ddtree.params import GenerationParams
from ddtree.scheduler import Scheduler
from ddtree.stages.in_process import InProcessStages
from ddtree.text import TextCodec
from ddtree.types import PrefillRequest, PrefillResult, Status, VerifyRequest, VerifyResult
from ddtree.verify import TargetVerifier
from tests.fakes.collecting_sink import CollectingSink
from tests.fakes.oracle_drafter import OracleDrafter
from tests.fakes.pipeline import GreedyReference, idle, make_oracle, make_verifier
from tests.fakes.tiny_models import EOS_ID

Hook = Callable[[str, Any], None]
SHORT, LONG = tuple(b"short"), tuple(b"a prompt of several chunks, each of sixteen tokens at most")


def request(prompt: tuple[int, ...], max_tokens: int = 30, budget: int = 12) -> GenerationParams:
    """A request that ends where transformers would."""
    return GenerationParams(prompt, max_tokens=max_tokens, tree_budget=budget, stop_ids=frozenset({EOS_ID}))


def reference_of(reference: GreedyReference, params: GenerationParams) -> list[int]:
    """What it must be answered."""
    return reference(params.prompt_ids, params.max_tokens)


def no_fault(_: str, __: Any) -> None:
    """Let a call go on."""


async def until(condition: Callable[[], object]) -> None:
    """Give the engine its turns until something is so."""
    for _ in range(60_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come so far within a minute")


class FaultyStages(InProcessStages):
    """Real stages; `before(operation, request)` is asked first and may raise."""

    def __init__(self, verifier: TargetVerifier, drafter: OracleDrafter) -> None:
        super().__init__(verifier, drafter)
        self.before: Hook = no_fault

    async def _ask(self, stage: str, operation: str, call: Callable[..., Any], *arguments: Any) -> Any:
        def faulty(*given: Any) -> Any:
            self.before(operation, given[0] if given else None)
            return call(*given)

        return await super()._ask(stage, operation, faulty, *arguments)


class ForgetfulVerifier(TargetVerifier):
    """A verifier that has lost every session when `is_forgetful` says so, asked before each verify."""

    is_forgetful: Callable[[], bool] = staticmethod(lambda: False)

    def verify(self, request: VerifyRequest) -> VerifyResult:
        """Verify, or know nobody."""
        if self.is_forgetful():
            self.release([session.session_id for session in self.sessions])
        return super().verify(request)


class LyingVerifier(TargetVerifier):
    """A verifier whose sessions never live to the first verify, whatever was prefilled."""

    def prefill(self, request: PrefillRequest) -> PrefillResult:
        """Read, and forget."""
        result = super().prefill(request)
        self.release(request.sessions.ids.tolist())
        # What the engine believes: all is well until the round comes.
        return replace(result, status=torch.full_like(result.status, Status.OK))


class World:
    """One engine over the small pair."""

    def __init__(
        self,
        folder: Path,
        verifier: TargetVerifier,
        noise: float,
        decoder: Decoder | None = None,
        **limits: Any,
    ) -> None:
        self.verifier = verifier
        self.oracle = make_oracle(folder, noise=noise)
        self.stages = FaultyStages(verifier, self.oracle)
        self.scheduler = Scheduler(**{"max_sequences": 32, "max_waiting": 64, "prefill_chunk": 16, **limits})
        decoder = decoder or TextCodec.from_folder(folder)
        self.engine = Engine(self.stages, decoder, scheduler=self.scheduler, feed_chunk=8)

    def assert_empty(self) -> None:
        """No stage holds anything, and pages and sessions agree."""
        self.verifier.check_integrity()
        usage = self.verifier.usage()
        assert (usage.sessions, usage.pages_used, self.oracle.usage().sessions) == (0, 0, 0)

    def begin(self, params: GenerationParams, sink: CollectingSink) -> asyncio.Task[None]:
        """Start a sequence."""
        return asyncio.get_running_loop().create_task(self.engine.generate(params, sink))


@asynccontextmanager
async def world_of(
    folder: Path, *, verifier: TargetVerifier | None = None, noise: float = 0.6, **limits: Any
) -> AsyncIterator[World]:
    """A started engine; afterwards it must have become idle and its stages empty."""
    world = World(folder, verifier or make_verifier(folder), noise, **limits)
    await world.engine.start()
    try:
        yield world
        world.stages.before = no_fault
        await idle(world.engine)
        world.assert_empty()
    finally:
        await world.engine.stop()
