"""When a drain ends, and that it shuts the gate only after the settling."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ddtree_client import drain as module
from ddtree_client.control import ControlError
from ddtree_client.drain import Drained, drain


@dataclass
class Gauges:
    """What the server's metrics say, look by look; the last one stays."""

    script: list[float | None]
    looks: int = 0
    asked: set[tuple[str, ...]] = field(default_factory=set)

    def total(self, *names: str) -> float | None:
        self.asked.add(names)
        value = self.script[min(self.looks, len(self.script) - 1)]
        self.looks += 1
        return value


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.001)


def test_two_quiet_looks_end_it() -> None:
    gauges = Gauges([3, 0, 1, 0, 0, 0])
    assert drain(gauges, None, settle_s=0, timeout_s=5) == Drained(True, "no request is left")
    assert gauges.looks == 5
    assert gauges.asked == {("ddtree_active_requests", "ddtree_queued_requests")}


def test_the_gate_is_shut_after_the_settling_and_stays_shut(tmp_path: Path) -> None:
    gate = tmp_path / "drain"
    slept: list[tuple[float, bool]] = []

    def sleep(seconds: float) -> None:
        slept.append((seconds, gate.exists()))
        time.sleep(0.001)

    drained = drain(Gauges([3]), gate, settle_s=7, timeout_s=0.05, sleep=sleep)
    assert drained == Drained(False, "3 requests are left after 0.05 s")
    assert slept[0] == (7, False)
    assert all(is_shut for _, is_shut in slept[1:])
    assert gate.exists()


def test_a_server_without_our_gauges_is_not_waited_for() -> None:
    assert drain(Gauges([None]), None, settle_s=0, timeout_s=5).is_empty


def test_a_gate_that_cannot_be_shut_says_which(tmp_path: Path) -> None:
    gate = tmp_path / "nowhere" / "drain"
    with pytest.raises(ControlError, match="nowhere/drain cannot be shut: No such file"):
        drain(Gauges([0]), gate, settle_s=0, timeout_s=5)
