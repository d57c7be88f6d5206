"""Rank 0's side of the ranks: starts the worker processes, tells them what to do, notices when one is lost.

    starting ──► all joined ──► commands ──► closed (by us: their sockets end, and they with them)
                     │              └──────► lost   (one ended, failed or did not take part in time)
                     └─ one thread uses a group at a time

A lost group stays lost: the workers that are left are ended, and every later call says why. Knows no models.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ddtree.errors import ConfigError, DDTreeError, Unavailable
from ddtree.parallel import ranks
from ddtree.parallel.channel import Channel
from ddtree.parallel.commands import Command, Done, Failed, Join

_LOG = logging.getLogger(__name__)
_LAST_WORDS_S = 2.0  # how long a worker that broke a step may take to say why


@dataclass(frozen=True)
class GroupLimits:
    """Seconds, all of them."""

    start_s: float = 300.0  # a worker's imports
    load_s: float = 3600.0  # loading its share
    step_s: float = 60.0  # a step, and each collective in it
    end_s: float = 5.0  # for a worker to end by itself


@dataclass(frozen=True)
class Worker:
    """One worker process and rank 0's end of its socket."""

    rank: int
    process: subprocess.Popen[bytes]
    channel: Channel


class WorkerGroup:
    """The ranks of this machine, rank 0 included. Not thread-safe."""

    def __init__(self, workers: Sequence[Worker], first: torch.device, limits: GroupLimits) -> None:
        """Take worker processes that were just started."""
        self.workers = tuple(workers)
        self.world = len(self.workers) + 1
        self.device = ranks.device_of(first, 0)
        self.limits = limits
        self.lost = ""  # why, once it is
        self._mesh: DeviceMesh | None = None
        self._finalizer = weakref.finalize(self, _leave, self.workers, limits.end_s)

    @classmethod
    def start(cls, world: int, first: torch.device, limits: GroupLimits | None = None) -> WorkerGroup:
        """Start the workers and join them.

        Args:
            world: ranks, this process included; at least 2.
            first: this process's device; the workers take those that follow it.
            limits: how long things may take.

        Raises:
            ConfigError: there are too few devices, or this process has a process group already.
            Unavailable: a worker does not start.
        """
        _check_free(world, first)
        limits = limits or GroupLimits()
        workers: list[Worker] = []
        try:
            for rank in range(1, world):
                workers.append(start_worker(rank))  # noqa: PERF401 - those that started are ended below
        except BaseException:
            _end(workers, limits.end_s)
            raise
        group = cls(workers, first, limits)
        group._wait(limits.start_s)  # for their imports: from here on all are equally fast
        with group.together():
            group._join(first)
        _LOG.info("%d ranks joined from %s on", world, group.device)
        return group

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of all ranks."""
        assert self._mesh is not None, "the group was joined when it was started"
        return self._mesh

    def tell(self, command: Command) -> None:
        """Send a command to every worker; its failure shows in the next step or `wait`.

        Raises:
            Unavailable: a worker is lost.
        """
        self.check()
        try:
            for worker in self.workers:
                worker.channel.send(command, self.limits.step_s)
        except OSError as error:
            raise self._lose(error) from None

    def wait_loaded(self) -> None:
        """Wait until every worker has answered a command that takes as long as loading.

        Raises:
            Unavailable: a worker failed.
        """
        self._wait(self.limits.load_s)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around what this rank does while the workers do the same.

        Raises:
            Unavailable: it failed because of a worker, or on this rank alone: then the workers, which wait
                for it in a collective, are lost too.
            DDTreeError: this rank's own refusal; the group is closed.
        """
        try:
            yield
        except DDTreeError:
            self.close()
            raise
        except Exception as error:
            raise self._lose(error) from error
        except BaseException as error:
            self._lose(error)  # interrupted in the middle: the ranks no longer hold the same
            raise

    def finish(self, is_done: Callable[[], bool]) -> None:
        """Wait on the host for an accelerator's step, which hangs in a collective if a worker is lost.

        Raises:
            Unavailable: a worker ended, or the step took too long.
        """
        deadline = time.monotonic() + self.limits.step_s
        while not is_done():
            self.check()
            if time.monotonic() > deadline:
                raise self._lose(TimeoutError(f"a step took longer than {self.limits.step_s:g} s"))
            time.sleep(0)

    @property
    def is_whole(self) -> bool:
        """Whether no worker is lost. Any thread may ask: it only looks, and `check` does what follows."""
        return not self.lost and all(worker.process.poll() is None for worker in self.workers)

    def check(self) -> None:
        """Look whether every worker lives.

        Raises:
            Unavailable: one does not.
        """
        if self.lost:
            raise self._unavailable()
        if not self.is_whole:
            raise self._lose(None)

    def close(self) -> None:
        """End the workers and leave the process group."""
        if self._finalizer.detach():
            self.lost = "it was closed"
            _leave(self.workers, self.limits.end_s)

    def _join(self, first: torch.device) -> None:
        store = ranks.open_store(self.world, self.limits.step_s)
        for worker in self.workers:
            device = str(ranks.device_of(first, worker.rank))
            worker.channel.send(
                Join(
                    worker.rank, self.world, store.port, device, self.limits.step_s, torch.get_num_threads()
                ),
                self.limits.step_s,
            )
        self._mesh = ranks.join(
            store, rank=0, world=self.world, device=self.device, timeout_s=self.limits.step_s
        )
        self._wait(self.limits.step_s)

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for worker in self.workers:
            try:
                answer = worker.channel.receive(max(deadline - time.monotonic(), 0.1))
            except (EOFError, OSError) as error:
                raise self._lose(error) from None
            if not isinstance(answer, Done):
                assert isinstance(answer, Failed)
                raise self._lose(RuntimeError(f"worker {worker.rank} failed with {answer.reason}"))

    def _lose(self, error: BaseException | None) -> Unavailable:
        """End what is left, and say what was lost."""
        if not self.lost:
            self.lost = _cause(self.workers, error)
            _LOG.error("the ranks of the target are lost: %s", self.lost)
            self._finalizer.detach()
            for worker in self.workers:
                worker.process.kill()
            _end(self.workers, self.limits.end_s)
            ranks.leave(is_broken=True)
        return self._unavailable()

    def _unavailable(self) -> Unavailable:
        # "is not healthy" is what Triton says of a dead process: the orchestrator and the watchdog know it.
        return Unavailable(
            f"the target, divided among {self.world} processes, is not healthy: {self.lost}; it works again "
            "when this process is loaded again, which a watchdog does"
        )


def _check_free(world: int, first: torch.device) -> None:
    if not dist.is_available() or dist.is_initialized():
        found = "has joined a group already" if dist.is_available() else "has a torch built without it"
        raise ConfigError(
            f"tensor_parallel above 1 needs torch.distributed for itself, got {world} where this process "
            f"{found}; set it to 1 or load one such target per process"
        )
    last = ranks.device_of(first, world - 1)
    if first.type == "cuda" and (last.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel must be at most the GPUs from {first} on, got {world} where there are "
            f"{torch.cuda.device_count()} in all; lower it, or name an earlier device"
        )
    if first.type not in ("cuda", "cpu"):
        raise ConfigError(f"tensor_parallel above 1 needs device cuda or cpu, got {first}; set it to 1")


def start_worker(rank: int) -> Worker:
    """Start a worker process; it ends when the returned channel does, or with this process."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-m", "ddtree.parallel.worker", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # a terminal's Ctrl-C is for rank 0, which ends the others
            env=dict(os.environ),
        )
    return Worker(rank, process, Channel(ours))


def _leave(workers: Sequence[Worker], timeout_s: float) -> None:
    _end(workers, timeout_s)
    ranks.leave()


def _end(workers: Sequence[Worker], timeout_s: float) -> None:
    """Close the sockets, which ends the processes; kill those that have not ended in time, and reap all."""
    deadline = time.monotonic() + timeout_s
    for worker in workers:
        worker.channel.close()
    for worker in workers:
        try:
            worker.process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()


def _cause(workers: Sequence[Worker], error: BaseException | None) -> str:
    """What the workers said or how they ended, else the error on this rank."""
    deadline = time.monotonic() + _LAST_WORDS_S
    while True:
        for worker in workers:
            if (code := worker.process.poll()) is not None:
                how = f"signal {-code}" if code < 0 else f"status {code}"
                return f"worker {worker.rank} ended with {how}{_last_words(worker)}"
        if error is None or isinstance(error, TimeoutError) or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _last_words(worker: Worker) -> str:
    with contextlib.suppress(EOFError, OSError):
        while True:
            answer = worker.channel.receive(0.1)
            if isinstance(answer, Failed):
                return f" ({answer.reason})"
    return ""
