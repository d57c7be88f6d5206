"""What others reported of speculation behind Triton, tried here; docs/RELIABILITY.md names each report."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from tests.triton.oracle_server import OracleServer

pytestmark = pytest.mark.triton

PROMPT = list(b"reported")
LONG: dict[str, Any] = {"max_tokens": 120, "tree_budget": 8, "ignore_eos": True}


@pytest.fixture(autouse=True)
def quiet_afterwards(oracle_server: OracleServer) -> Iterator[None]:
    yield
    oracle_server.assert_quiet()


def test_a_hundred_callers_who_leave_do_not_end_the_server(oracle_server: OracleServer) -> None:
    def leave(number: int) -> None:
        with oracle_server.client() as client, client.stream(input_ids=PROMPT, **LONG) as stream:
            for count, _ in enumerate(stream):
                if count >= number % 3:
                    break

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(leave, range(100)))


@pytest.mark.parametrize("oracle_server", ["bls"], indirect=True)
def test_streams_share_the_calls_of_a_stage(oracle_server: OracleServer) -> None:
    oracle_server.set_pause(0.01)  # that who sends a moment later still meets the others
    before = oracle_server.executions("target_verifier")
    all_sent = threading.Barrier(8)

    def rounds(_: int) -> int:
        with oracle_server.client() as client:
            all_sent.wait(timeout=60)
            return client.generate(input_ids=PROMPT, **LONG).stats.rounds

    with ThreadPoolExecutor(8) as pool:
        total = sum(pool.map(rounds, range(8)))
    oracle_server.set_pause(0.0)
    assert oracle_server.executions("target_verifier") - before < total / 2


def test_rows_of_one_request_are_drafted_and_streamed_together(oracle_server: OracleServer) -> None:
    prompts = ["one", "another one", "a third"]
    with oracle_server.client() as client:
        answers = client.generate_many(prompts, **LONG)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = oracle_server.reference(oracle_server.codec.encode(prompt), LONG["max_tokens"])
        assert list(answer.token_ids)[: len(expected)] == expected
        assert answer.stats.accepted_draft_tokens > 0


def test_twenty_six_streams_all_begin_before_one_has_ended(oracle_server: OracleServer) -> None:
    everybody_has_begun = threading.Barrier(26)

    def read(_: int) -> int:
        count = 0
        with oracle_server.client() as client:
            for chunk in client.stream(input_ids=PROMPT, max_tokens=100, draft_mode="off", ignore_eos=True):
                if not count:
                    # One that waited for another's end would break the barrier.
                    everybody_has_begun.wait(timeout=60)
                count += len(chunk.token_ids)
        return count

    with ThreadPoolExecutor(26) as pool:
        assert list(pool.map(read, range(26))) == [100] * 26


def test_a_plain_call_of_the_streaming_model_says_what_it_is(oracle_server: OracleServer) -> None:
    tensor = grpc.InferInput("text_input", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[b"hello"]], dtype=np.object_))
    with (
        grpc.InferenceServerClient(oracle_server.triton.grpc_url) as client,
        pytest.raises(InferenceServerException, match="doesn't support models with decoupled"),
    ):
        client.infer("ddtree", [tensor])
