"""The chart's start script, arguments, probes and test on a real Triton: open where needed, shut elsewhere.

The order matters at the end: the last test on a server breaks it, the last on the other one stops it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from ddtree_client import Client, ServerUnavailableError
from tests.deploy.kube.certificates import make_certificates
from tests.deploy.kube.dockerfile import build_context, copy_files, read_dockerfile
from tests.deploy.kube.helm import Rendering
from tests.deploy.kube.pod import Places, Pod, free_shm_prefix, running
from tests.deploy.kube.tools import ROOT
from tests.fakes.tiny_models import make_draft, make_target

pytestmark = pytest.mark.triton

ADMIN_KEY = "a-key-of-the-operators"
ADMIN_HEADER = "triton-grpc-protocol-admin-key"
# A tiny model on a CPU instead of what the chart is made for.
SMALL = {"DDTREE_DEVICE": "cpu", "DDTREE_DTYPE": "float32", "DDTREE_THREADS": "1", "OMP_NUM_THREADS": "1",
         "DDTREE_KV_CACHE_MIB": "4", "DDTREE_DRAFT_KV_CACHE_MIB": "4"}  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A rendering and the server that runs as it says."""

    rendering: Rendering
    pod: Pod
    places: Places

    @property
    def server(self) -> dict[str, Any]:
        return self.rendering.server()

    def http(self, path: str, body: dict[str, Any] | None = None) -> int:
        """The status of a request to the HTTP port."""
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.pod.ports.http}{path}"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data), timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def helm_test(self) -> subprocess.CompletedProcess[str]:
        """What the pod of `helm test` runs, from this machine."""
        container = self.rendering.only("Pod")["spec"]["containers"][0]
        certificates = self.places.certificates
        client = {"/etc/ddtree-tls/ca.crt": "ca.crt", "/etc/ddtree-tls/tls.key": "client.key",
                  "/etc/ddtree-tls/tls.crt": "client.crt"}  # fmt: skip
        arguments = []
        for argument in container["args"]:
            name, _, value = argument.partition("=")
            if name == "--url":
                assert value == "rel-ddtree.inference.svc:8001"
                value = f"localhost:{self.pod.ports.grpc}"
            elif value in client:
                value = str(certificates / client[value])
            arguments.append(f"{name}={value}" if value else argument)
        command = [str(Path(sys.executable).parent / container["command"][0]), *container["command"][1:]]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that the image's COPY instructions make."""
    folder = tmp_path_factory.mktemp("image")
    docker = ROOT / "deploy" / "docker"
    context = build_context(ROOT, docker / "Dockerfile.dockerignore")
    copy_files(read_dockerfile(docker / "Dockerfile"), context, ROOT, folder)
    return folder


def start(rendering: Rendering, image: Path, folder: Path) -> Iterator[Served]:
    key = folder / "admin-key"
    if rendering.values == "mutual-tls":
        key.write_text(ADMIN_KEY)
    places = Places(
        folder=folder,
        image=image,
        target=make_target(folder / "target"),
        draft=make_draft(folder / "draft"),
        certificates=make_certificates(folder / "certificates"),
        admin_key=key,
        shm_prefix=free_shm_prefix(),
    )
    stale = Path("/dev/shm") / f"{places.shm_prefix}left_by_a_predecessor"
    stale.write_bytes(b"x")
    with running(rendering.server(), places, SMALL) as pod:
        assert not stale.exists()
        yield Served(rendering, pod, places)


@pytest.fixture(scope="module")
def served(image: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The chart's defaults: every stage a model of its own."""
    settings = ("drain.settleSeconds=1", "drain.timeoutSeconds=60", "probes.liveness.timeoutSeconds=5",
                # A dead stage lets Triton wait for as long as it may.
                "server.exitTimeoutSeconds=3")  # fmt: skip
    yield from start(Rendering(settings=settings), image, tmp_path_factory.mktemp("bls"))


@pytest.fixture(scope="module")
def locked(image: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Mutual TLS and a key for operators, all stages in one process."""
    rendering = Rendering("mutual-tls", ("engine.topology=in_process",))
    yield from start(rendering, image, tmp_path_factory.mktemp("locked"))


def test_readiness_sees_every_model(served: Served) -> None:
    command = served.server["readinessProbe"]["exec"]["command"]
    assert len(command) == 3 + 4
    result = served.pod.probe(command)
    assert (result.returncode, result.stderr) == (0, "every model is ready\n")
    missing = served.pod.probe([*command, "another"])
    assert (missing.returncode, missing.stderr) == (1, "not ready: another\n")


def test_liveness_generates_a_token(served: Served) -> None:
    result = served.pod.probe(served.server["livenessProbe"]["exec"]["command"])
    assert (result.returncode, result.stderr) == (0, "a token was generated\n")


def test_helm_test_generates_tokens(served: Served) -> None:
    result = served.helm_test()
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["stats"]["output_tokens"] == 8


@pytest.mark.parametrize("key", ["", "guessed"])
def test_everything_but_inference_is_closed_without_a_key(served: Served, key: str) -> None:
    headers = {ADMIN_HEADER: key} if key else {}
    with triton.InferenceServerClient(f"127.0.0.1:{served.pod.ports.grpc}") as client:
        assert client.is_model_ready("ddtree")
        for call in (
            client.get_model_repository_index,
            client.get_inference_statistics,
            client.get_log_settings,
            client.get_trace_settings,
            client.get_system_shared_memory_status,
            lambda **more: client.get_model_config("ddtree", **more),
            lambda **more: client.unload_model("ddtree", **more),
        ):
            with pytest.raises(InferenceServerException, match="This protocol is restricted"):
                call(headers=headers)


def test_the_same_is_closed_on_http(served: Served) -> None:
    assert served.http("/v2/health/ready") == 200
    assert served.http("/v2/models/ddtree/generate", {"text_input": "a", "max_tokens": 1}) == 200
    for path, body in (
        ("/v2/repository/index", {}),
        ("/v2/repository/models/ddtree/unload", {}),
        ("/v2/models/ddtree/config", None),
        ("/v2/models/ddtree/stats", None),
        ("/v2/systemsharedmemory/status", None),
        ("/v2/logging", None),
    ):
        assert served.http(path, body) == 403, path


def test_a_drain_waits_for_a_running_stream(served: Served) -> None:
    times: dict[str, float] = {}

    def stream() -> None:
        with Client(f"127.0.0.1:{served.pod.ports.grpc}", timeout_s=60) as client:
            # As long as the context allows, and read slowly: the stream outlasts the settling.
            for _ in client.stream("a", max_tokens=400, ignore_eos=True, draft_mode="off"):
                times.setdefault("first", time.monotonic())
            times["last"] = time.monotonic()

    thread = threading.Thread(target=stream)
    thread.start()
    while "first" not in times:
        assert thread.is_alive()
        time.sleep(0.01)
    result = served.pod.drain(served.server["lifecycle"]["preStop"]["exec"]["command"])
    drained = time.monotonic()
    with (
        Client(f"127.0.0.1:{served.pod.ports.grpc}") as late,
        pytest.raises(ServerUnavailableError, match=r"draining .* retry in 1 s"),
    ):
        late.generate("a", max_tokens=1)
    served.pod.drain_file.unlink()  # the tests after this one ask more
    thread.join(timeout=60)
    assert (result.returncode, result.stderr) == (0, "no request is left\n")
    assert drained > times["last"], "the drain ended while a stream was running"


def test_a_dead_stage_is_found_by_liveness(served: Served) -> None:
    """Triton 2.51 still says ready; 25.12 and newer do not."""
    subprocess.run(["kill", "-9", str(_stub_of(served.pod.pid, "target_verifier"))], check=True)
    result = served.pod.probe(served.server["livenessProbe"]["exec"]["command"])
    assert result.returncode == 1
    assert result.stderr.startswith("no token within 5 s and no round meanwhile: ")


def _stub_of(server: int, model: str) -> int:
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes().decode()
        except OSError:
            continue
        if parent == server and f"/{model}/" in command:
            return int(folder.name)
    raise AssertionError(f"no stub of {model} under {server}")


def test_mutual_tls_lets_in_the_authoritys_clients_alone(locked: Served, tmp_path: Path) -> None:
    address = f"localhost:{locked.pod.ports.grpc}"
    folder = locked.places.certificates
    strangers = make_certificates(tmp_path / "others", other_authority=True)
    refused: list[dict[str, Any]] = [
        {},
        {"ssl": True, "root_certificates": str(folder / "ca.crt")},
        {"ssl": True, "root_certificates": str(folder / "ca.crt"),
         "private_key": str(strangers / "client.key"), "certificate_chain": str(strangers / "client.crt")},
    ]  # fmt: skip
    for options in refused:
        with (
            triton.InferenceServerClient(address, **options) as client,
            pytest.raises(InferenceServerException),
        ):
            client.is_server_live(client_timeout=3)
    result = locked.helm_test()
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["stats"]["output_tokens"] == 8


def test_operators_with_the_key_get_in(locked: Served) -> None:
    folder = locked.places.certificates
    with triton.InferenceServerClient(
        f"localhost:{locked.pod.ports.grpc}", ssl=True, root_certificates=str(folder / "ca.crt"),
        private_key=str(folder / "client.key"), certificate_chain=str(folder / "client.crt"),
    ) as client:  # fmt: skip
        index = client.get_model_repository_index(headers={ADMIN_HEADER: ADMIN_KEY})
        assert [model.name for model in index.models] == ["ddtree"]
        with pytest.raises(InferenceServerException, match="restricted"):
            client.get_model_repository_index(headers={ADMIN_HEADER: "guessed"})


def test_probes_need_neither_certificate_nor_key(locked: Served) -> None:
    for probe in ("readinessProbe", "livenessProbe"):
        assert locked.pod.probe(locked.server[probe]["exec"]["command"]).returncode == 0


def test_the_stop_is_clean(locked: Served) -> None:
    result = locked.pod.drain(["ddtree", "drain"])
    assert (result.returncode, result.stderr) == (0, "no request is left\n")
    end = locked.pod.terminate()
    assert (end["exit_code"], end["forced"], end["orphans_killed"], end["regions_removed"]) == (
        0,
        False,
        0,
        0,
    )
    result = locked.pod.probe(["python3", "/etc/ddtree/probe.py", "ready", "ddtree"])
    assert result.returncode == 1
    assert result.stderr.startswith("the server does not answer: ")
