"""What is done about a stage that does not answer: time limits, patience where needed, rest where not.

Without the verifier nothing goes on, so a call to it is sent again until the stage is back (a watchdog loads
it again, see docs/OPERATIONS.md): then it does not know the session, says so, and the engine reads the
committed tokens again. The drafter and the tree builder only make things faster. After a call to one of them
has failed it is left alone for a while, since asking a dead process costs a second on Triton 2.51. Runs
without Triton.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ddtree.errors import Unavailable
from ddtree.stages.base import DRAFTER, TREE_BUILDER
from ddtree.stages.bls import StageCall
from ddtree.wire import Arrays

_LOG = logging.getLogger(__name__)
_AGAIN_S = 0.25  # between two looks whether a stage is back
_UNMISSED: Final = (DRAFTER, TREE_BUILDER)
_INSISTED: Final = ("prefill", "verify", "read_features")


class StageGone(Unavailable):
    """A stage's process is dead, or the stage is not loaded: the call was not answered by it."""


# Of a model that did not get the call or whose process ended, in Triton's own words (2.51 and 2.73); a target
# that lost one of its processes says the same (`parallel/group.py`).
_GONE: Final = ("is not healthy", "is not ready", "no available versions", "unknown model", "stub process")


def error_of(model: str, operation: str, said: str) -> Unavailable:
    """What is raised where a call was answered with an error, by the stage or for it."""
    kind = StageGone if any(words in said for words in _GONE) else Unavailable
    return kind(f"stage {model} failed to {operation}: {said}; retry in 5 s")


@dataclass(frozen=True)
class PatienceLimits:
    """Seconds, all of them."""

    call_s: float = 120.0  # a call that takes longer counts as lost
    draft_s: float = 5.0  # the same for the drafter and the tree builder, which are not missed
    recovery_s: float = 0.0  # how long the verifier is waited for; 0: its loss is an error at once
    rest_s: float = 5.0  # how long a stage that is not missed is left alone after it failed


class PatientCall:
    """A `StageCall` that bounds another one and repeats it where that can help."""

    def __init__(
        self, call: StageCall, limits: PatienceLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._call = call
        self._limits = limits
        self._clock = clock
        self._rests_until: dict[str, float] = {}

    async def __call__(self, model: str, operation: str, arrays: Arrays) -> Mapping[str, Any]:
        """Call a stage.

        Raises:
            Unavailable: it does not answer, in time, or says that it failed.
        """
        if operation == "describe":
            return await self._bounded(model, operation, arrays, self._limits.call_s)
        if model in _UNMISSED:
            return await self._unless_resting(model, operation, arrays)
        if operation in _INSISTED:
            return await self._insist(model, operation, arrays)
        return await self._bounded(model, operation, arrays, self._limits.call_s)

    async def _bounded(self, model: str, operation: str, arrays: Arrays, limit_s: float) -> Mapping[str, Any]:
        try:
            # The call itself cannot be taken back: its thread waits on, and a late answer is nobody's.
            return await asyncio.wait_for(self._call(model, operation, arrays), limit_s)
        except (TimeoutError, asyncio.TimeoutError):
            raise StageGone(f"stage {model} did not {operation} within {limit_s:g} s; retry in 5 s") from None

    async def _unless_resting(self, model: str, operation: str, arrays: Arrays) -> Mapping[str, Any]:
        if self._clock() < self._rests_until.get(model, 0.0):
            raise StageGone(f"stage {model} failed a moment ago and is left alone for now")
        try:
            return await self._bounded(model, operation, arrays, self._limits.draft_s)
        except StageGone as error:
            self._rests_until[model] = self._clock() + self._limits.rest_s
            _LOG.warning("stage %s is left alone for %g s: %s", model, self._limits.rest_s, error)
            raise

    async def _insist(self, model: str, operation: str, arrays: Arrays) -> Mapping[str, Any]:
        deadline = None
        while True:
            try:
                return await self._bounded(model, operation, arrays, self._limits.call_s)
            except StageGone as error:
                now = self._clock()
                if deadline is None:
                    deadline = now + self._limits.recovery_s
                    _LOG.warning("waiting up to %g s for %s: %s", self._limits.recovery_s, model, error)
                if now >= deadline:
                    raise
                await asyncio.sleep(_AGAIN_S)
