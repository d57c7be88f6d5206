"""Stages that are called directly answer as through Triton, and through Triton where that fails."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddtree.errors import InvalidArgument, Unavailable
from ddtree.stages.direct import DirectCalls
from ddtree.stages.frames import Frame, FrameReader, pack
from ddtree.stages.operations import CallFailed, Operation
from ddtree.stages.patience import StageGone
from ddtree.stages.server import StageServer
from ddtree.wire import Arrays
from tests.fakes.clock import ManualClock

NUMBERS = {"numbers": np.arange(5)}


class Doubler:
    """A stage that doubles numbers; in which thread, and whether alone, is noted."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.under_way = self.most = 0
        self.hold = threading.Event()
        self.entered = threading.Event()
        self.hold.set()

    def load(self) -> dict[str, Operation]:
        self.threads.append(threading.get_ident())
        return {"double": self.double, "refuse": self.refuse, "break": self.broken}

    def double(self, arrays: Mapping[str, Any]) -> Arrays:
        self.threads.append(threading.get_ident())
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.entered.set()
        self.hold.wait(10)
        self.under_way -= 1
        return {"doubled": arrays["numbers"] * 2}

    def refuse(self, _: Mapping[str, Any]) -> Arrays:
        raise InvalidArgument.of("numbers", "must be even", 3, "send another")

    def broken(self, _: Mapping[str, Any]) -> Arrays:
        raise ZeroDivisionError("of no use")


class Triton:
    """The other way to the stage: counted, and out of order when it is said so."""

    def __init__(self, server: StageServer | None) -> None:
        self.server = server
        self.calls: list[str] = []
        self.failure: Exception | None = None

    async def __call__(self, _: str, operation: str, arrays: Arrays) -> Mapping[str, Any]:
        self.calls.append(operation)
        if self.failure is not None:
            raise self.failure
        if self.server is None:
            return {"doubled": arrays["numbers"] * 2}
        try:
            return await asyncio.to_thread(self.server.call, operation, arrays)
        except CallFailed as error:
            raise Unavailable(str(error)) from error


def seconds_of(clock: ManualClock) -> Callable[[], float]:
    return lambda: clock() / 1e9


@pytest.fixture
def stage() -> Doubler:
    return Doubler()


@pytest.fixture
def server(stage: Doubler) -> Iterator[StageServer]:
    served = StageServer("doubler", stage.load)
    yield served
    stage.hold.set()
    served.close()
    assert not served._thread.is_alive()


async def doubled(calls: Any) -> list[int]:
    answer = await calls("doubler", "double", NUMBERS)
    numbers: list[int] = answer["doubled"].tolist()
    return numbers


async def test_a_stage_is_asked_once_where_it_is_and_then_called_directly(server: StageServer) -> None:
    triton = Triton(server)
    calls = DirectCalls(triton)
    for _ in range(3):
        assert await doubled(calls) == [0, 2, 4, 6, 8]
    assert triton.calls == ["channel"]
    answer = await calls("doubler", "double", NUMBERS)
    assert answer["stage_ms"].dtype == np.float32
    calls.close()


async def test_what_a_stage_refuses_is_told_as_through_triton(server: StageServer) -> None:
    calls = DirectCalls(Triton(server))
    with pytest.raises(Unavailable, match=r"stage doubler failed to refuse: .*numbers must be even"):
        await calls("doubler", "refuse", {})
    with pytest.raises(Unavailable, match="stage doubler failed to break: INTERNAL: of no use"):
        await calls("doubler", "break", {})
    with pytest.raises(Unavailable, match=r"no operation or input 'halve'; operations are .*double"):
        await calls("doubler", "halve", {})
    assert await doubled(calls) == [0, 2, 4, 6, 8], "the stage outlives them"
    calls.close()


async def test_everything_happens_in_one_thread_and_one_by_one(stage: Doubler, server: StageServer) -> None:
    triton = Triton(server)
    calls, others = DirectCalls(triton), DirectCalls(triton)
    answers = [
        *(doubled(calls) for _ in range(10)),
        *(doubled(others) for _ in range(10)),
        *(doubled(triton) for _ in range(10)),
    ]
    assert await asyncio.gather(*answers) == [[0, 2, 4, 6, 8]] * 30
    assert stage.most == 1
    assert len(set(stage.threads)) == 1
    assert threading.get_ident() not in stage.threads
    calls.close()
    others.close()


async def test_a_call_that_was_given_up_disturbs_no_later_one(stage: Doubler, server: StageServer) -> None:
    calls = DirectCalls(Triton(server))
    assert await doubled(calls) == [0, 2, 4, 6, 8]
    stage.hold.clear()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(calls("doubler", "double", {"numbers": np.arange(3)}), 0.05)
    later = asyncio.ensure_future(doubled(calls))
    await asyncio.sleep(0.05)
    assert not later.done()
    stage.hold.set()
    assert await later == [0, 2, 4, 6, 8]
    calls.close()


@pytest.mark.parametrize("failure", [Unavailable("no operation 'channel'"), None])
async def test_a_stage_without_a_channel_is_called_through_triton(failure: Exception | None) -> None:
    clock = ManualClock()
    triton = Triton(None)

    async def through(model: str, operation: str, arrays: Arrays) -> Mapping[str, Any]:
        if operation == "channel":
            triton.calls.append(operation)
            if failure is not None:
                raise failure
            return {"info": np.array([b'{"address": "ddtree-nobody-listens"}'], dtype=np.object_)}
        return await triton(model, operation, arrays)

    calls = DirectCalls(through, seconds_of(clock))
    for _ in range(3):
        assert await doubled(calls) == [0, 2, 4, 6, 8]
    assert triton.calls == ["channel", "double", "double", "double"], "asked now and then, not every time"
    clock.advance(6.0)
    await doubled(calls)
    assert triton.calls[-2:] == ["channel", "double"]


async def test_a_stage_that_is_gone_is_asked_nothing_more() -> None:
    triton = Triton(None)
    triton.failure = StageGone("its process ended")
    with pytest.raises(StageGone, match="its process ended"):
        await doubled(DirectCalls(triton))
    assert triton.calls == ["channel"], "asking a dead process costs a second"


async def test_a_stage_that_was_loaded_again_is_called_directly_again(stage: Doubler) -> None:
    clock = ManualClock()
    first = StageServer("doubler", stage.load)
    triton = Triton(first)
    calls = DirectCalls(triton, seconds_of(clock))
    await doubled(calls)
    triton.server = second = StageServer("doubler", stage.load)
    first.close()
    clock.advance(6.0)
    assert await doubled(calls) == [0, 2, 4, 6, 8]
    assert await doubled(calls) == [0, 2, 4, 6, 8]
    assert triton.calls[0] == "channel"
    assert triton.calls.count("channel") == 2
    calls.close()
    second.close()


async def test_the_call_under_way_is_answered_before_a_stage_ends(
    stage: Doubler, server: StageServer
) -> None:
    triton = Triton(server)
    calls = DirectCalls(triton)
    await doubled(calls)
    stage.hold.clear()
    stage.entered.clear()
    under_way = asyncio.ensure_future(doubled(calls))
    await asyncio.to_thread(stage.entered.wait, 10)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(server.close)
        await asyncio.sleep(0.05)
        assert not closing.done()
        stage.hold.set()
        assert await under_way == [0, 2, 4, 6, 8]
        closing.result(10)
    assert triton.calls == ["channel"]
    calls.close()


def _serve(pipe: Connection) -> None:
    def hang(_: Mapping[str, Any]) -> Arrays:
        pipe.send("hangs")
        signal.pause()
        return {}

    server = StageServer("doubler", lambda: {"double": lambda a: {"doubled": a["numbers"] * 2}, "hang": hang})
    pipe.send(server.call("channel", {})["info"])
    signal.pause()


async def test_a_killed_process_hands_its_calls_to_triton() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,))
    process.start()
    try:
        info = await asyncio.to_thread(ours.recv)
        heard: list[str] = []

        async def through(_: str, operation: str, __: Arrays) -> Mapping[str, Any]:
            heard.append(operation)
            if operation == "channel":
                return {"info": info}
            raise StageGone("its process is dead")

        calls = DirectCalls(through)
        assert await doubled(calls) == [0, 2, 4, 6, 8]
        hanging = asyncio.ensure_future(calls("doubler", "hang", {}))
        assert await asyncio.to_thread(ours.recv) == "hangs"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(StageGone, match="its process is dead"):
            await asyncio.wait_for(hanging, 10)
        assert heard == ["channel", "hang"]
    finally:
        process.kill()
        process.join()


def connect(server: StageServer) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect(f"\0{server._address}")
    return connection


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", pack(Frame(1, NUMBERS, "double"))[:20]])
def test_a_caller_that_talks_nonsense_or_leaves_harms_nobody(server: StageServer, said: bytes) -> None:
    with connect(server) as odd:
        odd.sendall(said)
        if said.startswith(b"GET"):
            assert odd.recv(10) == b"", "it is hung up on"
    assert server.call("double", NUMBERS)["doubled"].tolist() == [0, 2, 4, 6, 8]


def test_a_caller_that_takes_no_answer_holds_nobody_up_for_long(
    server: StageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddtree.stages.server._SEND_S", 0.1)
    big = {"numbers": np.zeros(1 << 20)}  # more than a socket holds
    with connect(server) as deaf:
        deaf.sendall(pack(Frame(1, big, "double")))
        assert server.call("double", NUMBERS)["doubled"].tolist() == [0, 2, 4, 6, 8]


def test_large_arrays_cross_whole(server: StageServer) -> None:
    numbers = np.arange(3_000_000)
    with connect(server) as caller:
        sending = threading.Thread(
            target=caller.sendall, args=(pack(Frame(7, {"numbers": numbers}, "double")),)
        )
        sending.start()
        reader, frames = FrameReader(), list[Frame]()
        while not frames:
            frames = reader.feed(caller.recv(1 << 20))
        sending.join()
    assert frames[0].number == 7
    assert np.array_equal(frames[0].arrays["doubled"], numbers * 2)


def _connect_as_nobody(address: str, pipe: Connection) -> None:
    os.setuid(65534)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(f"\0{address}")
        try:
            connection.sendall(pack(Frame(1, NUMBERS, "double")))
            pipe.send(connection.recv(10))
        except OSError as error:
            pipe.send(error.__class__.__name__)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(stage: Doubler, server: StageServer) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_connect_as_nobody, args=(server._address, theirs))
    process.start()
    assert ours.poll(30)
    assert ours.recv() in (b"", "BrokenPipeError", "ConnectionResetError")
    process.join()
    assert len(stage.threads) == 1, "nothing was called"


def test_a_load_that_fails_is_told_and_leaves_no_thread() -> None:
    def fail() -> dict[str, Operation]:
        raise InvalidArgument.of("target", "must be there", "nothing", "name another")

    before = threading.active_count()
    with pytest.raises(InvalidArgument, match="target must be there"):
        StageServer("doubler", fail)
    assert threading.active_count() == before


def test_ends_leave_no_socket_behind(stage: Doubler) -> None:
    gc.collect()
    before = set(Path("/proc/self/fd").iterdir())
    for _ in range(3):
        server = StageServer("doubler", stage.load)
        caller = connect(server)
        server.close()
        assert caller.recv(10) == b""
        caller.close()
    assert set(Path("/proc/self/fd").iterdir()) <= before
