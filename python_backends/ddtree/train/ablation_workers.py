"""Runs arms one after the other, here or in several processes at once.

A process that dies takes the arm that it worked on with it, not the others: another process is started for
what waits. This module knows benches only by their `run`, so it imports nothing that is slow to import.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Protocol

from ddtree.train.ablation_arms import Arm
from ddtree.train.ablation_results import ArmResult

_PATIENCE_SECONDS = 10.0


class Bench(Protocol):
    """Where arms are trained and measured."""

    def run(self, arm: Arm) -> ArmResult:
        """Train and measure one arm."""


MakeBench = Callable[[int], Bench]  # from the number of the process; crosses to it by pickle


@dataclass(frozen=True)
class Outcome:
    """What became of an arm."""

    arm: Arm
    result: ArmResult | None
    error: str = ""  # why there is no result
    trace: str = ""  # where that happened, if it was an exception


def outcomes(arms: Sequence[Arm], make_bench: MakeBench, jobs: int) -> Iterator[Outcome]:
    """Run arms in `jobs` processes, or in this one for a single job; in the order in which they finish."""
    if jobs > 1 and len(arms) > 1:
        yield from _Pool(make_bench).outcomes(arms, jobs)
    elif arms:
        bench = cache(partial(make_bench, 0))
        for arm in arms:
            yield _run(bench, arm)


def _run(bench: Callable[[], Bench], arm: Arm) -> Outcome:
    try:
        return Outcome(arm, bench().run(arm))
    except Exception as error:  # noqa: BLE001 - whatever one arm met, the next one may not
        return Outcome(arm, None, f"{type(error).__name__}: {error}", traceback.format_exc())


@dataclass
class _Worker:
    process: SpawnProcess
    number: int
    arm: Arm


class _Pool:
    """Processes, each with one arm at a time."""

    def __init__(self, make_bench: MakeBench) -> None:
        self._make_bench = make_bench
        self._context = get_context("spawn")  # CUDA does not survive a fork
        self._workers: dict[Connection, _Worker] = {}

    def outcomes(self, arms: Sequence[Arm], jobs: int) -> Iterator[Outcome]:
        """Run arms; processes left over at the end, or when the caller stops, are ended."""
        waiting = deque(arms)
        try:
            for number in range(min(jobs, len(arms))):
                self._start(number, waiting.popleft())
            while self._workers:
                for ready in connection.wait(list(self._workers)):
                    assert isinstance(ready, Connection)
                    outcome = self._receive(ready)
                    worker = self._workers[ready]
                    goes_on = bool(waiting) and worker.process.exitcode is None
                    if goes_on:
                        self._hand_out(ready, waiting.popleft())
                    yield outcome
                    if not goes_on:
                        self._forget(ready)
                        if waiting:
                            self._start(worker.number, waiting.popleft())
        finally:
            for ours in list(self._workers):
                self._workers[ours].process.terminate()
                self._forget(ours)

    def _start(self, number: int, arm: Arm) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_work, args=(theirs, self._make_bench, number), name=f"ablation-{number}"
        )
        process.start()
        theirs.close()  # or its end would never be noticed
        self._workers[ours] = _Worker(process, number, arm)
        self._hand_out(ours, arm)

    def _hand_out(self, ours: Connection, arm: Arm) -> None:
        self._workers[ours].arm = arm
        with suppress(BrokenPipeError, ConnectionResetError):  # who died answers with an end
            ours.send(arm)

    def _receive(self, ours: Connection) -> Outcome:
        worker = self._workers[ours]
        try:
            outcome: Outcome = ours.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join(_PATIENCE_SECONDS)
            return Outcome(worker.arm, None, f"its process ended with code {worker.process.exitcode}")
        return outcome

    def _forget(self, ours: Connection) -> None:
        worker = self._workers.pop(ours)
        ours.close()  # what a worker waits for: no more arms
        worker.process.join(_PATIENCE_SECONDS)
        if worker.process.exitcode is None:
            worker.process.kill()
            worker.process.join()


def _work(theirs: Connection, make_bench: MakeBench, number: int) -> None:
    """Run the arms that come through the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    bench = cache(
        partial(make_bench, number)
    )  # what cannot be made is told, and tried again for the next arm
    while True:
        try:
            arm: Arm = theirs.recv()
        except EOFError:
            return
        theirs.send(_run(bench, arm))


def _end_with_parent() -> None:
    """A killed parent must not leave trainings behind that write where its next run writes."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
