"""Work that can wait until a stage is at work: answers go out, and what happened is told.

Between a stage's answer and the next call all stages stand still. So only what the next call is made of is
done there; the rest is put off, and done while the call is under way. Knows no stage and no sequence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

_LOG = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")
_Work = Callable[[], None]
# Python gives its lock away every 5 ms only: work that began at once would hold up the thread that sends.
_UNTIL_SENT_S: Final = 0.0005


class Meanwhile:
    """What is put off, in order."""

    def __init__(self) -> None:
        self.is_worthwhile = True  # not where stages compute on every core: then nothing is put off
        self._work: list[_Work] = []

    def put_off(self, work: _Work) -> None:
        """Do it during the next call, or when somebody says so."""
        self._work.append(work)
        if not self.is_worthwhile:
            self.do()

    def do(self) -> None:
        """Do all of it now; what fails is logged, and the rest goes on."""
        while self._work:
            work, self._work = self._work, []
            for each in work:
                try:
                    each()
                except Exception as error:  # noqa: BLE001 - nobody waits for it, and others' work goes on
                    _LOG.exception("what was put off failed: %s", error)

    async def during(self, call: Awaitable[_Answer]) -> _Answer:
        """Send a call, do what was put off while it is under way, and give its answer."""
        if not self._work:
            return await call
        answer = asyncio.ensure_future(call)
        try:
            await asyncio.wait({answer}, timeout=_UNTIL_SENT_S)
            self.do()
            return await answer
        finally:
            answer.cancel()  # where this was cancelled; else it is answered
