"""What happens while requests are served, as small events for whoever wants to know: metrics, traces.

The engine, the stages' callers and the orchestrator send events through one function, always on the event
loop's thread, after the fact. A listener can change nothing, and one that fails is dropped: no request ever
notices. This module knows no metric and no span.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from ddtree.live import Live
    from ddtree.sequence import Delta

_LOG = logging.getLogger(__name__)

Outcome = Literal["completed", "cancelled", "invalid", "overloaded", "unavailable", "failed", "stop_order"]
CancelCause = Literal["client_gone", "stop_request", "shutdown"]
FallbackReason = Literal["drafter_full", "drafter_lost", "not_paying", "native_chain"]


@dataclass(eq=False)
class RequestWatch:
    """One request as listeners see it; each of its rows is a sequence. Listeners may keep it as a key."""

    request_id: str = ""
    trace_context: Mapping[str, str] = field(default_factory=dict)  # W3C headers, from whoever called
    arrived_s: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class RequestArrived:
    """A request is in hand; nothing of it is checked yet."""

    request: RequestWatch


@dataclass(frozen=True)
class RequestEnded:
    """A request got its last response."""

    request: RequestWatch
    outcome: Outcome
    cause: CancelCause | None = None  # of the outcome `cancelled`
    error: str = ""  # what the caller was told, unless it may quote the caller


@dataclass(frozen=True)
class SequenceQueued:
    """A checked row of a request waits for a place."""

    live: Live


@dataclass(frozen=True)
class Prefilled:
    """A chunk of each of these sequences' prompts was read."""

    batch: Sequence[Live]
    started_s: float  # of `time.perf_counter`
    seconds: float


@dataclass(frozen=True)
class Emitted:
    """A sequence's answer grew, or ended; `live.sequence.stats` counts it already."""

    live: Live
    delta: Delta


@dataclass(frozen=True)
class RoundRecord:
    """What one packed round did and where its time went."""

    sequences: int
    nodes: int
    emitted: int
    cache_commit_ms: float  # the part of the verify stage that moved the cache
    plain_ms: float  # what a round without drafts would have taken, by the cost kept current while serving
    stage_ms: Mapping[str, float]  # draft, build_tree, verify, commit; calls there and back included
    started_s: float = 0.0  # of `time.perf_counter`
    is_whole: bool = False  # done in one call of the stages, which tells its parts but not its cache's commit


@dataclass(frozen=True)
class RoundDone:
    """A round of all decoding sequences is over."""

    batch: Sequence[Live]
    drafting: Sequence[Live]  # those of the batch that had candidates
    tree_sizes: Sequence[int]  # draft nodes built for each of the batch
    record: RoundRecord


@dataclass(frozen=True)
class SessionLost:
    """A stage did not have a sequence's session, and it is opened again."""

    live: Live
    stage: str


@dataclass(frozen=True)
class Preempted:
    """A sequence was put back into the queue, since the verifier had no pages for it."""

    live: Live


@dataclass(frozen=True)
class PrefixHit:
    """A stage found the beginning of a prompt in its cache."""

    tokens: int


@dataclass(frozen=True)
class FellBack:
    """Decoding goes on without drafts: of a sequence, until its end or (`not_paying`) for a while.

    `native_chain`: of all, as long as the stages live, because the verifier's engine decodes by itself.
    """

    reason: FallbackReason


@dataclass(frozen=True)
class StageCalled:
    """A stage was called and answered, or failed to."""

    stage: str  # the stage's model name
    operation: str
    seconds: float  # there and back
    work_seconds: float  # of that, what the stage worked by its own clock
    has_failed: bool = False


Event = (
    RequestArrived | RequestEnded | SequenceQueued | Prefilled | Emitted | RoundDone | SessionLost | Preempted
    | PrefixHit | FellBack | StageCalled
)  # fmt: skip
Observe = Callable[[Event], None]
_Answer = TypeVar("_Answer")


def ignore(_: Event) -> None:
    """Listen to nothing."""


def rounds_only(listener: Callable[[RoundRecord], None]) -> Observe:
    """Hand every round's record to `listener`."""

    def observe(event: Event) -> None:
        if isinstance(event, RoundDone):
            listener(event.record)

    return observe


class Listeners:
    """Tells several listeners; the first exception of one is logged and the last thing heard of it."""

    def __init__(self, listeners: Sequence[Observe]) -> None:
        self._listeners = list(listeners)

    def __call__(self, event: Event) -> None:
        """Tell everybody; never raises."""
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception:  # noqa: BLE001 - whatever is wrong with it, requests go on
                self._listeners.remove(listener)
                _LOG.exception("a listener failed at %s and hears nothing more", type(event).__name__)


async def watch_call(
    observe: Observe,
    stage: str,
    operation: str,
    call: Awaitable[_Answer],
    work_seconds: Callable[[_Answer], float],
) -> _Answer:
    """Await a stage's answer and tell how long it took, whether it came or not."""
    started = time.perf_counter()
    try:
        answer = await call
    except Exception:
        observe(StageCalled(stage, operation, time.perf_counter() - started, 0.0, has_failed=True))
        raise
    observe(StageCalled(stage, operation, time.perf_counter() - started, work_seconds(answer)))
    return answer


class StopWatch:
    """Milliseconds of the stages of one round, by name."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.ms: dict[str, float] = {}
        self.started_s = self._last = clock()

    def lap(self, name: str) -> None:
        """Note what passed since the lap before."""
        now = self._clock()
        self.ms[name] = (now - self._last) * 1e3
        self._last = now
