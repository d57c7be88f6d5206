"""The asyncio client: the same names as the synchronous one, for one event loop.

Cancelling the task that reads an answer cancels the request on the server. What requests and answers look
like is in `wire`, what an answer means in `exchange`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from ddtree_client.channel import CHANNEL_OPTIONS, checked_address, credentials
from ddtree_client.client import HEALTH_TIMEOUT_S
from ddtree_client.errors import DDTreeClientError, error_from_status
from ddtree_client.exchange import Exchange
from ddtree_client.health import (
    KNOWN_MODELS,
    STAGE_MODELS,
    Health,
    ModelHealth,
    describe_request,
    is_closed,
    read_description,
    read_index,
    seen_ready,
)
from ddtree_client.types import Chunk, GenerateOptions, Message, Result, Tls
from ddtree_client.wire import Prompts, many_prompts, one_prompt

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class AsyncStream:
    """An answer while it arrives: ``async for`` over its chunks once, then read ``result``.

    Leaving the loop early, or cancelling the task, cancels the request on the server. After a ``break`` the
    event loop closes the iterator at its next turn; ``async with`` does it at a definite place.
    """

    def __init__(self, exchange: Exchange, call: Any) -> None:
        self._exchange = exchange
        self._call = call
        self._cancelled = False

    @property
    def request_id(self) -> str:
        """The id of the request in the server's log."""
        return self._exchange.request_id

    @property
    def result(self) -> Result:
        """The whole answer. Raises IncompleteAnswerError before the end of the stream, and after a cancel."""
        return self._exchange.results()[0]

    @property
    def results(self) -> tuple[Result, ...]:
        """The answers of every sequence, with ``num_return_sequences``; otherwise like `result`."""
        return self._exchange.results()

    def cancel(self) -> None:
        """Tells the server to stop; the loop over the chunks ends."""
        if not self._exchange.ended:
            self._cancelled = True
            self._call.cancel()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Chunks as they arrive. Raises DDTreeClientError when the server refuses, fails, or is too late."""
        try:
            async for response in self._call:
                chunk = self._exchange.receive(response)
                if chunk is not None:
                    yield chunk
            self._exchange.close()
        except DDTreeClientError:  # the server goes on with what nobody waits for
            self._call.cancel()
            raise
        except grpc.RpcError as error:
            self._exchange.fail(error.code().name, error.details() or "")
        except asyncio.CancelledError:
            # grpc raises this for cancel() as well; only a cancelled task must see it.
            if not self._cancelled or _task_is_cancelled():
                raise
        finally:
            self.cancel()
        if not self._cancelled:
            yield self._exchange.finish()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncClient:
    """A connection to the model ``model`` of the Triton server whose gRPC port is ``url`` (HOST:PORT).

    It connects at the first request, and belongs to the event loop that runs then. ``timeout_s`` is the
    deadline of requests that do not give their own. Every method raises DDTreeClientError, or one of its
    subclasses.
    """

    def __init__(
        self,
        url: str = "localhost:8001",
        *,
        model: str = "ddtree",
        timeout_s: float | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.address = checked_address(url)
        self._model = model
        self._timeout_s = timeout_s
        self._credentials = None if tls is None else credentials(tls)
        self._channel: grpc.aio.Channel | None = None

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: Sequence[int] | None = None,
        deadline_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Result:
        """The complete answer to a text, a conversation or token ids (exactly one of them)."""
        return (await self._complete(one_prompt(prompt, messages, input_ids), options, deadline_s))[0]

    async def generate_many(
        self,
        prompts: Sequence[str] | None = None,
        *,
        messages: Sequence[Sequence[Message]] | None = None,
        deadline_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> tuple[Result, ...]:
        """The answers to several texts or conversations, in order, sent as one request of several rows."""
        return await self._complete(many_prompts(prompts, messages), options, deadline_s)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: Sequence[int] | None = None,
        deadline_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """Like `generate`, but the answer as it arrives.

        The request is sent at once; needs a running event loop.
        """
        return self._send(self._exchange(one_prompt(prompt, messages, input_ids), options, deadline_s))

    async def health(self, *, timeout_s: float = HEALTH_TIMEOUT_S) -> Health:
        """How the server and its models are. Raises ServerUnavailableError when no server answers."""
        live = (await self._unary("ServerLive", service_pb2.ServerLiveRequest(), timeout_s)).live
        models = await self._models(timeout_s)
        stages = {
            model.name: await self._describe(model.name, timeout_s)
            for model in models
            if model.name in STAGE_MODELS and model.ready
        }
        ready = (await self._unary("ServerReady", service_pb2.ServerReadyRequest(), timeout_s)).ready
        metadata = await self._unary("ServerMetadata", service_pb2.ServerMetadataRequest(), timeout_s)
        return Health(self.address, live, ready, metadata.version, models, stages)

    async def ready(self, *, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
        """Whether the model takes requests. Raises ServerUnavailableError when no server answers."""
        request = service_pb2.ModelReadyRequest(name=self._model)
        return bool((await self._unary("ModelReady", request, timeout_s)).ready)

    async def close(self) -> None:
        """Closes the connection; requests under way are cancelled."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _stub(self) -> Any:
        # Opened late: an asyncio channel binds itself to the event loop that is running.
        if self._channel is None:
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self.address, CHANNEL_OPTIONS)
            else:
                self._channel = grpc.aio.secure_channel(self.address, self._credentials, CHANNEL_OPTIONS)
        return service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def _exchange(self, prompts: Prompts, options: GenerateOptions, deadline_s: float | None) -> Exchange:
        return Exchange(
            address=self.address,
            model=self._model,
            prompts=prompts,
            options=options,
            deadline_s=self._timeout_s if deadline_s is None else deadline_s,
        )

    def _send(self, exchange: Exchange) -> AsyncStream:
        call = self._stub().ModelStreamInfer(iter((exchange.request,)), timeout=exchange.deadline_s)
        return AsyncStream(exchange, call)

    async def _complete(
        self, prompts: Prompts, options: GenerateOptions, deadline_s: float | None
    ) -> tuple[Result, ...]:
        exchange = self._exchange(prompts, options, deadline_s)
        async for _ in self._send(exchange):
            pass
        return exchange.results()

    async def _models(self, timeout_s: float) -> tuple[ModelHealth, ...]:
        try:
            index = await self._unary("RepositoryIndex", service_pb2.RepositoryIndexRequest(), timeout_s)
            return read_index(index)
        except DDTreeClientError as error:
            if not is_closed(error):
                raise
        names = (self._model, *KNOWN_MODELS)
        asked = {name: service_pb2.ModelReadyRequest(name=name) for name in names}
        return seen_ready(
            {name: (await self._unary("ModelReady", ask, timeout_s)).ready for name, ask in asked.items()}
        )

    async def _describe(self, model: str, timeout_s: float) -> Mapping[str, Any]:
        try:
            return read_description(await self._unary("ModelInfer", describe_request(model), timeout_s))
        except DDTreeClientError as error:  # a stage that cannot speak is part of the picture
            return {"error": error.message}

    async def _unary(self, method: str, request: Any, timeout_s: float) -> Any:
        try:
            return await getattr(self._stub(), method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_from_status(
                error.code().name, error.details() or "", address=self.address, deadline_s=timeout_s
            ) from None


def _task_is_cancelled() -> bool:
    if sys.version_info < (3, 11):  # no way to ask: rather pass a cancellation on than lose it
        return True
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
