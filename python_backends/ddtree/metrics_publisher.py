"""Publishes the numbers every second while anything happens, a few at a time, on the event loop.

Everything here runs between the engine's own steps: Triton 2.51 crashes when metrics are updated from two
threads at once, and a round that waits for a stage leaves the loop time enough. Also asks the stages now and
then what they hold. It does not know what the numbers mean, nor where they go.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

from ddtree.metrics import Metrics
from ddtree.metrics_listener import MetricsListener
from ddtree.stages.base import DRAFTER, TARGET_VERIFIER, Stages

_LOG = logging.getLogger(__name__)
_INTERVAL_S = 1.0
_SHORTEST_S = 0.1
_USAGE_S = 5.0
_SLICE = 4  # updates between two chances for the engine


class Exporter(Protocol):
    """Where numbers are published."""

    def updates(self, metrics: Metrics) -> Iterator[None]:
        """Take what changed and publish it, one update at each step of the iterator."""
        ...


class MetricsPublisher:
    """Keeps an exporter up to date with what a listener heard."""

    def __init__(
        self,
        metrics: Metrics,
        exporter: Exporter,
        *,
        interval_s: float = _INTERVAL_S,
        usage_s: float = _USAGE_S,
    ) -> None:
        """Take the numbers and where they go.

        Args:
            metrics: the numbers.
            exporter: where they go.
            interval_s: between two publications while anything happens, seconds.
            usage_s: between two questions to the stages, seconds.
        """
        self._woken = asyncio.Event()  # by any event
        self._turned = asyncio.Event()  # from no requests to some, or back
        self.listener = MetricsListener(metrics, on_change=self._woken.set, on_turn=self._turned.set)
        self._metrics = metrics
        self._exporter = exporter
        self._interval_s = interval_s
        self._usage_s = usage_s
        self._asked_at = -usage_s
        self._was_at_rest = False
        self._asking: asyncio.Task[None] | None = None
        self._is_empty = False  # the stages said so, when nothing ran
        self._is_settled = False  # and that is published

    async def run(self, stages: Stages, is_idle: Callable[[], bool]) -> None:
        """Publish until cancelled.

        Args:
            stages: asked what they hold: every few seconds while requests run, and until they hold nothing.
            is_idle: whether the stages were told of every sequence that ended.
        """
        try:
            while True:
                if self._is_settled:
                    await self._woken.wait()
                self._woken.clear()
                is_empty, self._is_empty = self._is_empty, False
                await self._publish()
                is_at_rest = not self.listener.has_requests and is_idle()
                self._is_settled = is_empty and is_at_rest and not self._woken.is_set()
                if not self._is_settled:
                    self._ask(stages, is_at_rest=is_at_rest)
                    await self._pause()
        except Exception as error:  # noqa: BLE001 - requests go on without metrics
            self.listener.stop()
            _LOG.exception("metrics can no longer be published: %s", error)
        finally:
            if self._asking is not None:
                self._asking.cancel()

    async def _pause(self) -> None:
        """Wait for the next publication; the first request and the end of the last are told sooner."""
        shortest_s = min(_SHORTEST_S, self._interval_s)
        await asyncio.sleep(shortest_s)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._turned.wait(), self._interval_s - shortest_s)
        self._turned.clear()

    async def _publish(self) -> None:
        self.listener.refresh()
        for number, _ in enumerate(self._exporter.updates(self._metrics), start=1):
            if number % _SLICE == 0:
                await asyncio.sleep(0)

    def _ask(self, stages: Stages, *, is_at_rest: bool) -> None:
        """Ask the stages when it is time to; never waits for their answer, which a dead stage delays."""
        has_come_to_rest = is_at_rest and not self._was_at_rest
        is_due = has_come_to_rest or time.monotonic() - self._asked_at >= self._usage_s
        if is_due and (self._asking is None or self._asking.done()):
            self._was_at_rest = is_at_rest
            self._asked_at = time.monotonic()
            asking = self._read_usage(stages, is_at_rest=is_at_rest)
            self._asking = asyncio.get_running_loop().create_task(asking)

    async def _read_usage(self, stages: Stages, *, is_at_rest: bool) -> None:
        try:
            info = await stages.describe()
        except Exception as error:  # noqa: BLE001 - asked again soon; that a stage failed is counted elsewhere
            _LOG.info("the stages do not say what they hold: %s", error)
            return
        self.listener.note_usage(TARGET_VERIFIER, info.verifier.usage)
        self.listener.note_usage(DRAFTER, info.drafter.usage)
        self._is_empty = is_at_rest and not (info.verifier.usage.sessions or info.drafter.usage.sessions)
