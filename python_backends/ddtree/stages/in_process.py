"""The stages as objects of this process: no hops, tensors stay where they are.

Computation runs on one thread of its own, so that the event loop goes on serving requests, and so that the
math library keeps one team of threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from ddtree.device.messages import RoundRequest, RoundResult, RoundSizes
from ddtree.events import Observe, ignore, watch_call
from ddtree.parallel.target import ParallelTarget
from ddtree.stages.base import DRAFTER, TARGET_VERIFIER, TREE_BUILDER, StageInfo
from ddtree.tree import build_trees
from ddtree.types import (
    DrafterInfo,
    DraftRequest,
    DraftResult,
    FeatureRequest,
    FeatureResult,
    PrefillRequest,
    PrefillResult,
    TreeBatch,
    TreeRequest,
    Usage,
    VerifyRequest,
    VerifyResult,
)
from ddtree.verify import TargetVerifier

_Result = TypeVar("_Result")


class RoundStage(Protocol):
    """Both stages together, where they share a device: whole rounds in one call."""

    @property
    def sizes(self) -> RoundSizes:
        """What is prepared."""
        ...

    def run(self, request: RoundRequest) -> RoundResult:
        """Draft, build trees, verify and commit."""
        ...


class DraftStage(Protocol):
    """A drafter with its sessions: the DFlash one, or any other that proposes candidates."""

    def info(self) -> DrafterInfo:
        """What the orchestrator must know."""
        ...

    def draft(self, request: DraftRequest) -> DraftResult:
        """Take new context, give candidates."""
        ...

    def release(self, session_ids: Sequence[int]) -> Usage:
        """Drop sessions."""
        ...


@dataclass(frozen=True)
class LoadedStages:
    """What a loader gives."""

    verifier: TargetVerifier
    drafter: DraftStage
    rounds: RoundStage | None = None  # where both share a device


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="ddtree-stages")


class InProcessStages:
    """Stages of one process; see `Stages`."""

    def __init__(
        self,
        verifier: TargetVerifier,
        drafter: DraftStage,
        observe: Observe = ignore,
        thread: ThreadPoolExecutor | None = None,
        rounds: RoundStage | None = None,
    ) -> None:
        """Take the stages, their rounds, and the thread that computes if they were built on one."""
        self._rounds = rounds
        self.verifier = verifier
        self.drafter = drafter
        self.observe = observe
        self._thread = thread or _one_thread()
        self._threads = self._thread.submit(torch.get_num_threads).result()

    @classmethod
    def build(cls, load: Callable[[], LoadedStages]) -> InProcessStages:
        """Load the stages on the thread that will run them: each computing thread has an OpenMP team."""
        thread = _one_thread()
        try:
            loaded = thread.submit(load).result()
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(loaded.verifier, loaded.drafter, thread=thread, rounds=loaded.rounds)

    async def describe(self) -> StageInfo:
        """What is loaded, and what the stages hold now.

        From here on the event loop's thread computes alone. With more teams than cores OpenMP slows all of
        them: a plain step took 24 ms instead of 16 once the engine's own small tensors had formed one.
        """
        torch.get_num_threads()  # a thread takes over the global number when first asked, and not again
        torch.set_num_threads(1)  # of this thread; MKL knows one number only, so the stages' comes last
        await self._run(torch.set_num_threads, self._threads)
        verifier = await self._ask(TARGET_VERIFIER, "describe", self.verifier.info)
        drafter = await self._ask(DRAFTER, "describe", self.drafter.info)
        return StageInfo(verifier, drafter, None if self._rounds is None else self)

    async def check(self) -> None:
        """Look whether every process of a divided target lives; see `OwnStages`.

        Raises:
            Unavailable: one is lost, and with it the target.
        """
        target = self.verifier.target
        if isinstance(target, ParallelTarget) and not target.is_whole:
            await self._run(self.verifier.info)  # on its thread, where the rest can be ended

    @property
    def sizes(self) -> RoundSizes:
        """Of the rounds that these stages can do in one call."""
        assert self._rounds is not None, "`describe` says whether there are any"
        return self._rounds.sizes

    async def round(self, request: RoundRequest) -> RoundResult:
        """Do a whole round in one call."""
        assert self._rounds is not None, "`describe` says whether there are any"
        return await self._ask(TARGET_VERIFIER, "round", self._rounds.run, request)

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        """Let the target read chunks of committed ids."""
        return await self._ask(TARGET_VERIFIER, "prefill", self.verifier.prefill, request)

    async def draft(self, request: DraftRequest) -> DraftResult:
        """Give the drafter new context and take its candidates."""
        return await self._ask(DRAFTER, "draft", self.drafter.draft, request)

    async def build_tree(self, request: TreeRequest) -> TreeBatch:
        """Make draft trees of candidates."""
        return await self._ask(TREE_BUILDER, "build_tree", build_trees, request)

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        """Check trees against the target; the accepted paths are committed in its cache."""
        return await self._ask(TARGET_VERIFIER, "verify", self.verifier.verify, request)

    async def read_features(self, request: FeatureRequest) -> FeatureResult:
        """Read stored context features back."""
        return await self._ask(TARGET_VERIFIER, "read_features", self.verifier.read_features, request)

    async def release(self, session_ids: Sequence[int]) -> None:
        """Drop sessions in both stages."""
        await self._ask(TARGET_VERIFIER, "release", self.verifier.release, session_ids)
        await self._ask(DRAFTER, "release", self.drafter.release, session_ids)

    async def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)

    async def _ask(
        self, stage: str, operation: str, call: Callable[..., _Result], *arguments: Any
    ) -> _Result:
        def work() -> tuple[_Result, float]:
            started = time.perf_counter()
            return call(*arguments), time.perf_counter() - started

        answer, _ = await watch_call(self.observe, stage, operation, self._run(work), lambda done: done[1])
        return answer

    async def _run(self, call: Callable[..., _Result], *arguments: Any) -> _Result:
        def run() -> _Result:
            with torch.inference_mode():
                return call(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)
