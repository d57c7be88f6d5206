"""Metrics and logs of real servers, in both topologies: they agree with the answers and end at zero."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc

from ddtree.text import TextCodec
from ddtree_client.errors import DDTreeClientError
from ddtree_local.server import LocalTriton
from tests.deploy.conftest import Observed
from tests.deploy.prometheus.scraping import Scrape, at_rest, scrape
from tests.deploy.prometheus.server import promtool
from tests.fakes.tiny_models import BLOCK_SIZE
from tests.triton.echo_server import Stream, flags, ints
from tests.triton.oracle_server import OracleServer, TinyPair, make_repository

pytestmark = pytest.mark.triton

WORDS = "Zaphod keeps the Heart of Gold in bay 42"
# Series that a tally publishes as counters, since Triton's histograms have no bulk update.
TALLIES = (
    "ddtree_inter_token_seconds",
    "ddtree_acceptance_length",
    "ddtree_tree_size_nodes",
    "ddtree_budget_nodes",
)
COUNTED = ("emitted_tokens", "draft_tokens", "accepted_tokens", "prompt_tokens", "rounds")

# A caller who reads one chunk of a long answer, says so, and waits to be killed.
READER = """
import sys, time
from ddtree_client import Client
stream = Client(sys.argv[1]).stream(input_ids=[4] * 8, max_tokens=490, ignore_eos=True, draft_mode="off")
next(iter(stream))
print("reading", flush=True)
time.sleep(60)
"""

StartOracle = Callable[..., OracleServer]


@pytest.fixture(scope="module")
def start_oracle(
    tmp_path_factory: pytest.TempPathFactory, project_root: Path, observability_pair: TinyPair
) -> Iterator[StartOracle]:
    """Starts servers over the small pair that live as long as the module."""
    servers: list[LocalTriton] = []

    def start(topology: str, **options: Any) -> OracleServer:
        folder = tmp_path_factory.mktemp("server")
        repository = make_repository(folder / topology, project_root / "model_repository", topology)
        environment = observability_pair.environment(topology) | {"DDTREE_LOG_LEVEL": "debug"}
        models = sorted(model.name for model in repository.iterdir())
        triton = LocalTriton(
            repository, load_models=models, env=environment, log_path=folder / "triton.log", **options
        )
        servers.append(triton)
        triton.start()
        codec = TextCodec.from_folder(observability_pair.target)
        reference: Any = None  # no test here looks at tokens
        return OracleServer(triton, topology, repository, codec, reference)

    try:
        yield start
    finally:
        for triton in servers:
            triton.stop()


@pytest.fixture(scope="module", params=["bls", "in_process"])
def server(request: pytest.FixtureRequest, start_oracle: StartOracle) -> OracleServer:
    """Either topology."""
    if request.param == "bls":
        observed: Observed = request.getfixturevalue("observed")
        return observed.server
    return start_oracle("in_process")


def grown(before: Scrape, after: Scrape, name: str, **labels: str) -> float:
    return after.total(f"ddtree_{name}", **labels) - before.total(f"ddtree_{name}", **labels)


def records(server: OracleServer) -> list[dict[str, Any]]:
    lines = server.triton.log_path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


# --- agreeing with the answers


def test_numbers_are_those_of_the_answers(server: OracleServer) -> None:
    address = server.triton.metrics_url
    with server.client() as client:
        client.generate(input_ids=[1, 2], max_tokens=24)  # the engine starts with the first request
        before = at_rest(address)
        options: list[dict[str, Any]] = [
            {},
            {"tree_budget": 16},
            {"draft_mode": "chain"},
            {"draft_mode": "off"},
        ]
        stats = [
            client.generate(input_ids=[n + 1] * 9, max_tokens=24, ignore_eos=True, **options[n % 4]).stats
            for n in range(8)
        ]
    after = at_rest(address)
    assert grown(before, after, "requests_total", outcome="completed") == 8
    assert grown(before, after, "prompt_tokens_total") == 72
    assert grown(before, after, "emitted_tokens_total") == sum(each.output_tokens for each in stats)
    assert grown(before, after, "draft_tokens_total") == sum(each.draft_tokens for each in stats) > 0
    assert grown(before, after, "accepted_tokens_total") == sum(each.accepted_draft_tokens for each in stats)
    assert grown(before, after, "accepted_at_depth_total") == grown(before, after, "accepted_tokens_total")
    rounds = sum(each.rounds for each in stats)
    assert grown(before, after, "rounds_total") == rounds  # one at a time: nothing was packed
    assert grown(before, after, "sequence_rounds_total") == rounds
    drafted = grown(before, after, "sequence_rounds_total", drafts="with")
    assert grown(before, after, "acceptance_length_count") == drafted
    assert grown(before, after, "acceptance_length_bucket", le="+Inf") == drafted
    assert grown(before, after, "acceptance_length_bucket", le="1") < drafted
    assert grown(before, after, "tree_size_nodes_sum") == grown(before, after, "draft_tokens_total")
    assert grown(before, after, "time_to_first_token_seconds_count") == 8
    assert grown(before, after, "request_seconds_count") == 8
    assert grown(before, after, "inter_token_seconds_count") == 8 * 23
    for stage in ("verify", "commit", "cache_commit"):
        assert grown(before, after, "stage_seconds_count", stage=stage) == rounds
    # Every time there is was spent inside the requests.
    inside = grown(before, after, "request_seconds_sum")
    assert 0 < grown(before, after, "stage_seconds_sum") < inside
    assert grown(before, after, "inter_token_seconds_sum") < inside
    assert after.total("ddtree_build_info", topology=server.topology) == 1
    assert after.total("ddtree_max_sequences") in (5, 32)


def test_a_perfect_oracle_shows_as_its_block_size(server: OracleServer) -> None:
    server.set_noise(0.0)
    try:
        before = at_rest(server.triton.metrics_url)
        with server.client() as client:
            client.generate(
                input_ids=[3] * 5, max_tokens=1 + 3 * BLOCK_SIZE, ignore_eos=True, tree_budget=BLOCK_SIZE - 1
            )
        after = at_rest(server.triton.metrics_url)
    finally:
        server.set_noise(0.6)
    assert grown(before, after, "acceptance_length_sum") == 3 * BLOCK_SIZE
    assert grown(before, after, "acceptance_length_count") == 3
    assert grown(before, after, "accepted_at_depth_total", depth=str(BLOCK_SIZE - 1)) >= 3


def test_a_request_of_several_rows_counts_once_and_its_tokens_all(server: OracleServer) -> None:
    before = at_rest(server.triton.metrics_url)
    with grpc.InferenceServerClient(server.triton.grpc_url) as client:
        stream = Stream(client)
        stream.open()
        rows = np.array([[5, 6, 7], [8, 9, 10]], dtype=np.int32)
        stream.ask({"input_ids": rows, "max_tokens": ints(6, 6), "ignore_eos": flags(True, True)})
        client.stop_stream()
    after = at_rest(server.triton.metrics_url)
    assert (
        grown(before, after, "requests_total")
        == grown(before, after, "time_to_first_token_seconds_count")
        == 1
    )
    assert grown(before, after, "emitted_tokens_total") == 12


# --- back to zero, whatever happened


def test_everything_is_zero_after_the_load(observed: Observed) -> None:
    reading, outcomes = observed.reading, observed.seen.outcomes
    assert {name for name, count in outcomes.items() if count} >= {
        "completed", "left", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED",
    }  # fmt: skip
    assert reading.total("ddtree_requests_total", outcome="completed") >= outcomes["completed"]
    assert reading.total("ddtree_requests_total", outcome="invalid") == outcomes["INVALID_ARGUMENT"]
    assert reading.total("ddtree_requests_total", outcome="overloaded") == outcomes["RESOURCE_EXHAUSTED"]
    assert reading.total("ddtree_requests_total", outcome="failed") == 0
    # A caller may leave when the answer is already complete.
    assert 0 < reading.total("ddtree_requests_total", outcome="cancelled") <= outcomes["left"] + 5
    for name in ("draft_tokens", "accepted_tokens"):
        assert reading.total(f"ddtree_{name}_total") >= getattr(observed.seen, name) > 0
    assert reading.total("ddtree_preemptions_total") > 0
    assert reading.total("ddtree_session_recoveries_total", stage="drafter") > 0
    assert reading.total("ddtree_kv_pages_capacity", stage="target_verifier") > 0


def test_callers_who_go_away_in_every_way(server: OracleServer) -> None:
    before = at_rest(server.triton.metrics_url)
    long: dict[str, Any] = {"input_ids": [4] * 8, "max_tokens": 400, "ignore_eos": True, "draft_mode": "off"}
    with server.client() as client, client.stream(**long) as stream:
        next(iter(stream))
    command = [sys.executable, "-c", READER, server.triton.grpc_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"reading\n"
        killed.send_signal(signal.SIGKILL)
    after = at_rest(server.triton.metrics_url)
    assert grown(before, after, "cancellations_total", cause="client_gone") == 2
    assert grown(before, after, "requests_total", outcome="cancelled") == 2
    assert grown(before, after, "requests_total", outcome="completed") == 0


def test_a_refusal_is_no_error_of_the_server(server: OracleServer) -> None:
    before = at_rest(server.triton.metrics_url)
    with server.client() as client, pytest.raises(DDTreeClientError, match="max_tokens"):
        client.generate(input_ids=[1], max_tokens=-1)
    after = at_rest(server.triton.metrics_url)
    assert (
        grown(before, after, "requests_total", outcome="invalid")
        == grown(before, after, "requests_total")
        == 1
    )


def test_one_request_shows_soon(server: OracleServer) -> None:
    at_rest(server.triton.metrics_url)
    with server.client() as client:
        options: dict[str, Any] = {
            "input_ids": [4] * 8,
            "max_tokens": 490,
            "ignore_eos": True,
            "draft_mode": "off",
        }
        with client.stream(**options) as stream:
            next(iter(stream))
            shown = [scrape(server.triton.metrics_url).total("ddtree_active_requests")]
            while shown[-1] == 0 and len(shown) < 50:
                shown.append(scrape(server.triton.metrics_url).total("ddtree_active_requests"))
    assert shown[-1] == 1
    at_rest(server.triton.metrics_url)


# --- the port itself


def test_promtool_has_nothing_to_say_but_of_tallies(observed: Observed) -> None:
    said = promtool("check", "metrics", stdin=scrape(observed.server.triton.metrics_url).text)
    complaints = [line for line in (said.stdout + said.stderr).splitlines() if line.startswith("ddtree")]
    unexpected = [line for line in complaints if not line.startswith(TALLIES)]
    assert not unexpected


def test_labels_are_few_and_known(observed: Observed) -> None:
    reading = scrape(observed.server.triton.metrics_url)
    known = {"model", "le", "outcome", "cause", "drafts", "depth", "stage", "reason", "state", "chosen_by"}
    for name, labels in reading.label_names().items():
        if name.startswith("ddtree_") and name != "ddtree_build_info":
            assert labels <= known, name
    assert reading.series() < 400


def test_eight_streams_at_once_and_the_server_lives(server: OracleServer) -> None:
    before = at_rest(server.triton.metrics_url)

    def one(number: int) -> int:
        with server.client() as client:
            try:
                return len(
                    client.generate(
                        input_ids=[number % 200 + 1] * 4, max_tokens=20, ignore_eos=True
                    ).token_ids
                )
            except DDTreeClientError as error:
                assert error.code == "RESOURCE_EXHAUSTED"  # noqa: PT017 - the tight server may say so
                return 0

    with ThreadPoolExecutor(8) as pool:
        tokens = list(pool.map(one, range(80)))
    after = at_rest(server.triton.metrics_url)
    assert grown(before, after, "emitted_tokens_total") == sum(tokens)


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
    time.sleep(0.2)
    log = server.triton.log_path.read_text()
    assert WORDS not in log
    assert "Zaphod" not in log
    assert text not in log or len(text.strip()) < 4
    (line,) = [one for one in records(server) if one.get("request_id") == request_id]
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
    time.sleep(2.0)
    reading = scrape(address)
    assert reading.total("ddtree_stage_up", stage="target_verifier") == 0
    assert reading.total("ddtree_stage_errors_total", stage="target_verifier") >= 2
    assert reading.total("ddtree_requests_total", outcome="unavailable") == 2
    assert reading.total("ddtree_active_requests") == reading.total("ddtree_queued_requests") == 0
    assert [one["reason"] for one in records(server) if one.get("outcome") == "unavailable"]


def test_a_server_without_metrics_serves_all_the_same(start_oracle: StartOracle) -> None:
    server = start_oracle("in_process", extra_args=("--allow-metrics=false",))
    with server.client() as client:
        assert len(client.generate(input_ids=[1, 2, 3], max_tokens=7, ignore_eos=True).token_ids) == 7
    time.sleep(0.3)  # the line follows the answer
    assert [one["outcome"] for one in records(server) if "outcome" in one] == ["completed"]


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
