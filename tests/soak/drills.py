"""A process is killed in the middle of many streams: who goes on, who is told, and when service is back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddtree_client import Client, DDTreeClientError
from ddtree_client.watchdog import Watchdog
from tests.soak.world import World, soaked

STREAMS = 16
EXIT_S = 5.0
PROMPTS = tuple(tuple(b"drill %d" % number) for number in range(4))
_TOKENS = 150
_BUDGETS = (0, 1, 4, 32)  # plain decoding too
_LOOK_S = 0.2
_LIMIT_S = 120.0

Expected = Mapping[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Drill:
    """What came of one kill."""

    killed: str
    finished: int  # streams whose answer is complete and right
    failed: tuple[str, ...]  # errors that streams ended with
    wrong: int  # answers that are not what the target says
    hung: int  # streams that did not end
    recovery_s: float  # from the kill until the process is back and a new request is answered rightly

    @property
    def unaccounted(self) -> int:
        """Streams that ended with neither the right answer nor an error that says to come back."""
        unclear = sum(not error.startswith("UNAVAILABLE") for error in self.failed)
        return unclear + self.wrong + self.hung


@dataclass(frozen=True)
class _Answer:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


def expected_answers(world: World) -> Expected:
    """What the target says to each prompt, by plain decoding."""
    with world.client() as client:
        return {
            prompt: client.generate(
                input_ids=prompt, max_tokens=_TOKENS, ignore_eos=True, draft_mode="off"
            ).token_ids
            for prompt in PROMPTS
        }


def kill_stage(world: World, stage: str, expected: Expected) -> Drill:
    """Kill a stage's process while 16 streams run; a watchdog looks after the server meanwhile."""
    with _watched(world.watchdog()), _streams(world) as reading:
        os.kill(world.stub_of(stage), signal.SIGKILL)
        recovery_s = _wait_for_service(world, stage, expected, time.monotonic())
        hung = wait(reading, timeout=_LIMIT_S).not_done
        return _drill(stage, reading, hung, expected, recovery_s)


def kill_orchestrator(folder: Path, project: Path, expected: Expected) -> Drill:
    """Kill the orchestrator's process; the watchdog ends the server, and whoever runs it starts another."""
    with soaked(folder, project, exit_timeout_s=EXIT_S) as world:
        end = partial(os.kill, world.triton.pid, signal.SIGKILL)
        with _watched(world.watchdog(end)), _streams(world) as reading:
            os.kill(world.stub_of("ddtree"), signal.SIGKILL)
            killed = time.monotonic()
            hung = wait(reading, timeout=_LIMIT_S).not_done
    with soaked(folder, project, exit_timeout_s=EXIT_S) as world:
        recovery_s = _wait_for_service(world, "ddtree", expected, killed)
    return _drill("ddtree", reading, hung, expected, recovery_s)


@contextmanager
def _streams(world: World) -> Iterator[list[Future[_Answer]]]:
    """Streams that have all begun to arrive."""
    everybody_reads = threading.Barrier(STREAMS + 1)
    with ThreadPoolExecutor(STREAMS) as pool:
        reading = [pool.submit(_read, world, number, everybody_reads) for number in range(STREAMS)]
        everybody_reads.wait(timeout=_LIMIT_S)
        yield reading


def _read(world: World, number: int, everybody_reads: threading.Barrier) -> _Answer:
    prompt = PROMPTS[number % len(PROMPTS)]
    tokens: list[int] = []
    with Client(world.triton.grpc_url, timeout_s=_LIMIT_S) as client:
        budget = _BUDGETS[number // len(PROMPTS) % len(_BUDGETS)]
        for chunk in client.stream(input_ids=prompt, max_tokens=_TOKENS, ignore_eos=True, tree_budget=budget):
            if not tokens:
                everybody_reads.wait(timeout=_LIMIT_S)
            tokens += chunk.token_ids
    return _Answer(prompt, tuple(tokens))


def _drill(
    stage: str,
    reading: Sequence[Future[_Answer]],
    hung: set[Future[_Answer]],
    expected: Expected,
    recovery_s: float,
) -> Drill:
    failed, finished, wrong = [], 0, 0
    for each in reading:
        if each in hung:
            continue
        error = each.exception()
        if isinstance(error, DDTreeClientError):
            failed.append(f"{error.code}: {error.message}")
        else:
            answer = each.result()
            is_right = expected[answer.prompt] == answer.tokens
            finished += is_right
            wrong += not is_right
    return Drill(stage, finished, tuple(failed), wrong, len(hung), recovery_s)


def _wait_for_service(world: World, stage: str, expected: Expected, since: float) -> float:
    prompt = PROMPTS[0]
    with world.client() as client:
        while (passed := time.monotonic() - since) < _LIMIT_S:
            try:
                answer = client.generate(input_ids=prompt, max_tokens=4, ignore_eos=True)
                if not world.control().ask_whether_alive(stage, 10.0):
                    assert answer.token_ids == expected[prompt][:4]
                    return time.monotonic() - since
            except (DDTreeClientError, TimeoutError):
                time.sleep(_LOOK_S)
    raise AssertionError(f"no service {passed:.0f} s after {stage} was killed")


@contextmanager
def _watched(dog: Watchdog) -> Iterator[None]:
    """Meanwhile the watchdog looks after its server."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(_LOOK_S):
            list(dog.look())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
