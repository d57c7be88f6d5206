"""A worker process: does to its share of the target what rank 0 tells it, and ends when rank 0 does.

Run as `python -m ddtree.parallel.worker FD`, with the number of the inherited socket. A thread reads it from
the first moment on, so that the end of rank 0 is noticed also while torch is imported, weights are loaded or
a collective waits for somebody who will never come. Knows no sessions.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from typing import Any

from ddtree.parallel.channel import Channel


def _read(channel: Channel, commands: queue.SimpleQueue[Any]) -> None:
    while True:
        try:
            commands.put(channel.receive())
        except (EOFError, OSError):
            os._exit(0)  # rank 0 is gone: nobody is left to tell


def main() -> None:
    """Carry out commands until the socket is closed or one of them fails."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, commands), daemon=True).start()
    from ddtree.parallel.commands import ANSWERED, Done, Failed
    from ddtree.parallel.rank import Rank

    rank = Rank()
    channel.send(Done())
    while True:
        command = commands.get()
        try:
            rank.run(command)
        except Exception as error:  # noqa: BLE001 - whatever it was, the ranks no longer hold the same
            reason = " ".join(str(error).split())[:400]
            channel.send(Failed(f"{type(error).__name__}: {reason}"))
            os._exit(1)  # at once: the others wait in a collective until this process's sockets close
        if isinstance(command, ANSWERED):
            channel.send(Done())


if __name__ == "__main__":
    main()
