"""The response that carries a generation: it begins with the first chunk, and stops when the caller leaves.

An error before the first chunk is an HTTP error, a later one an event. Knows ASGI, no wording of answers.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any, Final

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from ddtree_client import Chunk, DDTreeClientError, RequestCancelledError
from ddtree_gateway.answers import Writer
from ddtree_gateway.errors import ApiError, from_client
from ddtree_gateway.generation import Generation
from ddtree_gateway.options import Order
from ddtree_gateway.usage import Rounds, usage_of

_LOG = logging.getLogger(__name__)
_EVENTS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that keep events back until there are enough of them
)
_DONE: Final = b"data: [DONE]\n\n"


class GenerationResponse(Response):
    """Runs a generation while the caller is there."""

    def __init__(self, order: Order, generation: Generation, make_writer: type[Any]) -> None:
        self.background = None
        self._order = order
        self._generation = generation
        self._make_writer = make_writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: answer, or stop as soon as the caller has left."""
        answering = asyncio.create_task(self._answer(scope, receive, send))
        leaving = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
            with suppress(asyncio.CancelledError):
                await answering

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        try:
            parts = self._events() if self._order.stream else self._whole()
            async with aclosing(parts) as bodies:
                async for part in bodies:
                    if not begun:
                        begun = True
                        await self._begin(send, part)
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Exception as error:  # noqa: BLE001 - the caller gets an answer in any case
            failure = _as_api_error(error)
            if begun:
                body = _event(failure.body)
                await send({"type": "http.response.body", "body": body, "more_body": False})
            else:
                response = JSONResponse(failure.body, failure.status, headers=dict(failure.headers))
                await response(scope, receive, send)

    async def _begin(self, send: Send, first: bytes) -> None:
        if self._order.stream:
            headers = list(_EVENTS)
        else:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(first)).encode())]
        start: Message = {"type": "http.response.start", "status": 200, "headers": headers}
        await send(start)

    async def _events(self) -> AsyncGenerator[bytes]:
        writer: Writer | None = None
        rounds = Rounds()
        async with aclosing(self._chunks(rounds)) as chunks:
            async for index, chunk in chunks:
                bodies = []
                if writer is None:
                    writer = self._writer()
                    bodies = writer.opening(self._order.sequences * len(self._order.prompts))
                bodies += writer.pieces(index, chunk)
                if bodies:
                    yield b"".join(map(_event, bodies))
        assert writer is not None, "an answer without an error has chunks"
        tail = b""
        if self._order.include_usage:
            tail = _event({**writer.closing(), **self._numbers(rounds)})
        yield tail + _DONE

    async def _whole(self) -> AsyncGenerator[bytes]:
        rounds = Rounds()
        async with aclosing(self._chunks(rounds)) as chunks:
            async for _ in chunks:
                pass
        body = self._writer().whole(self._generation.results)
        yield json.dumps({**body, **self._numbers(rounds)}).encode()

    async def _chunks(self, rounds: Rounds) -> AsyncGenerator[tuple[int, Chunk]]:
        """The generation's chunks, counted; one that the server cut is an error."""
        async with aclosing(self._generation.chunks()) as chunks:
            async for index, chunk in chunks:
                if chunk.finish_reason == "cancelled":
                    raise _stopped()
                rounds.add(index, chunk)
                yield index, chunk

    def _writer(self) -> Writer:
        order = self._order
        made: Writer = self._make_writer(
            order.model, self._generation.request_id, order.log_probs, order.include_usage
        )
        return made

    def _numbers(self, rounds: Rounds) -> dict[str, Any]:
        results = self._generation.results
        numbers = {
            "usage": usage_of(results, self._order.sequences),
            "metrics": {"speculative_decoding": rounds.speculative_decoding(results)},
        }
        warnings = list(dict.fromkeys(result.warning for result in results if result.warning))
        return {**numbers, "warnings": warnings} if warnings else numbers


def _stopped() -> RequestCancelledError:
    return RequestCancelledError(
        "the server ended this answer because it is stopping; send the request again"
    )


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, DDTreeClientError):
        return from_client(error)
    _LOG.error("an answer failed", exc_info=error)
    return ApiError(500, "the gateway failed on this request; its log says why", "server_error")


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
