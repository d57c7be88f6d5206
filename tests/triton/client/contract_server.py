"""Ways to ask a real tritonserver whose model follows a script (see tests/fakes/contract_model)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from ddtree_client import Client

COMMAND = [sys.executable, "-c", "from ddtree_client.cli import main; main()"]


def script(*chunks: str, **more: Any) -> str:
    return json.dumps({"chunks": chunks, **more})


LONG = script(*["x"] * 400, delay_s=0.02)
SLOW = script(*["✓✓✓"] * 8, delay_s=0.3)  # json.dumps escapes the marks: a terminal's echo of it has none


def endings(client: Client) -> dict[str, int]:
    """How the requests before this one ended, as the model saw it."""
    counts: dict[str, int] = json.loads(client.generate('"report"').text)
    return counts


@contextmanager
def one_cancelled(client: Client) -> Iterator[None]:
    """The server sees exactly one request of the block cancelled, and none fail."""
    before = endings(client)
    yield
    deadline = time.monotonic() + 5.0
    while (now := endings(client))["cancelled"] == before["cancelled"] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert now["cancelled"] == before["cancelled"] + 1
    assert now["failed"] == before["failed"]


@asynccontextmanager
async def one_cancelled_async(client: Client) -> AsyncIterator[None]:
    """Like `one_cancelled`, without stopping the event loop."""
    check = one_cancelled(client)
    await asyncio.to_thread(check.__enter__)
    yield
    await asyncio.to_thread(check.__exit__, None, None, None)


def run_command(address: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        env={**os.environ, "DDTREE_URL": address},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
