"""When the watchdog reloads, and when it leaves a model alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from ddtree_client.control import ControlError
from ddtree_client.watchdog import Watchdog, WatchLimits


@dataclass
class Server:
    """Says of each model what the test wants."""

    states: dict[str, str | Exception] = field(default_factory=dict)
    reloaded: list[str] = field(default_factory=list)
    refusals: list[Exception] = field(default_factory=list)
    now: float = 0.0

    def ask_whether_alive(self, model: str, timeout_s: float) -> str:
        del timeout_s
        state = self.states.get(model, "")
        if isinstance(state, Exception):
            raise state
        return state

    def reload(self, model: str, timeout_s: float) -> None:
        del timeout_s
        self.reloaded.append(model)
        if self.refusals:
            raise self.refusals.pop(0)
        self.states[model] = ""

    def clock(self) -> float:
        return self.now


MODELS = ("target_verifier", "drafter")


def dog_of(server: Server, models: Sequence[str] = MODELS, **options: Any) -> Watchdog:
    """A watchdog that has seen everybody alive."""
    states, server.states = server.states, {}
    dog = Watchdog(server, models, **options)
    assert list(dog.look()) == []
    server.states = states
    return dog


DEAD = "Stub process 'drafter_0_0' is not healthy."


def test_who_lives_is_left_alone() -> None:
    server = Server()
    assert list(Watchdog(server, MODELS).look()) == []
    assert server.reloaded == []


def test_the_dead_one_is_reloaded_and_only_that() -> None:
    server = Server({"drafter": DEAD})
    dog = dog_of(server)
    lines = list(dog.look())
    assert server.reloaded == ["drafter"]
    assert lines == [f"drafter does not live ({DEAD}); loading it again", lines[1]]
    assert lines[1].startswith("drafter is back after ")
    assert list(dog.look()) == []


def test_silence_counts_only_three_times_in_a_row() -> None:
    server = Server({"drafter": TimeoutError()})
    dog = dog_of(server, limits=WatchLimits(patience=3))
    for _ in range(2):
        assert list(dog.look()) == []
    server.states["drafter"] = ""
    assert list(dog.look()) == []
    server.states["drafter"] = TimeoutError()
    for _ in range(2):
        assert list(dog.look()) == []
    assert len(list(dog.look())) == 2
    assert server.reloaded == ["drafter"]


def test_a_server_that_is_away_is_nothing_to_reload() -> None:
    server = Server({"drafter": ControlError("connection refused")})
    dog = dog_of(server, limits=WatchLimits(patience=1))
    assert [line for _ in range(5) for line in dog.look()] == []


@pytest.mark.parametrize("refusal", [ControlError("no such thing"), TimeoutError("too long")])
def test_a_refused_reload_is_tried_again_later_and_later(refusal: Exception) -> None:
    server = Server({"drafter": DEAD}, refusals=[refusal] * 2)
    dog = dog_of(server, limits=WatchLimits(rest_s=2.0), clock=server.clock)
    assert "next try in 2 s" in list(dog.look())[1]
    server.now = 1.9
    assert list(dog.look()) == []
    server.now = 2.1
    assert "next try in 4 s" in list(dog.look())[1]
    server.now = 6.2
    assert "drafter is back" in list(dog.look())[1]
    assert len(server.reloaded) == 3


def test_without_its_orchestrator_the_server_is_ended() -> None:
    server, ends = Server({"ddtree": DEAD}), []
    dog = dog_of(server, ("ddtree", "drafter"), end_server=lambda: ends.append("ended"))
    assert list(dog.look()) == [f"ddtree does not live ({DEAD}); ending the server, so that its streams end"]
    assert (ends, server.reloaded) == (["ended"], [])


def test_who_cannot_end_the_server_loads_the_orchestrator_again() -> None:
    server = Server({"ddtree": DEAD})
    assert "ddtree is back" in list(dog_of(server, ("ddtree",)).look())[1]


def test_what_is_still_loading_is_not_loaded_again() -> None:
    server = Server({"drafter": "Request for unknown model: 'drafter' is not ready"})
    dog = Watchdog(server, MODELS, WatchLimits(patience=1))
    assert [line for _ in range(3) for line in dog.look()] == []
    server.states["drafter"] = TimeoutError()
    assert list(dog.look()) == []


def test_who_died_before_the_first_look_is_reloaded_too() -> None:
    server = Server({"drafter": DEAD})
    assert "drafter is back" in list(Watchdog(server, MODELS).look())[1]
