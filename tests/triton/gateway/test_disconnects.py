"""Callers who leave in crowds: nothing of theirs stays, neither in the gateway nor in the stages."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from tests.triton.gateway.running import Gateway, wait_until
from tests.triton.oracle_server import OracleServer

pytestmark = pytest.mark.triton

STREAMS = 64


async def read_some(client: httpx.AsyncClient, url: str, source: random.Random) -> bool:
    """Read a stream up to a random place, or to its end; gives whether it ended."""
    leave_after_s = source.choice([0.0, source.uniform(0, 0.3), source.uniform(0, 2), None])
    is_streamed = source.random() < 0.8
    body = {
        "model": "ddtree",
        "messages": [{"role": "user", "content": f"{source.random()}"}],
        "max_tokens": source.randrange(1, 200),
        "n": source.choice([1, 1, 2]),
        "stream": is_streamed,
        "seed": 1,
    }

    async def read() -> bool:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            text = "".join([part async for part in answer.aiter_text()])
        return text.endswith("data: [DONE]\n\n") if is_streamed else True

    try:
        return await asyncio.wait_for(read(), leave_after_s)
    except asyncio.TimeoutError:
        return False


async def test_64_streams_with_random_departures_leave_nothing(
    gateway: Gateway, tiny_server: OracleServer
) -> None:
    source = random.Random(3)
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:
        ended = await asyncio.gather(
            *(read_some(client, gateway.url, random.Random(source.random())) for _ in range(STREAMS))
        )
    assert 0 < sum(ended) < STREAMS  # some stayed, some left
    await asyncio.to_thread(nothing_is_left, gateway, tiny_server)


def nothing_is_left(gateway: Gateway, server: OracleServer) -> None:
    wait_until(lambda: gateway.in_flight() == 0)
    server.assert_quiet()
