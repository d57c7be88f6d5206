"""A server that many tests share, and that outlives Triton 2.51's own crash under cancelled streams.

The crash (server #7368) comes once in some tens of thousands of cancelled streams, and no model is involved:
the fault is in tritonserver's gRPC frontend, and fixed in the images that the chart takes. A test whose
server ended so is run once more on a new server (see conftest.py), and the run's summary says so; whatever
else ends a server is a failure.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from ddtree_local.server import LocalTriton
from tests.triton.oracle_server import OracleServer

_CRASHED = f"Signal ({signal.SIGSEGV.value}) received."
_FRAME = re.compile(r"^\s*\d+# 0x[0-9A-F]+ in (\S+)$")
_FAULT = 2  # the frame; before it are the handler of the signal and libc's return from it
_FRONTEND = "tritonserver"  # the core, backends and models are libraries


def is_frontend_crash(exit_code: int, log: str) -> bool:
    """Tell whether a server that ended with `exit_code` (negative: a signal) crashed in its gRPC frontend.

    Args:
        exit_code: of tritonserver.
        log: what it wrote; after the signal it writes the stack of the thread that met it.
    """
    if exit_code != -signal.SIGSEGV or _CRASHED not in log:
        return False
    after = log[log.rindex(_CRASHED) :]
    frames = [match[1].rsplit("/", 1)[-1] for line in after.splitlines() if (match := _FRAME.match(line))]
    return len(frames) > _FAULT and frames[_FAULT] == _FRONTEND


@dataclass
class SharedServer(OracleServer):
    """An OracleServer that several tests share, started and stopped as a context manager."""

    make: Callable[..., LocalTriton] = field(kw_only=True)  # takes ports

    def __enter__(self) -> SharedServer:
        self.triton.start()
        shared_servers.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        shared_servers.remove(self)
        self.triton.stop()

    def is_lost(self, patience_s: float = 0.0) -> bool:
        """Whether Triton's own crash has ended the server, or does within a time."""
        if not self.triton.wait(patience_s):
            return False
        report = self.triton.stop()
        return is_frontend_crash(report.exit_code, self.triton.log_path.read_text(errors="replace"))

    def revive(self) -> None:
        """Start a lost server anew, at the same ports: who holds its addresses goes on."""
        if self.is_lost():
            ports, log = self.triton.ports, self.triton.log_path
            log.rename(log.with_suffix(".crashed"))
            self.triton = self.make(http_port=ports.http, grpc_port=ports.grpc, metrics_port=ports.metrics)
            self.triton.start()


shared_servers: list[SharedServer] = []
"""Those that run now."""
