"""What a program's own Prometheus numbers say of the streams that pass through."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import click
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from ddtree_client import Chunk, OverloadedError, Result, Stats
from ddtree_client.cli import cli
from ddtree_client.cli_bench import _watched
from ddtree_client.metrics import ClientMetrics, serve_metrics

STATS = Stats(
    input_tokens=3, output_tokens=6, rounds=2, accepted_draft_tokens=3, draft_tokens=16, first_chunk_tokens=1,
    time_to_first_token_s=0.1, total_s=0.5,
)  # fmt: skip
RESULT = Result(text="x", token_ids=(1,) * 6, finish_reason="stop", stats=STATS)


def chunk(tokens: int) -> Chunk:
    return Chunk("x", (1,) * tokens, row=0, final=False, finish_reason="", elapsed_s=0.0)


@dataclass
class ScriptedStream:
    """A stream of given chunks, and an error after them."""

    sizes: tuple[int, ...] = (1, 3, 0, 2)
    error: Exception | None = None
    result: Result = RESULT
    closed: list[bool] = field(default_factory=list)

    @property
    def results(self) -> tuple[Result, ...]:
        return (self.result,)

    def __iter__(self) -> Iterator[Chunk]:
        try:
            yield from map(chunk, self.sizes)
            if self.error is not None:
                raise self.error
        finally:
            self.closed.append(True)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        try:
            for size in self.sizes:
                yield chunk(size)
            if self.error is not None:
                raise self.error
        finally:
            self.closed.append(True)


def value(metrics: ClientMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"ddtree_client_{name}", {"draft_mode": "tree", **labels})


def test_a_completed_answer() -> None:
    metrics = ClientMetrics()
    passing = metrics.chunks(ScriptedStream())
    next(passing)
    assert value(metrics, "requests_in_flight") == 1
    assert [len(each.token_ids) for each in passing] == [3, 0, 2]
    assert value(metrics, "requests_in_flight") == 0
    assert value(metrics, "requests_total", outcome="completed") == 1
    assert value(metrics, "output_tokens_total") == 6
    assert value(metrics, "draft_tokens_total") == 16
    assert value(metrics, "accepted_draft_tokens_total") == 3
    assert value(metrics, "rounds_total") == 2
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "inter_token_seconds_count") == 5
    assert value(metrics, "request_seconds_count") == 1


def test_an_error_is_counted_by_its_code_and_raised() -> None:
    metrics = ClientMetrics()
    with pytest.raises(OverloadedError):
        list(metrics.chunks(ScriptedStream(error=OverloadedError("full"))))
    assert value(metrics, "requests_total", outcome="resource_exhausted") == 1
    assert value(metrics, "requests_in_flight") == 0


def test_who_leaves_is_counted_and_the_stream_is_closed_at_once() -> None:
    metrics, stream = ClientMetrics(), ScriptedStream()
    for _ in metrics.chunks(stream):
        break
    assert stream.closed == [True]
    assert value(metrics, "requests_total", outcome="left") == 1
    assert value(metrics, "requests_in_flight") == 0


async def test_the_same_of_asyncio() -> None:
    metrics = ClientMetrics()
    streams: list[Any] = [ScriptedStream(), ScriptedStream(error=OverloadedError("full"))]
    assert [len(each.token_ids) async for each in metrics.async_chunks(streams[0])] == [1, 3, 0, 2]
    with pytest.raises(OverloadedError):
        async for _ in metrics.async_chunks(streams[1]):
            pass
    assert value(metrics, "requests_total", outcome="completed") == 1
    assert value(metrics, "requests_total", outcome="resource_exhausted") == 1
    assert value(metrics, "requests_in_flight") == 0
    assert streams[1].closed == [True]


def test_two_programs_in_one_process_do_not_share() -> None:
    first, own = ClientMetrics(), CollectorRegistry()
    second = ClientMetrics(own)
    list(first.chunks(ScriptedStream()))
    assert second.registry is own
    assert value(second, "requests_total", outcome="completed") is None


def test_served_until_stopped(unused_tcp_port: int) -> None:
    metrics = ClientMetrics()
    list(metrics.chunks(ScriptedStream(), "chain"))
    stop = serve_metrics(metrics, unused_tcp_port)
    url = f"http://127.0.0.1:{unused_tcp_port}/metrics"
    with urllib.request.urlopen(url, timeout=5) as answer:
        assert 'ddtree_client_output_tokens_total{draft_mode="chain"} 6.0' in answer.read().decode()
    stop()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=5)


def test_a_taken_port_and_a_missing_package_are_one_line(
    unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = serve_metrics(ClientMetrics(), unused_tcp_port)
    arguments = ["bench", "--metrics-port", str(unused_tcp_port), "--url", "127.0.0.1:1"]
    taken = CliRunner().invoke(cli, arguments)
    stop()
    assert taken.exit_code == 1
    assert f"cannot listen on 127.0.0.1:{unused_tcp_port}" in taken.output
    monkeypatch.setitem(sys.modules, "ddtree_client.metrics", None)
    missing = CliRunner().invoke(cli, arguments)
    assert missing.exit_code == 2
    assert "install ddtree-client[metrics]" in missing.output


def test_without_a_port_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ddtree_client.metrics", None)
    with _watched(None, "") as watch:
        stream: Any = ScriptedStream()
        assert watch(stream, "tree") is stream
    with pytest.raises(click.UsageError), _watched(9, ""):
        pass
