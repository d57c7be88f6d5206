"""Work that can wait until a stage is at work: what goes out to callers, and what is only noted.

Between a stage's answer and the next call all stages stand still. So only what the next call is made of is
done there; the rest is deferred, and done while the call is under way. Knows no stage and no sequence.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

_LOG = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")
_Work = Callable[[], None]
# Python gives its lock away every 5 ms only: work that began at once would hold up the thread that sends.
_UNTIL_SENT_S: Final = 0.001


class DeferredWork:
    """What waits for a call, in order."""

    def __init__(self) -> None:
        self.is_on = True  # off where stages compute on every core: then nothing is deferred
        self._work: deque[_Work] = deque()

    def defer(self, work: _Work) -> None:
        """Do it during the next calls, or when somebody says so."""
        self._work.append(work)
        if not self.is_on:
            self.run()

    def run(self) -> None:
        """Do all of it now; what fails is logged, and the rest goes on."""
        while self._work:
            self._run_next()

    async def during(self, call: Awaitable[_Answer]) -> _Answer:
        """Send a call, do what was deferred until it is answered, and give its answer.

        What is not done by then is left: the answer waits for one piece of work at most.
        """
        if not self._work:
            return await call
        answer = asyncio.ensure_future(call)
        try:
            await asyncio.wait({answer}, timeout=_UNTIL_SENT_S)
            while self._work and not answer.done():
                self._run_next()
                await asyncio.sleep(0)
            return await answer
        finally:
            answer.cancel()  # where this was cancelled; else it is answered

    def _run_next(self) -> None:
        work = self._work.popleft()
        try:
            work()
        except Exception as error:  # noqa: BLE001 - nobody waits for it, and others' work goes on
            _LOG.exception("deferred work failed: %s", error)
