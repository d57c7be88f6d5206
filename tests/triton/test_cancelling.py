"""However a caller goes away: the sequence ends at once, the stages are told, and others are not touched."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc

from ddtree_client import DeadlineExceededError, ServerUnavailableError
from tests.fakes.tiny_models import CONTEXT_LENGTH
from tests.triton.echo_server import Stream, flags, ints, joined
from tests.triton.oracle_server import OracleServer

pytestmark = pytest.mark.triton

PROMPT = list(b"endless")
MAX_TOKENS = CONTEXT_LENGTH - len(PROMPT)
SOON = 150  # rounds; the whole answer takes some 300
ROUND_S = 0.01  # what one takes at least
ENDLESS: dict[str, Any] = {"max_tokens": MAX_TOKENS, "tree_budget": 1, "ignore_eos": True}

# A client of its own process: says when the first chunk is there, then reads on.
READER = """
import sys
from ddtree_client import Client
with Client(sys.argv[1]) as client:
    for chunk in client.stream(input_ids=list(b"endless"), max_tokens=int(sys.argv[2]), tree_budget=1,
                               ignore_eos=True):
        print("chunk", flush=True)
"""


@pytest.fixture(autouse=True)
def quiet_afterwards(oracle_server: OracleServer) -> Iterator[None]:
    oracle_server.set_pause(ROUND_S)
    yield
    oracle_server.set_pause(0.0)
    oracle_server.assert_quiet()


@pytest.fixture
def ends_soon(oracle_server: OracleServer) -> Iterator[None]:
    """The test's one endless request was decoded for a part of its rounds only."""
    before = oracle_server.rounds()
    yield
    oracle_server.wait_for_rest()
    assert 0 < oracle_server.rounds() - before < SOON


def endless_tensors() -> dict[str, Any]:
    return {
        "input_ids": np.array([PROMPT], dtype=np.int32),
        "max_tokens": ints(MAX_TOKENS),
        "tree_budget": ints(1),
        "ignore_eos": flags(True),
        "stream": flags(True),
    }


@pytest.mark.usefixtures("ends_soon")
def test_a_cancelled_grpc_stream(oracle_server: OracleServer) -> None:
    with grpc.InferenceServerClient(oracle_server.triton.grpc_url) as client:
        stream = Stream(client)
        stream.open()
        stream.send(endless_tensors())
        stream.next()
        client.stop_stream(cancel_requests=True)


@pytest.mark.usefixtures("ends_soon")
def test_leaving_the_clients_loop(oracle_server: OracleServer) -> None:
    with oracle_server.client() as client:
        for _ in client.stream(input_ids=PROMPT, **ENDLESS):
            break


@pytest.mark.usefixtures("ends_soon")
def test_a_closed_http_connection(oracle_server: OracleServer) -> None:
    connection = oracle_server.connect()
    body = json.dumps({"input_ids": PROMPT, **ENDLESS, "stream": True})
    connection.request("POST", "/v2/models/ddtree/generate_stream", body)
    assert connection.getresponse().read(20)
    connection.close()


@pytest.mark.usefixtures("ends_soon")
def test_stop_with_the_requests_id(oracle_server: OracleServer) -> None:
    with (
        grpc.InferenceServerClient(oracle_server.triton.grpc_url) as client,
        grpc.InferenceServerClient(oracle_server.triton.grpc_url) as other_client,
    ):
        stream, other = Stream(client), Stream(other_client)
        stream.open()
        other.open()
        stream.send(endless_tensors(), request_id="to-stop")
        received = [stream.next()]
        (answer,) = other.ask({"stop": flags(True)}, request_id="to-stop")
        assert answer.outputs["finish_reason"].tolist() == [b"cancelled"]
        while not received[-1].is_final:
            received.append(stream.next())
        assert [r.outputs["finish_reason"].item() for r in received] == [b""] * (len(received) - 1) + [
            b"cancelled"
        ]
        # What was held back comes with the last response: nothing is lost of what was said.
        ids = [t for r in received for t in r.outputs["output_ids"][0][0].tolist()]
        assert joined(received) == oracle_server.codec.decode(ids)
        client.stop_stream()
        other_client.stop_stream()


@pytest.mark.usefixtures("ends_soon")
def test_a_killed_client(oracle_server: OracleServer) -> None:
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, oracle_server.triton.grpc_url, str(MAX_TOKENS)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "chunk\n"
        reader.send_signal(signal.SIGKILL)


def test_a_missed_deadline(oracle_server: OracleServer) -> None:
    before = oracle_server.rounds()
    with oracle_server.client() as client, pytest.raises(DeadlineExceededError, match=r"within 0\.1 s"):
        client.generate(input_ids=PROMPT, deadline_s=0.1, **ENDLESS)
    oracle_server.wait_for_rest()
    assert oracle_server.rounds() - before < SOON


def test_a_deadline_on_the_server_gives_what_there_is(oracle_server: OracleServer) -> None:
    with oracle_server.client() as client:
        for deadline_ms in (100, 400, 1600):  # a busy machine may not come to the first token so soon
            try:
                answer = client.generate(input_ids=PROMPT, deadline_ms=deadline_ms, **ENDLESS)
            except ServerUnavailableError:
                continue
            if answer.token_ids:
                break
    assert answer.finish_reason == "deadline"
    assert 0 < len(answer.token_ids) < MAX_TOKENS
    assert list(answer.token_ids) == oracle_server.reference(PROMPT, len(answer.token_ids))


def test_tritons_own_timeout_of_a_request_is_a_deadline(oracle_server: OracleServer) -> None:
    with grpc.InferenceServerClient(oracle_server.triton.grpc_url) as client:
        stream = Stream(client)
        stream.open()
        received = stream.ask(endless_tensors(), timeout=100_000)  # microseconds
        assert received[-1].outputs["finish_reason"].item() == b"deadline"
        client.stop_stream()


def test_half_of_sixteen_streams_go_away_and_the_others_are_not_disturbed(
    oracle_server: OracleServer,
) -> None:
    expected = oracle_server.reference(PROMPT, 50)

    def read(number: int) -> list[int]:
        with oracle_server.client() as client:
            stream = client.stream(input_ids=PROMPT, max_tokens=50, tree_budget=number)
            for count, _ in enumerate(stream):
                if number % 2 and count == number // 4:
                    break
            else:
                return list(stream.result.token_ids)
        return []

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(read, range(16)))
    assert answers == [[] if number % 2 else expected for number in range(16)]


def test_a_client_that_goes_away_before_its_first_token(oracle_server: OracleServer) -> None:
    for _ in range(8):
        with oracle_server.client() as client:
            client.stream(input_ids=PROMPT * 60, **{**ENDLESS, "max_tokens": 20}).cancel()
