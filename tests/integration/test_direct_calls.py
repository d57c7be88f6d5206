"""The engine over stages that are called directly: channels that break cost time, never a token."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddtree.stages.base import DRAFTER, TARGET_VERIFIER, TREE_BUILDER
from ddtree.stages.bls import BlsStages
from ddtree.stages.direct import DirectCalls
from ddtree.stages.operations import Operation
from ddtree.stages.server import StageServer
from ddtree.wire import Arrays
from tests.fakes.pipeline import GreedyReference, generate_all
from tests.fakes.wired_stages import WiredStages, engine_of
from tests.integration.stage_faults import LONG, SHORT, reference_of, request, until


class ServedStages:
    """Wired stages behind servers; a share of the answers to direct calls gets lost."""

    def __init__(self, wired: WiredStages) -> None:
        self.wired = wired
        self.calls = DirectCalls(self.through_triton, clock=self.clock)
        self.by_triton: Counter[str] = Counter()
        self.direct: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.chance = random.Random(0)
        self.losing = 0.0  # the share of calls that are done, and whose answers are lost
        self._loop = asyncio.get_running_loop()
        self._now = 0.0
        self._servers = {name: self._serve(name) for name in (DRAFTER, TREE_BUILDER, TARGET_VERIFIER)}

    def clock(self) -> float:
        """Every look is a second later than the last, so that channels are asked for soon again."""
        self._now += 1.0
        return self._now

    def load_verifier(self) -> None:
        """Load another, and end the one that was there."""
        self.wired.load_verifier()
        old, self._servers[TARGET_VERIFIER] = self._servers[TARGET_VERIFIER], self._serve(TARGET_VERIFIER)
        old.close()

    async def through_triton(self, model: str, operation: str, arrays: Arrays) -> Mapping[str, Any]:
        """What Triton carries."""
        self.by_triton[operation] += 1
        marked = arrays | {"through_triton": np.array([True])}
        return await asyncio.to_thread(self._servers[model].call, operation, marked)

    def close(self) -> None:
        """End all."""
        self.calls.close()
        for server in self._servers.values():
            server.close()

    def _serve(self, model: str) -> StageServer:
        operations = self.wired._operations[model]
        return StageServer(
            model, lambda: {name: partial(self._run, model, name, work) for name, work in operations.items()}
        )

    def _run(self, model: str, name: str, work: Operation, arrays: Arrays) -> Arrays:
        self.wired.before(name)
        answer = work(arrays)
        if "through_triton" in arrays:
            return answer
        self.direct[name] += 1
        channel = self.calls._stages[model].channel
        if channel is not None and not channel.is_lost and self.chance.random() < self.losing:
            self.lost[name] += 1
            self._loop.call_soon_threadsafe(channel.close)
            while not channel.is_lost:
                time.sleep(0.0005)
        return answer


@asynccontextmanager
async def served(folder: Path, choice: str = "auto") -> AsyncIterator[tuple[Any, ServedStages]]:
    stages = ServedStages(WiredStages(folder, choice))
    try:
        async with engine_of(folder, stages.wired, BlsStages(stages.calls)) as engine:
            yield engine, stages
            stages.losing = 0.0
    finally:
        await asyncio.to_thread(stages.close)


REQUESTS = [request(LONG, 24), request(SHORT, 24, budget=0), request(SHORT, 30, budget=5), request(LONG, 9)]


async def test_only_where_stages_are_is_asked_through_triton(
    tiny_target: Path, tiny_reference: GreedyReference
) -> None:
    async with served(tiny_target) as (engine, stages):
        sinks = await generate_all(engine, REQUESTS)
        for params, sink in zip(REQUESTS, sinks, strict=True):
            assert sink.token_ids == reference_of(tiny_reference, params)
        assert stages.by_triton == {"channel": 3}
        assert stages.direct["verify"] > 5


@pytest.mark.parametrize("choice", ["auto", "always"])
@pytest.mark.parametrize("seed", range(4))
async def test_answers_that_are_lost_cost_no_token(
    tiny_target: Path, tiny_reference: GreedyReference, seed: int, choice: str
) -> None:
    """Each lost call was done, and comes again: what it would do twice is refused, and begun again."""
    async with served(tiny_target, choice) as (engine, stages):
        stages.chance.seed(seed)
        stages.losing = 0.08
        for _ in range(3):
            sinks = await generate_all(engine, REQUESTS)
            for params, sink in zip(REQUESTS, sinks, strict=True):
                assert sink.token_ids == reference_of(tiny_reference, params)
        assert stages.lost["verify"] + stages.lost["prefill"] > 0
        assert stages.lost["draft"] > 0


async def test_a_verifier_that_is_loaded_again_is_called_directly_again(
    tiny_target: Path, tiny_reference: GreedyReference
) -> None:
    async with served(tiny_target) as (engine, stages):
        verifies = 0

        def reload(operation: str) -> None:
            nonlocal verifies
            verifies += operation == "verify"

        stages.wired.before = reload
        going = asyncio.ensure_future(generate_all(engine, REQUESTS))
        for wanted in (3, 7):
            await until(lambda wanted=wanted: verifies >= wanted)  # type: ignore[misc]
            await asyncio.to_thread(stages.load_verifier)
        for params, sink in zip(REQUESTS, await going, strict=True):
            assert sink.token_ids == reference_of(tiny_reference, params)
        assert stages.by_triton["channel"] >= 5
