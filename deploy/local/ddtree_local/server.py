"""Starts a real Triton server from the wheel, waits until it is ready, and stops it without leaving anything.

The process itself is held by `supervisor.py`, so that the server ends even when this process is killed. This
module does not know which models it serves; `serve.py` and `demo.py` choose them.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from ddtree_local import supervisor
from ddtree_local.command import ServerOptions, server_command, server_environment
from ddtree_local.errors import ServerStartError
from ddtree_local.ports import Ports, choose_ports
from ddtree_local.server_log import decisive_line
from ddtree_local.triton_wheel import TritonRuntime, prepare_runtime

SHM_PREFIX = "ddtree_"
"""What every shared-memory file of a local server starts with; the owner's pid follows."""

_POLL_S = 0.1
_SUPERVISOR_SLACK_S = 15.0  # what the supervisor may need beyond the server's own exit timeout
_LOG_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class StopReport:
    """How a server ended."""

    exit_code: int  # of tritonserver; negative: the signal that ended it
    forced: bool  # it had to be killed after its exit timeout
    orphans_killed: int  # stubs that outlived it
    regions_removed: int  # files it left in /dev/shm


_NEVER_STARTED = StopReport(exit_code=0, forced=False, orphans_killed=0, regions_removed=0)
_LOST = StopReport(exit_code=-9, forced=True, orphans_killed=0, regions_removed=0)


class LocalTriton:
    """One tritonserver on this machine, as a context manager.

    Args:
        model_repository: folder of models in Triton's layout.
        load_models: load these only; None loads every model of the repository.
        env: variables for the server and its models, on top of this process's own.
        host: address to listen on; the default is loopback.
        http_port: a free one is picked for None or 0; so for the other two.
        grpc_port: see `http_port`.
        metrics_port: see `http_port`.
        ready_timeout_s: how long loading may take, seconds.
        exit_timeout_s: how long running requests may take at a stop before the server is killed, seconds.
        log_path: where the server's output goes; None keeps it only when the start fails.
        extra_args: further arguments of tritonserver.
    """

    def __init__(
        self,
        model_repository: Path,
        *,
        load_models: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        http_port: int | None = None,
        grpc_port: int | None = None,
        metrics_port: int | None = None,
        ready_timeout_s: float = 300.0,
        exit_timeout_s: float = 30.0,
        log_path: Path | None = None,
        extra_args: Sequence[str] = (),
    ) -> None:
        if not model_repository.is_dir():
            raise ServerStartError(
                f"model repository: {model_repository} is not a folder; give one in Triton's layout"
            )
        self._options = ServerOptions(
            model_repository=model_repository.resolve(),
            load_models=None if load_models is None else tuple(load_models),
            host=host,
            shm_prefix=f"{SHM_PREFIX}{os.getpid()}_{uuid.uuid4().hex[:8]}_",
            exit_timeout_s=exit_timeout_s,
            extra_args=tuple(extra_args),
        )
        self._env = dict(env or {})
        self._asked_ports = (http_port, grpc_port, metrics_port)
        self._ready_timeout_s = ready_timeout_s
        self._wanted_log = log_path.resolve() if log_path else None
        self._supervisor: subprocess.Popen[str] | None = None
        self._ports: Ports | None = None
        self._pid = 0
        self._folder = Path()
        self._end: StopReport | None = None

    @property
    def ports(self) -> Ports:
        """The ports it listens on; known once it was started."""
        assert self._ports is not None, "the server was not started"
        return self._ports

    @property
    def pid(self) -> int:
        """Process id of tritonserver; known once it was started."""
        assert self._pid, "the server was not started"
        return self._pid

    @property
    def shm_prefix(self) -> str:
        """What the names of this server's files in /dev/shm start with."""
        return self._options.shm_prefix

    @property
    def http_url(self) -> str:
        """`host:port` for HTTP clients on this machine."""
        return f"{self._client_host()}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        """`host:port` for gRPC clients on this machine."""
        return f"{self._client_host()}:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        """`host:port` of Triton's metrics."""
        return f"{self._client_host()}:{self.ports.metrics}"

    @property
    def log_path(self) -> Path:
        """The file with the server's output."""
        return self._wanted_log or self._folder / "triton.log"

    def __enter__(self) -> LocalTriton:
        """Start; see `start`."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; see `stop`."""
        self.stop()

    def start(self) -> None:
        """Start the server and wait until every wanted model is ready.

        Raises:
            PortInUseError: a port that was asked for is taken.
            PrerequisiteError: the wheel or something it needs is missing.
            ServerStartError: a model did not load, the server ended, or it was not ready in time.
        """
        assert self._supervisor is None, "the server was already started"
        runtime = prepare_runtime()
        self._ports = choose_ports(self._options.host, *self._asked_ports)
        self._folder = Path(tempfile.mkdtemp(prefix="ddtree-triton-"))
        try:
            self._launch(runtime)
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def wait(self, timeout_s: float) -> bool:
        """Whether the server has ended by itself, waiting for it up to `timeout_s` seconds."""
        if self._end is None:
            self._end = self._read_end(timeout_s)
        return self._end is not None

    def stop(self) -> StopReport:
        """Stop the server and remove what it left; a second call does nothing more.

        Returns:
            How it ended. `exit_code` is 0 after a clean stop.
        """
        held = self._supervisor
        if held is None:
            return self._end or _NEVER_STARTED
        assert held.stdin is not None
        assert held.stdout is not None
        held.stdin.close()
        if self._end is None:
            self._end = self._read_end(self._options.exit_timeout_s + _SUPERVISOR_SLACK_S)
        if self._end is None or self._end == _LOST:
            # The supervisor was killed or stopped: its server dies with it (PR_SET_PDEATHSIG), and the stubs
            # soon notice. Only the shared memory is nobody's work then.
            held.kill()
            self._end = replace(_LOST, regions_removed=supervisor.clear_shared_memory(self.shm_prefix))
        held.wait()
        held.stdout.close()
        self._supervisor = None
        shutil.rmtree(self._folder, ignore_errors=True)
        return self._end

    def _client_host(self) -> str:
        host = self._options.host
        return "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104

    def _launch(self, runtime: TritonRuntime) -> None:
        # A package's source folder in the working directory would shadow the installed copy.
        empty = self._folder / "empty"
        empty.mkdir()
        log = self.log_path
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
        with log.open("ab") as complaints:
            held = subprocess.Popen(
                [sys.executable, "-I", str(Path(supervisor.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
                start_new_session=True,
            )
        self._supervisor = held
        order = {
            "command": server_command(runtime, self._options, self.ports),
            "env": server_environment(runtime, os.environ, self._env, Path(sys.prefix), self.shm_prefix),
            "folder": str(self._folder),
            "empty_folder": str(empty),
            "log": str(log),
            "shm_prefix": self._options.shm_prefix,
            "exit_timeout_s": self._options.exit_timeout_s + 5.0,  # the server's own timeout comes first
        }
        assert held.stdin is not None
        assert held.stdout is not None
        held.stdin.write(json.dumps(order) + "\n")
        held.stdin.flush()
        first = held.stdout.readline()
        if not first:
            raise self._start_error("the supervisor ended")
        self._pid = int(json.loads(first)["pid"])

    def _read_end(self, timeout_s: float) -> StopReport | None:
        held = self._supervisor
        if held is None or held.stdout is None:
            return None
        if not select.select([held.stdout], [], [], timeout_s)[0]:
            return None
        line = held.stdout.readline()
        return StopReport(**json.loads(line)) if line else _LOST

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._ready_timeout_s
        while not self._is_ready():
            if self.wait(_POLL_S):
                raise self._start_error("the server ended while loading")
            if time.monotonic() > deadline:
                raise self._start_error(f"not ready after {self._ready_timeout_s:g} s")

    def _is_ready(self) -> bool:
        paths = [
            "/v2/health/ready",
            *(f"/v2/models/{name}/ready" for name in self._options.load_models or ()),
        ]
        return all(self._answers_ok(path) for path in paths)

    def _answers_ok(self, path: str) -> bool:
        connection = http.client.HTTPConnection(self._client_host(), self.ports.http, timeout=2.0)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _start_error(self, happened: str) -> ServerStartError:
        log = self.log_path
        with log.open("rb") as written:
            written.seek(max(0, log.stat().st_size - _LOG_BYTES))
            cause = decisive_line(written.read().decode(errors="replace"))
        if self._wanted_log is None:
            # The run's folder goes at the stop that follows.
            kept = Path(tempfile.gettempdir()) / f"{self._folder.name}.log"
            shutil.copyfile(log, kept)
            log = kept
        return ServerStartError(f"{cause} ({happened}; log: {log})")
