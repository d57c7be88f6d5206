"""The synchronous client, safe to use from several threads.

Each request is its own gRPC stream on one connection. This module sends and cancels; what requests and
answers look like is in `wire`, what an answer means in `exchange`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from ddtree_client.channel import CHANNEL_OPTIONS, checked_address, credentials
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

HEALTH_TIMEOUT_S = 5.0


class Stream:
    """An answer while it arrives: iterate over its chunks once, then read ``result``.

    Leaving the loop early in any way (break, an exception, dropping the object) cancels the request on the
    server.
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

    def cancel(self) -> None:
        """Tells the server to stop; the loop over the chunks ends. Any thread may call it."""
        if not self._exchange.ended:
            self._cancelled = True
            self._call.cancel()

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks as they arrive. Raises DDTreeClientError when the server refuses, fails, or is too late."""
        # A generator, as Python closes it when its loop is left: that is what turns `break` into a cancel.
        try:
            for response in self._call:
                chunk = self._exchange.receive(response)
                if chunk is not None:
                    yield chunk
            self._exchange.close()
        except DDTreeClientError:  # the server goes on with what nobody waits for
            self._call.cancel()
            raise
        except grpc.RpcError as error:
            self._exchange.fail(error.code().name, error.details() or "")
        finally:
            self.cancel()
        if not self._cancelled:
            yield self._exchange.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()


class Client:
    """A connection to the model ``model`` of the Triton server whose gRPC port is ``url`` (HOST:PORT).

    ``timeout_s`` is the deadline of requests that do not give their own. Nothing is sent before the first
    request. Every method raises DDTreeClientError, or one of its subclasses.
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
        if tls is None:
            self._channel = grpc.insecure_channel(self.address, CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(self.address, credentials(tls), CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: Sequence[int] | None = None,
        deadline_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Result:
        """The complete answer to a text, a conversation or token ids (exactly one of them)."""
        prompts = one_prompt(prompt, messages, input_ids)
        return self._complete(prompts, options, deadline_s)[0]

    def generate_many(
        self,
        prompts: Sequence[str] | None = None,
        *,
        messages: Sequence[Sequence[Message]] | None = None,
        deadline_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> tuple[Result, ...]:
        """The answers to several texts or conversations, in order, sent as one request of several rows."""
        return self._complete(many_prompts(prompts, messages), options, deadline_s)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: Sequence[int] | None = None,
        deadline_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Like `generate`, but the answer as it arrives. The request is sent at once."""
        return self._send(self._exchange(one_prompt(prompt, messages, input_ids), options, deadline_s))

    def health(self, *, timeout_s: float = HEALTH_TIMEOUT_S) -> Health:
        """How the server and its models are. Raises ServerUnavailableError when no server answers."""
        live = self._unary("ServerLive", service_pb2.ServerLiveRequest(), timeout_s).live
        models = self._models(timeout_s)
        stages = {
            model.name: self._describe(model.name, timeout_s)
            for model in models
            if model.name in STAGE_MODELS and model.ready
        }
        return Health(
            address=self.address,
            live=live,
            ready=self._unary("ServerReady", service_pb2.ServerReadyRequest(), timeout_s).ready,
            server_version=self._unary(
                "ServerMetadata", service_pb2.ServerMetadataRequest(), timeout_s
            ).version,
            models=models,
            stages=stages,
        )

    def close(self) -> None:
        """Closes the connection; requests under way are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(self, prompts: Prompts, options: GenerateOptions, deadline_s: float | None) -> Exchange:
        return Exchange(
            address=self.address,
            model=self._model,
            prompts=prompts,
            options=options,
            deadline_s=self._timeout_s if deadline_s is None else deadline_s,
        )

    def _send(self, exchange: Exchange) -> Stream:
        return Stream(
            exchange, self._stub.ModelStreamInfer(iter((exchange.request,)), timeout=exchange.deadline_s)
        )

    def _complete(
        self, prompts: Prompts, options: GenerateOptions, deadline_s: float | None
    ) -> tuple[Result, ...]:
        exchange = self._exchange(prompts, options, deadline_s)
        for _ in self._send(exchange):
            pass
        return exchange.results()

    def _models(self, timeout_s: float) -> tuple[ModelHealth, ...]:
        try:
            index = self._unary("RepositoryIndex", service_pb2.RepositoryIndexRequest(), timeout_s)
            return read_index(index)
        except DDTreeClientError as error:
            if not is_closed(error):
                raise
        names = (self._model, *KNOWN_MODELS)
        asked = {name: service_pb2.ModelReadyRequest(name=name) for name in names}
        return seen_ready(
            {name: self._unary("ModelReady", ask, timeout_s).ready for name, ask in asked.items()}
        )

    def _describe(self, model: str, timeout_s: float) -> Mapping[str, Any]:
        try:
            return read_description(self._unary("ModelInfer", describe_request(model), timeout_s))
        except DDTreeClientError as error:  # a stage that cannot speak is part of the picture
            return {"error": error.message}

    def _unary(self, method: str, request: Any, timeout_s: float) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_from_status(
                error.code().name, error.details() or "", address=self.address, deadline_s=timeout_s
            ) from None
