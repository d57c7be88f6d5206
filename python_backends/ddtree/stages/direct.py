"""Calls stages directly where they offer a channel, and as before where they don't.

A hop through Triton wakes a chain of threads and takes most of a millisecond; over a socket it wakes two. A
stage is asked through Triton where its channel is; a channel that breaks is forgotten and the call goes
through Triton, whose word on the stage counts. It may have been done before the channel broke: what stages
make of a call that comes twice is what they make of any late one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from ddtree.errors import Unavailable
from ddtree.stages.bls import StageCall
from ddtree.stages.frames import BrokenFrame, Frame, FrameReader, pack
from ddtree.stages.patience import StageGone, error_of
from ddtree.stages.server import is_same_user
from ddtree.wire import Arrays

_LOG = logging.getLogger(__name__)
_ASKED_AGAIN_S: Final = 5.0


class ChannelLost(Exception):
    """The stage closed its end, or what it sent was no answer; calls under way have none."""


class _Channel(asyncio.Protocol):
    """One connection; calls overlap, told apart by number."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                waiting = self._waiting.pop(frame.number, None)
                if waiting is not None and not waiting.done():  # nobody waits for a late answer
                    waiting.set_result(frame)
        except BrokenFrame as error:
            self._lose(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(str(exc or "its process ended or was asked to"))

    async def call(self, operation: str, arrays: Arrays) -> Frame:
        """Send a call and wait for its answer."""
        if self.is_lost or self._transport is None:
            raise ChannelLost("it is closed")
        number = next(self._numbers)
        frame = pack(Frame(number, arrays, operation))
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._transport.write(frame)
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        """Give the connection up."""
        self._lose("it was closed")

    def _lose(self, reason: str) -> None:
        self.is_lost = True
        if self._transport is not None:
            self._transport.abort()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ChannelLost(reason))
        self._waiting.clear()


@dataclass
class _Stage:
    channel: _Channel | None = None
    asked_s: float = float("-inf")  # when it was asked for its channel
    is_asked: bool = False  # and has not answered
    is_told: bool = False  # whether the log says that it has none


class DirectCalls:
    """A `StageCall` that goes past Triton where it can.

    Args:
        through_triton: the other way to call a stage.
        clock: seconds.
    """

    def __init__(self, through_triton: StageCall, clock: Callable[[], float] = time.monotonic) -> None:
        self._through_triton = through_triton
        self._clock = clock
        self._stages: dict[str, _Stage] = {}
        self._is_closed = False

    async def __call__(self, model: str, operation: str, arrays: Arrays) -> Mapping[str, Any]:
        """Send one operation to a stage and give its outputs as arrays.

        Raises:
            Unavailable: as through Triton.
        """
        channel = await self._channel(model)
        if channel is not None:
            try:
                answer = await channel.call(operation, arrays)
            except ChannelLost as error:
                if self._is_closed:
                    raise Unavailable(f"stage {model} is called no more: the model ends") from None
                _LOG.warning("stage %s is called through Triton: its channel is lost (%s)", model, error)
            except asyncio.CancelledError:
                # Given up, for want of an answer mostly: Triton may have another copy of a stage that hangs.
                channel.close()
                raise
            else:
                if answer.error:
                    raise error_of(model, operation, answer.error)
                return answer.arrays
        return await self._through_triton(model, operation, arrays)

    def close(self) -> None:
        """Give all channels up; what is under way fails."""
        self._is_closed = True
        for stage in self._stages.values():
            if stage.channel is not None:
                stage.channel.close()

    async def _channel(self, model: str) -> _Channel | None:
        """The stage's channel; None where it has none, and while it is asked or was asked a moment ago."""
        stage = self._stages.setdefault(model, _Stage())
        if stage.channel is not None and not stage.channel.is_lost:
            return stage.channel
        now = self._clock()
        if self._is_closed or stage.is_asked or now < stage.asked_s + _ASKED_AGAIN_S:
            return None
        stage.asked_s, stage.is_asked, stage.channel = now, True, None
        try:
            told = await self._through_triton(model, "channel", {})
            address = json.loads(bytes(told["info"][0]))["address"]
            stage.channel = await _connect(address)
        except StageGone:
            raise  # the call itself would hear the same
        except (Unavailable, LookupError, TypeError, ValueError, OSError) as error:
            if not stage.is_told:
                _LOG.info("stage %s is called through Triton: it has no channel (%s)", model, error)
            stage.is_told = True
            return None
        finally:
            stage.is_asked = False
        if self._is_closed:
            stage.channel.close()
            return None
        _LOG.info("stage %s is called directly", model)
        stage.is_told = False
        return stage.channel


async def _connect(address: str) -> _Channel:
    loop = asyncio.get_running_loop()
    transport, channel = await loop.create_unix_connection(_Channel, f"\0{address}")
    if not is_same_user(transport.get_extra_info("socket")):
        channel.close()
        raise PermissionError("its process runs as another user")
    return channel
