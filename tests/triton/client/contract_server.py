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
from dataclasses import dataclass
from typing import Any

from ddtree_client import Client

COMMAND = [sys.executable, "-c", "from ddtree_client.cli import main; main()"]


def script(*chunks: str, **more: Any) -> str:
    return json.dumps({"chunks": chunks, **more})


LONG = script(*["x"] * 400, delay_s=0.02)
NEVER = script("x", until="/nowhere")  # is answered when its caller has gone
SLOW = script(*["✓✓✓"] * 40, delay_s=0.3)  # json.dumps escapes the marks: a terminal's echo of it has none


def endings(client: Client) -> dict[str, int]:
    """How many requests before this one were begun, and how they ended, as the model saw it."""
    counts: dict[str, int] = json.loads(client.generate('"report"').text)
    return counts


@dataclass(frozen=True)
class Watch:
    """Looks from outside at what the server does for others."""

    client: Client
    before: dict[str, int]

    def wait_for(self, what: str) -> dict[str, int]:
        """Wait until there is one more of these; gives all counts."""
        deadline = time.monotonic() + 30.0
        while (now := endings(self.client))[what] == self.before[what]:
            assert time.monotonic() < deadline, f"none was {what}: {now}"
            time.sleep(0.02)
        return now


@contextmanager
def one_cancelled(client: Client) -> Iterator[Watch]:
    """The server sees exactly one request of the block cancelled, and none fail."""
    watch = Watch(client, endings(client))
    yield watch
    now = watch.wait_for("cancelled")
    assert now["cancelled"] == watch.before["cancelled"] + 1
    assert now["failed"] == watch.before["failed"]


@asynccontextmanager
async def one_cancelled_async(client: Client) -> AsyncIterator[Watch]:
    """Like `one_cancelled`, without stopping the event loop."""
    check = one_cancelled(client)
    yield await asyncio.to_thread(check.__enter__)
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
