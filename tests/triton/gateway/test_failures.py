"""What goes wrong between a caller, the gateway and its servers; the model behind follows a script."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from ddtree_client import Client
from ddtree_gateway import Settings
from ddtree_local.ports import choose_ports
from ddtree_local.server import LocalTriton
from tests.conftest import StartTriton
from tests.triton.client.contract_server import LONG, NEVER, one_cancelled, script
from tests.triton.gateway.running import Gateway, running, wait_until

pytestmark = pytest.mark.triton

CONTRACT_MODEL = Path(__file__).parents[2] / "fakes" / "contract_model"


@pytest.fixture(scope="module")
def server(start_module_triton: StartTriton, tmp_path_factory: pytest.TempPathFactory) -> LocalTriton:
    repository = tmp_path_factory.mktemp("models")
    shutil.copytree(CONTRACT_MODEL, repository / "ddtree", ignore=shutil.ignore_patterns("__pycache__"))
    return start_module_triton(repository, exit_timeout_s=10.0)


@pytest.fixture(scope="module")
def scripted(server: LocalTriton) -> Iterator[Gateway]:
    with running(Settings(endpoints=(server.grpc_url,), served_names=("m",), max_body_bytes=4096)) as gateway:
        yield gateway


@pytest.fixture
def client(server: LocalTriton) -> Iterator[Client]:
    with Client(server.grpc_url) as client:
        yield client


def post(gateway: Gateway, prompt: str, **more: Any) -> httpx.Response:
    body = {"model": "m", "prompt": prompt, **more}
    return httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=30)


def closed_port() -> int:
    return choose_ports("127.0.0.1", None, None, None).http


@pytest.mark.parametrize(
    ("error", "status", "wait", "raised"),
    [
        ("RESOURCE_EXHAUSTED: the queue is full; retry in 3 s", 429, "3", openai.RateLimitError),
        ("RESOURCE_EXHAUSTED: the queue is full", 429, "1", openai.RateLimitError),
        ("UNAVAILABLE: the verifier is loading; retry in 12.4 s", 503, "12", openai.InternalServerError),
        ("INVALID_ARGUMENT: top_k must be small, got 7; lower it", 400, None, openai.BadRequestError),
        ("INTERNAL: the server failed; its log says why", 500, None, openai.InternalServerError),
        ("CANCELLED: the server is stopping", 503, "1", openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_keeps_its_status_in_both_ways_of_asking(
    scripted: Gateway, error: str, status: int, wait: str | None, raised: type[Exception], stream: bool
) -> None:
    prompt = script("a", error=error, error_at=0)
    answer = post(scripted, prompt, stream=stream)
    assert (answer.status_code, answer.headers.get("retry-after")) == (status, wait)
    said = answer.json()["error"]
    assert said.keys() == {"message", "type", "param", "code"}
    assert said["message"] == error.split(": ", 1)[1]
    with OpenAI(base_url=f"{scripted.url}/v1", api_key="x", max_retries=0) as api, pytest.raises(raised):
        api.completions.create(model="m", prompt=prompt, stream=stream)


def test_a_server_that_is_full_is_heard_though_another_one_is_dead(server: LocalTriton) -> None:
    said = "RESOURCE_EXHAUSTED: the queue is full; retry in 3 s"
    dead = f"127.0.0.1:{closed_port()}"
    with running(Settings(endpoints=(server.grpc_url, dead), served_names=("m",))) as gateway:
        for _ in range(3):  # whoever's turn it is
            answer = post(gateway, script("a", error=said, error_at=0))
            assert (answer.status_code, answer.headers.get("retry-after")) == (429, "3")


def test_an_error_after_the_first_chunk_is_an_event(scripted: Gateway) -> None:
    prompt = script("a", "b", error="INTERNAL: it broke", error_at=1)
    with OpenAI(base_url=f"{scripted.url}/v1", api_key="x", max_retries=0) as api:
        stream = api.completions.create(model="m", prompt=prompt, stream=True)
        assert next(stream).choices[0].text == "a"
        with pytest.raises(openai.APIError, match="it broke"):
            next(stream)
    text = post(scripted, prompt, stream=True).text
    assert '"text":"a"' in text
    assert "[DONE]" not in text


def test_a_deadline_ends_the_request_on_the_server_too(scripted: Gateway, client: Client) -> None:
    with one_cancelled(client):
        answer = post(scripted, NEVER, deadline=0.8)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_cancels_on_the_server(scripted: Gateway, client: Client, stream: bool) -> None:
    with one_cancelled(client):
        if stream:
            body: dict[str, Any] = {"model": "m", "prompt": LONG, "stream": True}
            with httpx.stream("POST", f"{scripted.url}/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{scripted.url}/v1/completions", json={"model": "m", "prompt": LONG}, timeout=0.8)
    wait_until(lambda: scripted.in_flight() == 0)


def test_leaving_before_the_first_chunk_cancels_too(scripted: Gateway, client: Client) -> None:
    body = {"model": "m", "prompt": NEVER, "stream": True}
    with one_cancelled(client), pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{scripted.url}/v1/completions", json=body, timeout=0.8)


def test_a_dead_server_is_passed_over(server: LocalTriton) -> None:
    dead = f"127.0.0.1:{closed_port()}"
    settings = Settings(endpoints=(dead, server.grpc_url), served_names=("m",), check_interval_s=60)
    with running(settings) as gateway:
        answers = [post(gateway, script("ok")) for _ in range(4)]
        assert [answer.json()["choices"][0]["text"] for answer in answers] == ["ok"] * 4
        health = httpx.get(f"{gateway.url}/health")
        ready = {each["address"]: each["ready"] for each in health.json()["servers"]}
        assert (health.status_code, ready) == (200, {dead: False, server.grpc_url: True})
        assert gateway.gauges()[f'ddtree_gateway_endpoint_ready{{endpoint="{dead}"}}'] == 0
    with running(Settings(endpoints=(dead,), served_names=("m",))) as gateway:
        assert httpx.get(f"{gateway.url}/health").status_code == 503
        assert httpx.get(f"{gateway.url}/live").status_code == 200
        answer = post(gateway, script("ok"))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert dead in answer.json()["error"]["message"]


def test_a_full_server_passes_a_request_on_before_anything_is_shown(server: LocalTriton) -> None:
    # One server by two names, which refuses by both: each was asked before the caller hears of it.
    port = server.grpc_url.rpartition(":")[2]
    settings = Settings(endpoints=(server.grpc_url, f"localhost:{port}"), served_names=("m",))
    with running(settings) as gateway, Client(server.grpc_url) as client:
        before = _failed(client)
        refusal = script("a", error="RESOURCE_EXHAUSTED: full", error_at=0)
        assert post(gateway, refusal).status_code == 429
        assert _failed(client) == before + 2
        late = script("a", "b", error="RESOURCE_EXHAUSTED: full", error_at=1)
        assert "RESOURCE" not in post(gateway, late, stream=True).text
        assert _failed(client) == before + 3  # what was begun is not begun again


def test_the_server_with_the_least_to_do_is_chosen(server: LocalTriton, tmp_path: Path) -> None:
    port, gate = server.grpc_url.rpartition(":")[2], tmp_path / "all are there"
    names = (server.grpc_url, f"localhost:{port}")
    with running(Settings(endpoints=names, served_names=("m",))) as gateway, ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(post, gateway, script(*"ab", until=str(gate))) for _ in range(4)]
        try:
            wait_until(lambda: _busy(gateway) == [2.0, 2.0])
        finally:
            gate.touch()
        assert [each.result().json()["choices"][0]["text"] for each in waiting] == ["ab"] * 4
        wait_until(lambda: _busy(gateway) == [0.0, 0.0])


def test_keys_are_asked_for_and_read_again(server: LocalTriton, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# for the team\nfirst-key\n\nsecond-key\n")
    settings = Settings(endpoints=(server.grpc_url,), served_names=("m",), api_keys=keys)
    with running(settings) as gateway:

        def status(key: str | None) -> int:
            headers = {} if key is None else {"authorization": key}
            return httpx.get(f"{gateway.url}/v1/models", headers=headers).status_code

        assert [status(key) for key in (None, "Bearer", "Bearer no", "Basic first-key")] == [401] * 4
        assert [status(key) for key in ("Bearer first-key", "bearer second-key")] == [200] * 2
        assert status("Bearer # for the team") == 401
        assert httpx.get(f"{gateway.url}/health").status_code == 200
        keys.write_text("third-key\n")
        assert [status(f"Bearer {key}") for key in ("first-key", "third-key")] == [401, 200]
        keys.write_text("")  # a slip of the editor locks nobody out and lets nobody in
        assert [status(f"Bearer {key}") for key in ("first-key", "third-key")] == [401, 200]
        refused = httpx.get(f"{gateway.url}/v1/models")
        assert refused.headers["www-authenticate"] == "Bearer"
        with (
            OpenAI(base_url=f"{gateway.url}/v1", api_key="no") as api,
            pytest.raises(openai.AuthenticationError),
        ):
            api.models.list()


def in_pieces() -> Iterator[bytes]:
    yield b'{"model": "m", "prompt": "'
    for _ in range(10):
        yield b"x" * 1000
    yield b'"}'


@pytest.mark.parametrize("content", [lambda: b"x" * 5000, in_pieces], ids=["at once", "in pieces"])
def test_a_large_body_is_refused_unread(scripted: Gateway, content: Callable[[], Any]) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{scripted.url}/v1/completions", content=content(), headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"model": "m", "prompt": "\xff"}', b"[" * 4000]
)
def test_a_body_that_is_no_request_is_refused(scripted: Gateway, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{scripted.url}/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_the_command_serves_and_stops(server: LocalTriton) -> None:
    command = [sys.executable, "-c", "from ddtree_gateway.cli import main; main()"]
    arguments = ["--triton", server.grpc_url, "--port", "0", "--served-model-name", "m"]
    with subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"running on http://127\.0\.0\.1:(\d+)", line):
                break
        gateway = Gateway(int(found[1]) if found else 0)
        assert post(gateway, script("ok")).json()["choices"][0]["text"] == "ok"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) in (
            0,
            -signal.SIGTERM,
        )  # uvicorn passes the signal on when it is done


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from ddtree_gateway.cli import main; main()"]
    for arguments, message in (
        (["--triton", "http://x:1"], "HOST:PORT"),
        (["--api-keys", str(tmp_path / "none")], "cannot be read"),
    ):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def _failed(client: Client) -> int:
    report = client.generate('"report"').text
    return int(httpx.Response(200, text=report).json()["failed"])


def _busy(gateway: Gateway) -> list[float]:
    values = gateway.gauges()
    return [
        value
        for name, value in sorted(values.items())
        if name.startswith("ddtree_gateway_endpoint_in_flight")
    ]
