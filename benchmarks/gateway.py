"""What the gateway adds to every token: the way of a token through it, against the way without it.

A model tells the time in each token, so a reader knows how long the token was on its way. The same number
of streams is read straight from Triton and through `ddtree-gateway`, each in processes of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.report import write_result
from ddtree_client import AsyncClient
from ddtree_local.server import LocalTriton

_HERE = Path(__file__).resolve().parent
_WARM_UP = 10  # tokens of each stream that do not count: connections are made, caches filled
_NS_PER_MS = 1e6


async def read_directly(address: str, streams: int, tokens: int, interval_ms: float) -> list[float]:
    """Milliseconds that each token was on its way to a gRPC client."""

    async def read(client: AsyncClient) -> list[float]:
        stream = client.stream(str(interval_ms), max_tokens=tokens, temperature=1.0)
        return [_way(chunk.text) async for chunk in stream][_WARM_UP:]

    async with AsyncClient(address) as client:
        return list(chain(*await asyncio.gather(*(read(client) for _ in range(streams)))))


async def read_through(url: str, streams: int, tokens: int, interval_ms: float) -> list[float]:
    """Milliseconds that each token was on its way to an HTTP client, which does as little as it can."""
    place = urlsplit(url)
    body = json.dumps(
        {"model": "ddtree", "prompt": str(interval_ms), "max_tokens": tokens, "stream": True}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body

    async def read() -> list[float]:
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(request)
        ways = [_way(found[1]) async for line in reader if (found := re.search(rb'"text":"(\d+) ', line))]
        writer.close()
        assert len(ways) == tokens, f"{len(ways)} of {tokens} tokens came"
        return ways[_WARM_UP:]

    return list(chain(*await asyncio.gather(*(read() for _ in range(streams)))))


def _way(sent: str | bytes) -> float:
    """Milliseconds since the token was sent."""
    return (time.monotonic_ns() - int(sent)) / _NS_PER_MS


@contextmanager
def gateway(address: str) -> Iterator[tuple[str, int]]:
    """A gateway before one Triton server: its URL and process id."""
    command = [sys.executable, "-c", "from ddtree_gateway.cli import main; main()"]
    with subprocess.Popen(
        [*command, "--triton", address, "--port", "0"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                    yield found[0], process.pid
                    return
            raise RuntimeError("the gateway ended while starting")
        finally:
            process.terminate()


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The middle and the tail, in milliseconds."""
    found = np.percentile(values, (50, 95, 99))
    return {name: round(float(value), 3) for name, value in zip(("p50", "p95", "p99"), found, strict=True)}


def measure(streams: int, tokens: int, interval_ms: float) -> dict[str, Any]:
    """Both ways, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(_HERE / "clock_model", Path(folder) / "ddtree")
        with LocalTriton(Path(folder)) as triton, gateway(triton.grpc_url) as (url, pid):
            asyncio.run(read_through(url, streams, 2 * _WARM_UP, interval_ms))
            direct = asyncio.run(read_directly(triton.grpc_url, streams, tokens, interval_ms))
            before = cpu_seconds(pid)
            through = asyncio.run(read_through(url, streams, tokens, interval_ms))
            used = cpu_seconds(pid) - before
    usual = float(np.median(direct))
    return {
        "streams": streams,
        "tokens_per_stream": tokens,
        "interval_ms": interval_ms,
        "direct_ms": percentiles(direct),
        "through_ms": percentiles(through),
        # Each token's way through the gateway, less the usual way without it.
        "overhead_ms": percentiles([way - usual for way in through]),
        "gateway_cpu_ms_per_token": round(1000 * used / (streams * tokens), 4),
    }


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Milliseconds, one line for each number of streams."""
    table = Table("streams", "direct p50 / p95", "through p50 / p95", "overhead p50 / p95", "CPU ms a token")
    for row in rows:
        ways = (row[name] for name in ("direct_ms", "through_ms", "overhead_ms"))
        cells = [f"{way['p50']:.2f} / {way['p95']:.2f}" for way in ways]
        table.add_row(str(row["streams"]), *cells, f"{row['gateway_cpu_ms_per_token']:.3f}")
    return table


@click.command()
@click.option("--streams", multiple=True, type=click.IntRange(1), default=(1, 16), show_default=True)
@click.option("--tokens", default=300, show_default=True, help="Of each stream.")
@click.option("--interval", default=25.0, show_default=True, help="Milliseconds between a stream's tokens.")
@click.option("--out", type=click.Path(path_type=Path), default=_HERE / "results" / "gateway.json")
def main(streams: tuple[int, ...], tokens: int, interval: float, out: Path) -> None:
    """Measure what the gateway adds to a token's way."""
    machine = describe_machine()
    rows = [measure(count, tokens, interval) for count in streams]
    write_result({"what": "milliseconds a token is on its way", "machine": machine, "rows": rows}, out)
    Console().print(table_of(rows))


if __name__ == "__main__":
    main()
