"""Thousands of requests of every kind, a look at what the server holds now and then, and the verdict."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from concurrent.futures import TimeoutError as StillRunning
from dataclasses import dataclass

from tests.soak.requests import Outcome, Requests, expected_answers
from tests.soak.world import Memory, World

_WORKERS = 8
_BATCH = 250
_WARM_SHARE = 0.2
# What allocators keep once is no leak: one of 8 KB a request would be 80 MB at the end.
_RESIDENT_SLACK = 48 * 2**20
_SHARED_SLACK = 4 * 2**20
_WAIT_S = 120.0


@dataclass(frozen=True)
class Look:
    """What the server held between two batches, when nothing ran."""

    requests: int
    held: Mapping[str, int]
    memory: Memory


@dataclass(frozen=True)
class Soak:
    """How it went."""

    requests: int
    seconds: float
    ended: Counter[str]
    complaints: tuple[str, ...]
    looks: tuple[Look, ...]

    @property
    def leaks(self) -> tuple[str, ...]:
        """What the server kept or took more and more of."""
        found = [
            f"after {look.requests} requests: {look.held}" for look in self.looks if any(look.held.values())
        ]
        warm = next(look for look in self.looks if look.requests >= _WARM_SHARE * self.requests)
        last = self.looks[-1].memory
        for name, slack in (("resident", _RESIDENT_SLACK), ("shared", _SHARED_SLACK)):
            before, after = getattr(warm.memory, name), getattr(last, name)
            if after > before + slack:
                found.append(f"{name} memory grew from {before} to {after} bytes")
        return tuple(found)


def soak(world: World, requests: int, *, seed: int = 0, on_done: Callable[[int], object] = int) -> Soak:
    """Send requests, 8 at a time; `on_done` is told how many have ended.

    A moderate rate: a storm of cancels kills Triton 2.51 itself (server #7368).
    """
    ended: Counter[str] = Counter()
    complaints: list[str] = []
    looks: list[Look] = []
    started = time.monotonic()
    with world.client() as client:
        sender = Requests(client, expected_answers(client))
        done = 0
        while done < requests:
            batch = [
                random.Random(f"{seed} {number}") for number in range(done, min(done + _BATCH, requests))
            ]
            for outcome in _send(sender, batch):
                ended[f"{outcome.kind.strip('_')}: {outcome.ended}"] += 1
                complaints += [outcome.complaint] if outcome.complaint else []
            done += len(batch)
            looks.append(Look(done, world.held_at_rest(), world.memory()))
            on_done(done)
    return Soak(requests, time.monotonic() - started, ended, tuple(complaints), tuple(looks))


def _send(sender: Requests, batch: list[random.Random]) -> list[Outcome]:
    pool = ThreadPoolExecutor(_WORKERS)
    sent = [pool.submit(sender.one, lot) for lot in batch]
    outcomes: list[Outcome] = []
    try:
        outcomes += [each.result() for each in as_completed(sent, timeout=_WAIT_S)]
    except StillRunning:  # Python 3.10's is another one than the built-in
        hung = sum(not each.done() for each in sent)
        outcomes = [each.result() for each in sent if each.done()]
        outcomes += [Outcome("any", "nothing", "no answer and no error within two minutes")] * hung
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return outcomes
