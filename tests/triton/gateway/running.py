"""A gateway on a port of its own, in a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from ddtree_gateway import Settings, create_app

_START_S = 60.0
_SOON_S = 30.0

MESSAGES: list[Any] = [{"role": "user", "content": "Name a colour."}]
MODEL = "ddtree"


class Gateway:
    """Where a running gateway is, and what it says of itself."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def gauges(self) -> dict[str, float]:
        """Every series of `/metrics`, by its name and labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def in_flight(self) -> float:
        """Requests under way, by every gauge that counts them; asking is a request itself."""
        values = self.gauges()
        return sum(value for name, value in values.items() if "in_flight" in name) - 1


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until something is so; what follows the last byte of an answer comes a moment after it."""
    deadline = time.monotonic() + _SOON_S
    while not condition():
        assert time.monotonic() < deadline, f"not so within {_SOON_S:g} s"
        time.sleep(0.02)


@contextmanager
def running(settings: Settings) -> Iterator[Gateway]:
    """Run a gateway while the block lasts."""
    config = uvicorn.Config(
        create_app(settings), host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="gateway")
    thread.start()
    try:
        deadline = time.monotonic() + _START_S
        while not server.started:
            assert thread.is_alive(), "the gateway ended while starting"
            assert time.monotonic() < deadline, "the gateway did not start"
            time.sleep(0.01)
        yield Gateway(server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
