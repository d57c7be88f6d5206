"""What real servers log, and what they tell when a stage is dead or the server itself is not as it was."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import tritonclient.grpc as grpc

from ddtree_client.errors import DDTreeClientError
from ddtree_local.server import LocalTriton
from tests.deploy.conftest import StartOracle
from tests.deploy.prometheus.scraping import Scrape, at_rest, scrape
from tests.triton.oracle_server import OracleServer

pytestmark = pytest.mark.triton

Found = TypeVar("Found")
WORDS = "Zaphod keeps the Heart of Gold in bay 42"


def records(server: OracleServer) -> list[dict[str, Any]]:
    lines = server.triton.log_path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]


def records_of(server: OracleServer, **values: object) -> list[dict[str, Any]]:
    """The lines with these values, once there is one: a request's line follows its answer."""
    return waited_for(
        lambda: [one for one in records(server) if values.items() <= one.items()], f"no line has {values}"
    )


def waited_for(look: Callable[[], Found], otherwise: str) -> Found:
    """What `look` finds, as soon as it finds something."""
    deadline = time.monotonic() + 30
    while not (found := look()):
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)
    return found


# --- logs


def test_logs_are_json_with_ids_and_without_a_word_of_anybody(server: OracleServer) -> None:
    with server.client() as client:
        with client.stream(prompt=WORDS, max_tokens=9) as stream:
            request_id = stream.request_id
            text = "".join(chunk.text for chunk in stream)
        bad: list[dict[str, Any]] = [{"temperature": -1.0}, {"max_tokens": -1}, {"guided_regex": f"({WORDS}"}]
        for options in bad:
            with pytest.raises(DDTreeClientError):
                client.generate(prompt=WORDS, **options)
    (line,) = records_of(server, request_id=request_id)
    log = server.triton.log_path.read_text()
    assert WORDS not in log
    assert "Zaphod" not in log
    assert text not in log or len(text.strip()) < 4
    assert line["outcome"] == "completed"
    assert (line["level"], line["component"]) == ("info", "ddtree")
    assert line["output_tokens"] == 9
    assert 0 < line["first_token_seconds"] <= line["seconds"]
    if server.topology == "bls":
        assert {one["component"] for one in records(server)} >= {"ddtree", "target_verifier"}


# --- servers that are not well


def test_a_dead_stage_is_told_and_requests_end(start_oracle: StartOracle) -> None:
    server = start_oracle("bls", exit_timeout_s=3.0)
    address = server.triton.metrics_url
    with server.client() as client:
        client.generate(input_ids=[1, 2, 3], max_tokens=4)
        assert at_rest(address).total("ddtree_stage_up", stage="target_verifier") == 1
        os.kill(_stub_of(server.triton, "target_verifier"), signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(DDTreeClientError) as raised:
                client.generate(input_ids=[1, 2, 3], max_tokens=4)
            assert raised.value.code == "UNAVAILABLE"
    waited_for(lambda: _tells_of_two_lost_requests(scrape(address)), "the lost requests are not counted")
    assert all(one["reason"] for one in records_of(server, outcome="unavailable"))
    server.triton.stop()


def _tells_of_two_lost_requests(reading: Scrape) -> bool:
    stage = {"stage": "target_verifier"}
    return (
        reading.total("ddtree_stage_up", **stage) == 0
        and sum(reading.values("ddtree_stage_errors_total", **stage)) >= 2
        and sum(reading.values("ddtree_requests_total", outcome="unavailable")) == 2
        and reading.total("ddtree_active_requests") == reading.total("ddtree_queued_requests") == 0
    )


def test_a_server_without_metrics_serves_all_the_same(start_oracle: StartOracle) -> None:
    server = start_oracle("in_process", extra_args=("--allow-metrics=false",))
    with server.client() as client:
        assert len(client.generate(input_ids=[1, 2, 3], max_tokens=7, ignore_eos=True).token_ids) == 7
    (line,) = records_of(server, component="ddtree", outcome="completed")
    assert [one for one in records(server) if "outcome" in one] == [line]
    server.triton.stop()


@pytest.mark.parametrize("server", ["in_process"], indirect=True)
def test_the_orchestrator_is_reloaded_and_its_metrics_begin_again(server: OracleServer) -> None:
    at_rest(server.triton.metrics_url)
    model = server.repository / "ddtree" / "1" / "model.py"
    model.write_text(model.read_text() + "\n")
    with grpc.InferenceServerClient(server.triton.grpc_url) as control:
        control.load_model("ddtree")
    with server.client() as client:
        client.generate(input_ids=[1, 2, 3], max_tokens=7)
    reading = at_rest(server.triton.metrics_url)
    assert reading.total("ddtree_requests_total", outcome="completed") >= 1


def _stub_of(triton: LocalTriton, model: str) -> int:
    """Process id of a model's stub."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = (folder / "cmdline").read_bytes().decode()
            environment = (folder / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "python_backend_stub" in command and f"/{model}/" in command and triton.shm_prefix in environment:
            return int(folder.name)
    raise AssertionError(f"no stub of {model}")
