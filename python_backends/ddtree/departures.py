"""How sequences leave the engine: at their end, cancelled, late or failed; then their sessions are dropped.

Whatever goes wrong here concerns one sequence: its caller gets one last delta or one error, and nobody else
notices. Knows stages only as something that holds sessions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial

from ddtree import events
from ddtree.deferred import DeferredWork
from ddtree.errors import DDTreeError, ResourceExhausted, Unavailable
from ddtree.live import Live
from ddtree.scheduler import Scheduler
from ddtree.sequence import Delta, Ending, SequenceState
from ddtree.stages.base import Stages

_LOG = logging.getLogger(__name__)
_MOST_UNRELEASED = 4096  # ended sessions that stages are told of again; the time to live drops the others


class Departures:
    """Answers sequences and takes out of the scheduler those that end."""

    def __init__(
        self, scheduler: Scheduler, stages: Stages, observe: events.Observe, deferred: DeferredWork
    ) -> None:
        self._scheduler = scheduler
        self._stages = stages
        self._observe = observe
        self._deferred = deferred
        self._to_release: list[int] = []
        self._unreleased: list[int] = []

    @property
    def hold_pages(self) -> bool:
        """Whether sequences have ended whose sessions the stages still hold."""
        return bool(self._to_release)

    def emit(self, live: Live, delta: Delta) -> None:
        """Give a sequence's caller what is new; with a finish reason it was the last.

        What a round adds in the middle goes out while a stage works. Nobody should wait for a first token or
        the end of an answer, and a trace says when a round's tokens went out.
        """
        if live.sequence.stats.rounds and not delta.finish_reason and live.sink.trace is None:
            self._deferred.defer(partial(self._give, live, delta))
            return
        self._deferred.run()  # what came before
        self._give(live, delta)
        if live.failure:
            self.fail([live], live.failure)
        elif delta.finish_reason:
            self._remove(live)
            if not live.done.done():
                live.done.set_result(None)

    def drop_ended(self) -> None:
        """End whoever is not waited for any more, is past its deadline, or waited too long for a place."""
        for live in list(self._scheduler):
            if live.failure:
                self.fail([live], live.failure)
            elif live.done.done() or live.sink.is_cancelled():
                self._end(live, "cancelled")
        for live in self._scheduler.past_deadline():
            if live.sequence.state is SequenceState.WAITING and not live.sequence.output_ids:
                self.fail([live], Unavailable(self._scheduler.why_waiting(live, "its deadline came")))
            else:
                self._end(live, "deadline")
        for live in self._scheduler.overdue():
            self.fail([live], ResourceExhausted(self._scheduler.why_waiting(live, "queue_timeout_ms passed")))

    def fail(self, lives: Iterable[Live], error: DDTreeError) -> None:
        """End sequences with an error, behind what they were given."""
        self._deferred.run()
        for live in lives:
            self._remove(live)
            if not live.done.done():
                live.done.set_exception(error)

    def fail_one(self, live: Live, error: Exception) -> None:
        """End a sequence whose own data broke a step; it is our bug, and the others go on."""
        _LOG.error("a sequence failed: %s", error, exc_info=error, extra=live.log_fields)
        self.fail([live], as_ours(error))

    async def release(self) -> None:
        """Drop ended sessions in the stages; what cannot be told is dropped there by its time to live."""
        if not self._to_release:
            return
        session_ids = list(self._to_release)
        try:
            await self._stages.release([*self._unreleased, *session_ids])
            self._unreleased = []
        except Exception as error:  # noqa: BLE001 - nobody waits for it, and the time to live remains
            _LOG.warning("%d sessions could not be released: %s", len(session_ids), error)
            # Again with the next ones that end: a drafter that rests some seconds would keep their pages.
            self._unreleased = [*self._unreleased, *session_ids][-_MOST_UNRELEASED:]
        del self._to_release[: len(session_ids)]  # only now: idle means that the stages know

    def _end(self, live: Live, reason: Ending) -> None:
        try:
            delta = live.sequence.end(reason)
        except Exception as error:  # noqa: BLE001 - its text cannot be finished; the others' can
            self.fail_one(live, error)
            return
        self.emit(live, delta)

    def _give(self, live: Live, delta: Delta) -> None:
        if live.failure:
            return  # there would be a gap before it
        try:
            live.sink.emit(delta, live.sequence.stats)
        except Exception as error:  # noqa: BLE001 - one caller's broken channel must not touch the others
            _LOG.exception("a sequence cannot be answered", extra=live.log_fields)
            live.failure = Unavailable(f"the answer could not be sent: {error}")
            return
        self._observe(events.Emitted(live, delta))

    def _remove(self, live: Live) -> None:
        self._scheduler.remove(live)
        self._to_release.append(live.sequence.session_id)


def as_ours(error: Exception) -> DDTreeError:
    """An error that may be shown: ours as it is, anything else as a state of the service."""
    return error if isinstance(error, DDTreeError) else Unavailable(f"the engine failed: {error}")
