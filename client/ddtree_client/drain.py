"""Ends the taking of new requests and waits for those that run, before a server is stopped.

The gate is a file that the server looks for: who may make it there may drain the server, no client can.
Knows the file and two metrics of the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ddtree_client.control import ControlError

RUNNING = ("ddtree_active_requests", "ddtree_queued_requests")
_POLL_S = 1.0
_QUIET_POLLS = 2  # the server publishes its numbers now and then: one zero may be an old one


class Server(Protocol):
    """What is asked of `ddtree_client.control.ServerControl`."""

    def total(self, *names: str) -> float | None:
        """Sum of metrics; None when there is none."""
        ...


@dataclass(frozen=True)
class Drained:
    """How a drain ended."""

    is_empty: bool  # every request has ended
    why: str


def drain(
    server: Server,
    gate: Path | None,
    *,
    settle_s: float,
    timeout_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Drained:
    """Wait until no request is left.

    First some time in which routes and clients learn that this server goes; then the gate is shut, and
    whoever comes all the same is told to go elsewhere. A stop without this would end streams: Triton 24.10
    cuts its own calls between models on SIGTERM.

    Args:
        server: whose requests are waited for.
        gate: the file that shuts the gate; None leaves it open.
        settle_s: before that, seconds.
        timeout_s: for running requests, seconds.
        sleep: waits.

    Raises:
        ControlError: the server's metrics cannot be read, or the gate not be shut.
    """
    sleep(settle_s)
    if gate is not None:
        _shut(gate)
    deadline = time.monotonic() + timeout_s
    quiet = 0
    while True:
        left = server.total(*RUNNING)
        if left is None:
            return Drained(True, f"no metric {' or '.join(RUNNING)}: nothing to wait for")
        quiet = 0 if left else quiet + 1
        if quiet == _QUIET_POLLS:
            return Drained(True, "no request is left")
        if time.monotonic() >= deadline:
            return Drained(False, f"{left:g} requests are left after {timeout_s:g} s")
        sleep(_POLL_S)


def _shut(gate: Path) -> None:
    try:
        gate.touch()
    except OSError as error:
        raise ControlError(
            f"the gate {gate} cannot be shut: {error.strerror}; give the server's DDTREE_DRAIN_FILE"
        ) from None
