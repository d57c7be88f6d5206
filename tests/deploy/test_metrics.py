"""Metrics of real servers, in both topologies: they agree with the answers and end at zero."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc

from ddtree_client.errors import DDTreeClientError
from ddtree_local.ports import choose_ports
from tests.deploy.conftest import Observed
from tests.deploy.prometheus.scraping import Scrape, at_rest, scrape
from tests.deploy.prometheus.server import promtool
from tests.fakes.tiny_models import BLOCK_SIZE
from tests.triton.echo_server import Stream, flags, ints
from tests.triton.oracle_server import OracleServer

pytestmark = pytest.mark.triton

# Series that a tally publishes as counters, since Triton's histograms have no bulk update.
TALLIES = (
    "ddtree_stage_seconds",
    "ddtree_inter_token_seconds",
    "ddtree_acceptance_length",
    "ddtree_tree_size_nodes",
    "ddtree_budget_nodes",
)

# A caller who reads one chunk of a long answer, says so, and waits to be killed.
READER = """
import sys, time
from ddtree_client import Client
stream = Client(sys.argv[1]).stream(input_ids=[4] * 8, max_tokens=490, ignore_eos=True, draft_mode="off")
chunks = iter(stream)  # held: a stream whose chunks nobody reads is cancelled
next(chunks)
print("reading", flush=True)
time.sleep(60)
"""


def grown(before: Scrape, after: Scrape, name: str, **labels: str) -> float:
    """How much a counter grew; a label's first sample comes with its first event."""
    return after.total(f"ddtree_{name}", **labels) - sum(before.values(f"ddtree_{name}", **labels))


# --- agreeing with the answers


def test_numbers_are_those_of_the_answers(server: OracleServer) -> None:
    address = server.triton.metrics_url
    with server.client() as client:
        # The engine starts with the first request, and a depth's number with the first token accepted there.
        client.generate(input_ids=[1, 2], max_tokens=24, tree_budget=16, ignore_eos=True)
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
    after = at_rest(address, before, requests=8)
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
        after = at_rest(server.triton.metrics_url, before, requests=1)
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
    after = at_rest(server.triton.metrics_url, before, requests=1)
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
    after = at_rest(server.triton.metrics_url, before, requests=2)
    assert grown(before, after, "cancellations_total", cause="client_gone") == 2
    assert grown(before, after, "requests_total", outcome="cancelled") == 2
    assert grown(before, after, "requests_total", outcome="completed") == 0


def test_a_refusal_is_no_error_of_the_server(server: OracleServer) -> None:
    before = at_rest(server.triton.metrics_url)
    with server.client() as client, pytest.raises(DDTreeClientError, match="max_tokens"):
        client.generate(input_ids=[1], max_tokens=-1)
    after = at_rest(server.triton.metrics_url, before, requests=1)
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
            chunks = iter(stream)  # held: a stream whose chunks nobody reads is cancelled
            next(chunks)
            shown = 0.0
            while not shown and server.held().sessions:
                shown = scrape(server.triton.metrics_url).total("ddtree_active_requests")
    assert shown == 1, "the answer was complete before the request showed"
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
    after = at_rest(server.triton.metrics_url, before, requests=80)
    assert grown(before, after, "emitted_tokens_total") == sum(tokens)


@pytest.mark.parametrize("server", ["in_process"], indirect=True)
def test_the_command_bench_serves_its_own_numbers_meanwhile(
    server: OracleServer,
) -> None:
    port = choose_ports("127.0.0.1", None, None, None).http
    command = [sys.executable, "-c", "from ddtree_client.cli import main; main()", "bench",
               "--url", server.triton.grpc_url, "--draft-mode", "off", "--requests", "12", "--raw",
               "--max-tokens", "120", "--ignore-eos", "--metrics-port", str(port)]  # fmt: skip
    address = f"127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as bench:
        readings = []
        while bench.poll() is None:
            with suppress(OSError):
                readings.append(scrape(address))
            time.sleep(0.05)
    assert bench.returncode == 0
    counted = [one for one in readings if one.has("ddtree_client_requests_total")]
    assert counted
    done = counted[-1].total("ddtree_client_requests_total", draft_mode="off", outcome="completed")
    assert 0 < done <= 12
    tokens = counted[-1].total("ddtree_client_output_tokens_total", draft_mode="off")
    assert 120 * done <= tokens <= 120 * (done + 1)
