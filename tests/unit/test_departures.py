"""How sequences leave when some of their answer is still deferred: behind it, and never after a gap."""

from __future__ import annotations

from typing import cast

import pytest

from ddtree import events
from ddtree.deferred import DeferredWork
from ddtree.departures import Departures
from ddtree.errors import Unavailable
from ddtree.live import Live
from ddtree.scheduler import Scheduler
from ddtree.sequence import Delta, Stats
from ddtree.stages.base import Stages
from tests.fakes.collecting_sink import CollectingSink
from tests.fakes.lives import make_live


class OnceBroken(CollectingSink):
    """Cannot take one delta, counted from 0, and any other."""

    def __init__(self, broken: int) -> None:
        super().__init__()
        self._left = broken

    def emit(self, delta: Delta, stats: Stats) -> None:
        """Take a delta, but that one."""
        self._left -= 1
        if self._left == -1:
            raise OSError("broken pipe")
        super().emit(delta, stats)


class World:
    """One running sequence."""

    def __init__(self, sink: CollectingSink | None = None) -> None:
        self.deferred = DeferredWork()
        self.sink = sink or CollectingSink()
        self.heard: list[events.Event] = []
        self.scheduler = Scheduler(max_sequences=1, max_waiting=1, prefill_chunk=16)
        stages = cast("Stages", None)  # none is called
        self.departures = Departures(self.scheduler, stages, self.heard.append, self.deferred)
        self.live: Live = make_live(0)
        self.live.sink = self.sink
        self.scheduler.add(self.live)
        self.scheduler.admit()
        self.emit(1, draft_tokens=None)

    def emit(self, token: int, draft_tokens: int | None = 2) -> None:
        """Let a round add a token, or the prompt its first."""
        self.departures.emit(self.live, self.live.sequence.append([token], draft_tokens, ()))

    @property
    def ids(self) -> list[int]:
        """What was given."""
        return self.sink.token_ids


def test_a_round_is_given_later_and_all_in_order() -> None:
    world = World()
    world.emit(2)
    world.emit(3)
    assert world.ids == [1]
    world.deferred.run()
    assert world.ids == [1, 2, 3]
    assert len(world.heard) == 3


@pytest.mark.parametrize("cause", ["failure", "end", "cancel"])
def test_who_leaves_is_given_first_what_was_put_off(cause: str) -> None:
    world = World(CollectingSink(cancel_after=1 if cause == "cancel" else None))
    world.emit(2)
    if cause == "failure":
        world.departures.fail([world.live], Unavailable("no answer"))
    elif cause == "end":
        world.departures.emit(world.live, world.live.sequence.end("deadline"))
    else:
        world.departures.drop_ended()
    assert world.ids == [1, 2]
    assert world.live.done.done()
    assert world.sink.finish_reason == {"failure": "", "end": "deadline", "cancel": "cancelled"}[cause]
    assert not world.scheduler


def test_who_cannot_be_answered_ends_with_the_next_step_and_without_a_gap() -> None:
    world = World(OnceBroken(1))
    world.emit(2)
    world.deferred.run()
    assert world.scheduler  # a call may be under way with it
    world.emit(3)
    world.departures.drop_ended()
    assert world.ids == [1]
    assert not world.scheduler
    with pytest.raises(Unavailable, match="could not be sent: broken pipe"):
        world.live.done.result()
    assert len(world.heard) == 1


def test_an_end_that_cannot_be_given_is_an_error() -> None:
    world = World(OnceBroken(1))
    world.departures.emit(world.live, world.live.sequence.end("deadline"))
    with pytest.raises(Unavailable, match="could not be sent: broken pipe"):
        world.live.done.result()
    assert not world.scheduler
