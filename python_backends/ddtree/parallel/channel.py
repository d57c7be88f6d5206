"""Messages between rank 0 and one worker over a socket pair, each with its length in front.

The socket is the worker's lifeline too: the kernel closes the other end however rank 0 ends. This module
does not know what the messages say.
"""

from __future__ import annotations

import pickle
import socket
import struct
import time

_HEADER = struct.Struct("<Q")
_MOST_AT_ONCE = 1 << 20


class Channel:
    """One end. Sending and receiving may happen on different threads only where neither has a time limit."""

    def __init__(self, end: socket.socket) -> None:
        """Take over a connected stream socket."""
        self._end = end
        self._received = bytearray()

    def send(self, message: object, timeout_s: float | None = None) -> None:
        """Send one message.

        Raises:
            TimeoutError: the other side does not read.
            OSError: the other side is gone.
        """
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._end.settimeout(timeout_s)
        self._end.sendall(_HEADER.pack(len(data)) + data)

    def receive(self, timeout_s: float | None = None) -> object:
        """Wait for one message; one that came in part is kept for the next call.

        Raises:
            TimeoutError: it did not come in time.
            EOFError: the other side is gone.
            OSError: the same, seen by the kernel first.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._fill(_HEADER.size, deadline)
        (size,) = _HEADER.unpack_from(self._received)
        self._fill(_HEADER.size + size, deadline)
        data = bytes(self._received[_HEADER.size : _HEADER.size + size])
        del self._received[: _HEADER.size + size]
        return pickle.loads(data)  # noqa: S301 - of our own process, over a socket nobody else can open

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def _fill(self, size: int, deadline: float | None) -> None:
        while len(self._received) < size:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError("no answer in time")
            self._end.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
            data = self._end.recv(_MOST_AT_ONCE)
            if not data:
                raise EOFError("the other side is gone")
            self._received += data
