"""One thread has a stage; callers that talk nonsense, are deaf, leave or are others' harm nobody."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddtree.errors import InvalidArgument
from ddtree.stages.frames import Frame, FrameReader, pack
from ddtree.stages.operations import CallFailed, Operation
from ddtree.stages.server import StageServer
from ddtree.wire import Arrays
from tests.fakes.doubler import NUMBERS, Doubler


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
    began = time.monotonic()
    big = {"numbers": np.zeros(1 << 20)}  # more than a socket holds
    with connect(server) as deaf:
        deaf.sendall(pack(Frame(1, big, "double")))
        assert server.call("double", NUMBERS)["doubled"].tolist() == [0, 2, 4, 6, 8]
    assert time.monotonic() - began < 4, "not for as long as it is by default"


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

    with pytest.raises(InvalidArgument, match="target must be there"):
        StageServer("fails", fail)
    assert "ddtree-fails" not in {thread.name for thread in threading.enumerate()}


def test_an_answer_that_cannot_be_sent_costs_its_caller_and_not_the_stage() -> None:
    odd = {"odd": lambda _: {"a": object()}, "even": lambda _: {"a": np.arange(2)}}
    server = StageServer("odd", lambda: odd)  # type: ignore[arg-type, return-value]
    with connect(server) as caller:
        caller.sendall(pack(Frame(1, {}, "odd")))
        assert caller.recv(10) == b""
    assert server.call("even", {})["a"].tolist() == [0, 1]
    server.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_operation_that_ends_its_thread_leaves_nobody_waiting() -> None:
    def leave(_: Mapping[str, Any]) -> Arrays:
        raise SystemExit(3)

    server = StageServer("leaves", lambda: {"leave": leave})
    with connect(server) as caller:
        caller.sendall(pack(Frame(1, {}, "leave")))
        assert caller.recv(10) == b""
    server._thread.join(10)
    with pytest.raises(CallFailed, match="the stage is not healthy, its thread has ended"):
        server.call("leave", {})
    server.close()


def test_calls_that_meet_the_end_are_answered_or_told() -> None:
    for _ in range(200):
        server = StageServer("doubler", Doubler().load)
        ending = threading.Thread(target=server.close)
        ending.start()
        with suppress(CallFailed):
            assert server.call("double", NUMBERS)["doubled"].tolist() == [0, 2, 4, 6, 8]
        ending.join(10)
        assert not ending.is_alive()


def test_a_frame_may_come_byte_by_byte(server: StageServer) -> None:
    with connect(server) as slow:
        for byte in pack(Frame(3, NUMBERS, "double")):
            slow.send(bytes([byte]))
        (frame,) = FrameReader().feed(slow.recv(1 << 20))
    assert frame.arrays["doubled"].tolist() == [0, 2, 4, 6, 8]


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
