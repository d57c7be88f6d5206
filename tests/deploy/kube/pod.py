"""The serving container of a rendering, run on this machine: the chart's script, arguments and environment.

What a node would do is done by hand: paths of the image and of mounts are led to folders of the test, ports
to free ones, and `tritonserver` on PATH to the server from the wheel. Runs no Kubernetes and no container.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ddtree_local import supervisor
from ddtree_local.ports import Ports, choose_ports
from ddtree_local.server import SHM_PREFIX
from ddtree_local.triton_wheel import prepare_runtime
from tests.deploy.kube.helm import CHART, Manifest, environment

_READY_S = 120.0
_EXIT_S = 40.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Places:
    """Where on this machine what the pod sees lies."""

    folder: Path
    image: Path  # what the image's COPY instructions make
    target: Path
    draft: Path
    certificates: Path
    admin_key: Path
    shm_prefix: str

    @property
    def drain_file(self) -> Path:
        """What shuts the gate."""
        return self.folder / "drain"

    def localized(self, text: str) -> str:
        """A string of the manifest with this machine's places."""
        for inside, here in (
            ("=/models-in-process", f"={self.image / 'models-in-process'}"),
            ("=/models", f"={self.image / 'models'}"),
            ("/etc/ddtree-tls", str(self.certificates)),
            ("/tmp/ddtree-drain", str(self.drain_file)),
            ("/etc/ddtree-admin/key", str(self.admin_key)),
            # Another prefix too: the script removes what begins with it.
            ("ddtree_server_", self.shm_prefix),
        ):
            text = text.replace(inside, here)
        return text


@dataclass
class Pod:
    """A server that runs as the chart says."""

    ports: Ports
    pid: int
    log: Path
    held: subprocess.Popen[str]
    drain_file: Path

    def drain(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run the chart's preStop, `["ddtree", "drain", …]`."""
        binary = Path(sys.executable).parent / command[0]
        return subprocess.run(
            [str(binary), *command[1:], f"--metrics=127.0.0.1:{self.ports.metrics}"],
            env={**os.environ, "DDTREE_DRAIN_FILE": str(self.drain_file)},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    def probe(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a probe of the chart, such as `["python3", "/etc/ddtree/probe.py", "ready", "ddtree"]`."""
        script, *arguments = command[1:]
        places = [
            f"--http=http://127.0.0.1:{self.ports.http}",
            f"--metrics=http://127.0.0.1:{self.ports.metrics}",
        ]
        return subprocess.run(
            [sys.executable, str(CHART / "files" / Path(script).name), *places, *arguments],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    def is_listening(self) -> bool:
        """Whether the server says that it is ready."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports.http}/v2/health/ready", timeout=2):
                return True
        except OSError:
            return False

    def terminate(self) -> Mapping[str, int]:
        """Send SIGTERM, as the kubelet does after the drain; says how the server ended."""
        assert self.held.stdin is not None
        assert self.held.stdout is not None
        if not self.held.stdin.closed:
            self.held.stdin.close()
        assert select.select([self.held.stdout], [], [], _EXIT_S)[0], "the server did not end"
        end: Mapping[str, int] = json.loads(self.held.stdout.readline())
        return end


@contextmanager
def running(container: Manifest, places: Places, overrides: Mapping[str, str]) -> Iterator[Pod]:
    """Run a serving container until it is ready; it is stopped, with all it left, when the block ends.

    Args:
        container: of the rendering.
        places: where its files are.
        overrides: variables instead of the chart's: what a small model on a CPU needs.
    """
    ports = choose_ports("127.0.0.1", None, None, None)
    log = places.folder / "triton.log"
    empty = places.folder / "empty"
    empty.mkdir()
    order = {
        "command": _command(container, places, ports),
        "env": _environment(container, places, ports, overrides),
        "folder": str(places.folder / "run"),
        "empty_folder": str(empty),
        "log": str(log),
        "shm_prefix": places.shm_prefix,
        "exit_timeout_s": _EXIT_S - 5,
    }
    held = subprocess.Popen(
        [sys.executable, "-I", supervisor.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with held:
        assert held.stdin is not None
        assert held.stdout is not None
        try:
            held.stdin.write(json.dumps(order) + "\n")
            held.stdin.flush()
            pod = Pod(ports, int(json.loads(held.stdout.readline())["pid"]), log, held, places.drain_file)
            deadline = time.monotonic() + _READY_S
            while not pod.is_listening():
                is_over = bool(select.select([held.stdout], [], [], _POLL_S)[0])
                assert not is_over, f"the server ended: {log.read_text()[-3000:]}"
                assert time.monotonic() < deadline, f"not ready in time: {log.read_text()[-3000:]}"
            yield pod
        finally:
            held.stdin.close()
            held.wait(timeout=_EXIT_S + 10)


def _command(container: Manifest, places: Places, ports: Ports) -> list[str]:
    shell, script = container["command"]
    started = places.folder / "start.sh"
    started.write_text(places.localized((CHART / "files" / Path(script).name).read_text()))
    arguments = [places.localized(argument) for argument in container["args"]]
    for inside, here in ((8000, ports.http), (8001, ports.grpc), (8002, ports.metrics)):
        arguments = [argument.replace(f"-port={inside}", f"-port={here}") for argument in arguments]
    listening = [f"--{name}-address=127.0.0.1" for name in ("grpc", "metrics")]
    return [shell, str(started), *arguments, *listening]


def _environment(
    container: Manifest, places: Places, ports: Ports, overrides: Mapping[str, str]
) -> dict[str, str]:
    runtime = prepare_runtime()
    binaries = places.folder / "bin"
    binaries.mkdir()
    libraries = ":".join(map(str, runtime.library_path))
    launcher = binaries / "tritonserver"
    launcher.write_text(
        f'#!/bin/sh\nLD_LIBRARY_PATH="{libraries}" exec "{runtime.server}" "$@" '
        f'--backend-directory="{runtime.backends}"\n'
    )
    launcher.chmod(0o755)
    home = places.folder / "home"
    home.mkdir()
    return {
        **environment(container),
        "DDTREE_DRAIN_FILE": str(places.drain_file),
        "DDTREE_WATCHED_HTTP": f"127.0.0.1:{ports.http}",
        "DDTREE_TARGET": str(places.target),
        "DDTREE_DRAFT": str(places.draft),
        "HOME": str(home),
        "PATH": os.pathsep.join([str(binaries), str(Path(sys.prefix) / "bin"), "/usr/bin", "/bin"]),
        **overrides,
    }


def free_shm_prefix() -> str:
    """A prefix that the check for leftovers at the end of the tests looks for."""
    return f"{SHM_PREFIX}{os.getpid()}_{time.monotonic_ns():x}_"
