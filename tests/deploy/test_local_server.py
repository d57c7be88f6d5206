"""The launcher against the real server: it starts, says why not, and leaves nothing, however it ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddtree_local.errors import PortInUseError, ServerStartError
from ddtree_local.server import LocalTriton
from tests.conftest import Leftovers, StartTriton

pytestmark = pytest.mark.triton

CONFIG = """
backend: "python"
input [{name: "ASKED" data_type: TYPE_STRING dims: [1]}]
output [{name: "ANSWER" data_type: TYPE_STRING dims: [1]}]
instance_group [{kind: KIND_CPU count: 1}]
"""

MODEL = """
import json, os, sys, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        time.sleep(float(os.environ.get("LOAD_S", "0")))
        if os.environ.get("REFUSE") == args["model_name"]:
            raise ValueError('target: "/no/such" does not exist; set DDTREE_TARGET')

    def execute(self, requests):
        time.sleep(float(os.environ.get("ANSWER_S", "0")))
        facts = {"prefix": sys.prefix, "folder": os.listdir(os.getcwd()), "env": dict(os.environ)}
        answer = np.array([json.dumps(facts)], dtype=object)
        tensor = pb_utils.Tensor("ANSWER", answer)
        return [pb_utils.InferenceResponse([tensor]) for _ in requests]
"""

OWNER = """
import sys, time
from pathlib import Path
from ddtree_local.server import LocalTriton
with LocalTriton(Path(sys.argv[1])) as server:
    print(server.shm_prefix, server.pid, flush=True)
    time.sleep(300)
"""

LeftBehind = Callable[[str], Leftovers]


@dataclass(frozen=True)
class Owner:
    """A process of its own that holds a server."""

    process: subprocess.Popen[str]
    shm_prefix: str
    server_pid: int


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        version = tmp_path / "models" / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(MODEL)
        (version.parent / "config.pbtxt").write_text(CONFIG)
    return tmp_path / "models"


@contextmanager
def owner_of(repository: Path) -> Iterator[Owner]:
    command = [sys.executable, "-c", OWNER, str(repository)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            shm_prefix, pid = process.stdout.readline().split()
            yield Owner(process, shm_prefix, int(pid))
        finally:
            process.kill()


def post(server: LocalTriton, model: str, timeout_s: float = 30.0) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(server.http_url, timeout=timeout_s)
    asked = {"inputs": [{"name": "ASKED", "datatype": "BYTES", "shape": [1], "data": ["?"]}]}
    connection.request("POST", f"/v2/models/{model}/infer", json.dumps(asked))
    return connection


def ask(server: LocalTriton, model: str) -> dict[str, Any]:
    connection = post(server, model)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    facts: dict[str, Any] = json.loads(answer["outputs"][0]["data"][0])
    return facts


def status(server: LocalTriton, path: str) -> int:
    connection = http.client.HTTPConnection(server.http_url, timeout=5.0)
    connection.request("GET", path)
    code = connection.getresponse().status
    connection.close()
    return code


def wait_for_nothing(left_behind: LeftBehind, shm_prefix: str, timeout_s: float = 30.0) -> Leftovers:
    deadline = time.monotonic() + timeout_s
    while not (left := left_behind(shm_prefix)).nothing and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def test_it_starts_answers_and_stops(repository: Path, left_behind: LeftBehind, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "server.log"
    server = LocalTriton(repository, env={"DDTREE_TARGET": "/some/where"}, log_path=log)
    server.start()
    facts = ask(server, "one")
    assert facts["prefix"] == sys.prefix
    assert facts["folder"] == []
    assert facts["env"]["DDTREE_TARGET"] == "/some/where"
    assert facts["env"]["GOMP_SPINCOUNT"] == "10000"
    assert "glibc.malloc.hugetlb=1" in facts["env"]["GLIBC_TUNABLES"].split(":")
    assert "PYTHONPATH" not in facts["env"]
    running = left_behind(server.shm_prefix)
    assert server.pid in running.processes
    assert len(running.processes) == 3  # the server and a stub for each model
    assert len(running.regions) == 2
    assert not server.wait(0.0)
    report = server.stop()
    assert (report.exit_code, report.forced, report.orphans_killed, report.regions_removed) == (
        0,
        False,
        0,
        0,
    )
    assert left_behind(server.shm_prefix).nothing
    assert "Started HTTPService at 127.0.0.1" in log.read_text()
    assert server.stop() == report


def test_only_the_models_asked_for_are_loaded(repository: Path, start_triton: StartTriton) -> None:
    server = start_triton(repository, load_models=["two"])
    assert status(server, "/v2/models/two/ready") == 200
    assert status(server, "/v2/models/one/ready") == 400


def test_a_model_that_does_not_load_is_one_line(repository: Path, left_behind: LeftBehind) -> None:
    server = LocalTriton(repository, env={"REFUSE": "two"})
    with pytest.raises(ServerStartError) as raised:
        server.start()
    message = str(raised.value)
    expected = (
        "model 'two' did not load: ValueError: target: \"/no/such\" does not exist; set DDTREE_TARGET ("
    )
    assert message.startswith(expected)
    assert "\n" not in message
    log = Path(message.rpartition("log: ")[2].rstrip(")"))
    assert "failed to load 'two'" in log.read_text()
    log.unlink()
    assert left_behind(server.shm_prefix).nothing


def test_a_broken_configuration_is_one_line(repository: Path, tmp_path: Path) -> None:
    (repository / "one" / "config.pbtxt").write_text("backend: [")
    with pytest.raises(ServerStartError, match=r"^model 'one' did not load: .*config\.pbtxt"):
        LocalTriton(repository, log_path=tmp_path / "log").start()


def test_a_missing_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match="nowhere is not a folder"):
        LocalTriton(tmp_path / "nowhere")


def test_a_port_in_use_is_refused(
    repository: Path, start_triton: StartTriton, left_behind: LeftBehind
) -> None:
    first = start_triton(repository, load_models=["one"])
    second = LocalTriton(repository, grpc_port=first.ports.grpc)
    with pytest.raises(PortInUseError, match=rf"^grpc port: 127\.0\.0\.1:{first.ports.grpc} is taken; .+$"):
        second.start()
    assert left_behind(second.shm_prefix).nothing
    assert ask(first, "one")


def test_a_start_that_takes_too_long_is_given_up(
    repository: Path, left_behind: LeftBehind, tmp_path: Path
) -> None:
    server = LocalTriton(
        repository, env={"LOAD_S": "60"}, ready_timeout_s=2.0, exit_timeout_s=1.0, log_path=tmp_path / "log"
    )
    with pytest.raises(ServerStartError, match=r"not ready after 2 s"):
        server.start()
    assert left_behind(server.shm_prefix).nothing


def test_a_model_that_hangs_is_killed_after_the_exit_timeout(
    repository: Path, left_behind: LeftBehind
) -> None:
    server = LocalTriton(repository, load_models=["one"], env={"ANSWER_S": "120"}, exit_timeout_s=1.0)
    server.start()
    connection = post(server, "one")
    time.sleep(1.0)  # the request has reached the stub
    started = time.monotonic()
    server.stop()
    assert time.monotonic() - started < 20.0
    connection.close()
    assert left_behind(server.shm_prefix).nothing


def test_a_killed_server_is_noticed_and_cleared_up(repository: Path, left_behind: LeftBehind) -> None:
    server = LocalTriton(repository)
    server.start()
    os.kill(server.pid, signal.SIGKILL)
    assert server.wait(20.0)
    assert left_behind(server.shm_prefix).nothing
    assert server.stop().exit_code == -signal.SIGKILL


def test_a_stub_that_outlives_its_server_is_killed(repository: Path, left_behind: LeftBehind) -> None:
    server = LocalTriton(repository)
    server.start()
    stub = next(pid for pid in left_behind(server.shm_prefix).processes if pid != server.pid)
    os.kill(stub, signal.SIGSTOP)  # it cannot notice that the server is gone
    os.kill(server.pid, signal.SIGKILL)
    assert server.wait(20.0)
    assert left_behind(server.shm_prefix).nothing
    report = server.stop()
    assert (report.orphans_killed, report.regions_removed) == (1, 1)


def test_a_server_that_does_not_react_is_killed(repository: Path, left_behind: LeftBehind) -> None:
    server = LocalTriton(repository, exit_timeout_s=0.5)
    server.start()
    os.kill(server.pid, signal.SIGSTOP)
    assert server.stop().forced
    assert left_behind(server.shm_prefix).nothing


def test_a_killed_supervisor_takes_its_server_along(repository: Path, left_behind: LeftBehind) -> None:
    server = LocalTriton(repository)
    server.start()
    supervisor = int(Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(supervisor, signal.SIGKILL)
    assert server.wait(20.0)
    server.stop()
    assert wait_for_nothing(left_behind, server.shm_prefix).nothing


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_its_owner(
    repository: Path, left_behind: LeftBehind, number: signal.Signals
) -> None:
    with owner_of(repository) as owner:
        assert owner.server_pid in left_behind(owner.shm_prefix).processes
        owner.process.send_signal(number)
        owner.process.wait(timeout=60)
    assert wait_for_nothing(left_behind, owner.shm_prefix).nothing


def test_an_owner_killed_while_loading_leaves_nothing(
    repository: Path, left_behind: LeftBehind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOAD_S", "3")
    command = [sys.executable, "-c", OWNER, str(repository)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        marker = f"ddtree_{process.pid}_"
        deadline = time.monotonic() + 30.0
        while not left_behind(marker).regions and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left_behind(marker).regions
        process.kill()
    assert wait_for_nothing(left_behind, marker, timeout_s=60.0).nothing
