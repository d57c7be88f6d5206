"""Prometheus numbers of a program that uses the client, on demand: what its requests took, as it saw them.

Needs the package `prometheus-client` (ddtree-client[metrics]). A service passes its streams through
`ClientMetrics.chunks` and serves the numbers as it serves its others, or with `serve_metrics`. Knows streams
and their results, not how they are made.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, closing
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from ddtree_client.aio import AsyncStream
from ddtree_client.errors import DDTreeClientError
from ddtree_client.types import Chunk, Result

_REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
_FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
_INTER_TOKEN_SECONDS = (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.2, 0.5, 1, 2.5)
LEFT = "left"
"""The outcome of a request whose chunks were not read to the end."""


class ReadableStream(Protocol):
    """What is asked of `ddtree_client.Stream`."""

    def __iter__(self) -> Iterator[Chunk]: ...

    @property
    def result(self) -> Result:
        """The whole answer, at the end."""
        ...


class _Numbers:
    """The families, each with the label `draft_mode`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"ddtree_client_{name}", meaning, ("draft_mode", *labels), registry=registry)

        def histogram(name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
            name = f"ddtree_client_{name}"
            return Histogram(name, meaning, ("draft_mode",), buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests by outcome: completed, left, or the error", "outcome")
        self.output_tokens = counter("output_tokens", "Tokens that arrived")
        self.draft_tokens = counter("draft_tokens", "Draft tokens of completed requests")
        self.accepted_tokens = counter("accepted_draft_tokens", "Accepted draft tokens of completed requests")
        self.rounds = counter("rounds", "Rounds of completed requests")
        self.in_flight = Gauge(
            "ddtree_client_requests_in_flight", "Requests under way", ("draft_mode",), registry=registry
        )
        self.first = histogram(
            "time_to_first_token_seconds", "To the first token's arrival", _FIRST_TOKEN_SECONDS
        )
        self.gap = histogram(
            "inter_token_seconds",
            "Time per token after the first chunk; tokens of one chunk share it",
            _INTER_TOKEN_SECONDS,
        )
        self.seconds = histogram("request_seconds", "To the end of completed requests", _REQUEST_SECONDS)


class ClientMetrics:
    """Numbers of all requests whose chunks are passed through. Any thread may use it.

    Args:
        registry: where the numbers are; a new one when absent, so that nothing is global.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._numbers = _Numbers(self.registry)

    def chunks(self, stream: ReadableStream, draft_mode: str = "tree") -> Iterator[Chunk]:
        """Give the chunks of a stream and count them; what the stream raises is counted and raised.

        Args:
            stream: a fresh `Stream` of one prompt.
            draft_mode: value of the label; what the request asked for.
        """
        request = _Request(self._numbers, draft_mode)
        try:
            with closing(iter(stream)) as chunks:  # type: ignore[type-var]  # a generator, as every stream's
                for chunk in chunks:
                    request.take(chunk)
                    yield chunk
            request.complete((stream.result,))
        except DDTreeClientError as error:
            request.outcome = error.code.lower()
            raise
        finally:
            request.end()

    async def async_chunks(self, stream: AsyncStream, draft_mode: str = "tree") -> AsyncIterator[Chunk]:
        """The same for an `AsyncStream`."""
        request = _Request(self._numbers, draft_mode)
        try:
            async with aclosing(aiter(stream)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    request.take(chunk)
                    yield chunk
            request.complete(stream.results)
        except DDTreeClientError as error:
            request.outcome = error.code.lower()
            raise
        finally:
            request.end()


class _Request:
    """One request under way."""

    def __init__(self, numbers: _Numbers, draft_mode: str) -> None:
        self.outcome = LEFT
        self._numbers = numbers
        self._mode = draft_mode
        self._started = self._last = time.perf_counter()
        self._has_tokens = False
        numbers.in_flight.labels(draft_mode).inc()

    def take(self, chunk: Chunk) -> None:
        """Count a chunk."""
        count = len(chunk.token_ids)
        if not count:
            return
        now = time.perf_counter()
        self._numbers.output_tokens.labels(self._mode).inc(count)
        if self._has_tokens:
            gaps = self._numbers.gap.labels(self._mode)
            for _ in range(count):
                gaps.observe((now - self._last) / count)
        else:
            self._numbers.first.labels(self._mode).observe(now - self._started)
        self._has_tokens, self._last = True, now

    def complete(self, results: Iterable[Result]) -> None:
        """Count the whole, of one sequence or more."""
        self.outcome = "completed"
        for stats in (result.stats for result in results):
            self._numbers.draft_tokens.labels(self._mode).inc(stats.draft_tokens)
            self._numbers.accepted_tokens.labels(self._mode).inc(stats.accepted_draft_tokens)
            self._numbers.rounds.labels(self._mode).inc(stats.rounds)
        self._numbers.seconds.labels(self._mode).observe(time.perf_counter() - self._started)

    def end(self) -> None:
        """Count the end, however it came."""
        self._numbers.in_flight.labels(self._mode).dec()
        self._numbers.requests.labels(self._mode, self.outcome).inc()


def serve_metrics(metrics: ClientMetrics, port: int, address: str = "127.0.0.1") -> Callable[[], None]:
    """Serve the numbers at ``http://ADDRESS:PORT/metrics`` until the returned function is called.

    Raises OSError when the port is taken.
    """
    server, thread = start_http_server(port, addr=address, registry=metrics.registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
