"""One thread that has a stage: it loads it and answers its calls one by one, Triton's and direct ones.

Direct calls come over a socket without a file, for whose name Triton is asked (operation `channel`); who
connects must run as the same user. Everything happens in one thread, since PyTorch's
threads on a CPU sleep between operations once two threads have asked for them, which takes a third longer.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final

from ddtree.stages.frames import BrokenFrame, Frame, FrameReader, pack
from ddtree.stages.operations import CallFailed, Operation, perform, told
from ddtree.wire import Arrays

_LOG = logging.getLogger(__name__)
_RECEIVED_BYTES: Final = 1 << 20  # at once
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid of who connected
_SEND_S: Final = 5.0  # a caller that takes no answer for so long is lost
_END_S: Final = 5.0
_PAUSE_S: Final = 0.1
# In words that callers and watchdogs know from Triton: the stage must be loaded again.
_ENDED: Final = "INTERNAL: the stage is not healthy, its thread has ended; its log says why"


def is_same_user(connection: Any) -> bool:
    """Whether the process at the other end of a local socket runs as this process's user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return bool(uid == os.geteuid())


class _Order:
    """What another thread wants done, and what becomes of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.done: Future[Any] = Future()

    def run(self) -> None:
        """Do it."""
        try:
            self.done.set_result(self._work())
        except BaseException as error:  # noqa: BLE001 - it is the other thread's
            self.done.set_exception(error)


class StageServer:
    """A stage in a thread of its own.

    Args:
        name: the stage's; for the thread and logs.
        load: loads it and gives its operations by name; what it raises is raised here.
    """

    def __init__(self, name: str, load: Callable[[], dict[str, Operation]]) -> None:
        self._name = name
        self._selector = selectors.DefaultSelector()
        self._guard = threading.Lock()  # of the orders and whether any are taken
        self._orders: deque[_Order] = deque()  # of other threads
        self._bell, self._ring = socket.socketpair()
        self._is_open = True  # until its thread ends
        self._operations: dict[str, Operation] = {}
        self._calls = 0  # answered over the socket
        self._address = f"ddtree-{secrets.token_hex(16)}"
        # A daemon: a call that hangs must not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"ddtree-{name}", daemon=True)
        self._thread.start()
        try:
            self._operations = self._in_thread(load)
            self._operations["channel"] = lambda _: told({"address": self._address, "calls": self._calls})
            self._in_thread(self._listen)
        except BaseException:
            self.close()
            raise

    def call(self, operation: str, arrays: Arrays) -> Arrays:
        """Run an operation for another thread.

        Raises:
            CallFailed: see `perform`; or the stage has ended.
        """
        outputs: Arrays = self._in_thread(partial(perform, self._operations, operation, arrays))
        return outputs

    def close(self) -> None:
        """Answer no more calls; the one under way ends first, for which it waits some seconds."""
        with suppress(CallFailed):
            self._order(self._stop)
        self._thread.join(_END_S)

    def _in_thread(self, work: Callable[[], Any]) -> Any:
        return self._order(work).result()

    def _order(self, work: Callable[[], Any]) -> Future[Any]:
        """Have the thread do it."""
        order = _Order(work)
        with self._guard:
            if not self._is_open:
                raise CallFailed(_ENDED)
            self._orders.append(order)
            self._ring.send(b"\0")
        return order.done

    # From here on: by the stage's thread.

    def _run(self) -> None:
        self._selector.register(self._bell, selectors.EVENT_READ, self._take_orders)
        try:
            while self._is_open:
                for key, _ in self._selector.select():
                    self._handle(key.data)
        finally:  # an operation may end its thread: nobody is to wait for it
            with self._guard:
                self._is_open = False
            for order in self._orders:
                order.done.set_exception(CallFailed(_ENDED))
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()
            self._ring.close()

    def _handle(self, event: Callable[[], None]) -> None:
        try:
            event()
        except Exception:  # noqa: BLE001 - of one caller; without this thread there is no stage
            _LOG.exception("%s cannot take a call", self._name)
            time.sleep(_PAUSE_S)  # where there are no descriptors left, it would be tried again at once

    def _stop(self) -> None:
        self._is_open = False

    def _take_orders(self) -> None:
        for _ in self._bell.recv(_RECEIVED_BYTES):
            self._orders.popleft().run()

    def _listen(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{self._address}")  # the leading zero: no file
        listener.listen()
        self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))

    def _accept(self, listener: socket.socket) -> None:
        caller, _ = listener.accept()
        if not is_same_user(caller):
            _LOG.warning("a process of another user wanted to call %s, and was refused", self._name)
            caller.close()
            return
        caller.settimeout(_SEND_S)
        self._selector.register(caller, selectors.EVENT_READ, partial(self._answer, caller, FrameReader()))

    def _answer(self, caller: socket.socket, reader: FrameReader) -> None:
        """Take what a caller sent; answer the calls that are whole with it."""
        try:
            piece = caller.recv(_RECEIVED_BYTES)
            for call in reader.feed(piece):
                caller.sendall(pack(self._answered(call)))
        except (OSError, BrokenFrame) as error:
            _LOG.warning("a caller of %s is lost: %s", self._name, error)
            piece = b""
        except Exception:  # noqa: BLE001 - an answer that cannot be packed, for one
            _LOG.exception("a caller of %s is lost", self._name)
            piece = b""
        if not piece:
            self._selector.unregister(caller)
            caller.close()

    def _answered(self, call: Frame) -> Frame:
        self._calls += 1
        try:
            return Frame(call.number, perform(self._operations, call.operation, call.arrays))
        except CallFailed as error:
            return Frame(call.number, {}, error=str(error) or "failed")
