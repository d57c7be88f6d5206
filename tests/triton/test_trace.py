"""Traces through a real server: they agree with the answer, and come to who lists them and to nobody else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from ddtree_client import Client
from tests.triton.oracle_server import OracleServer

pytestmark = pytest.mark.triton

PROMPT = tuple(b"The client wants to see")


@pytest.fixture
def client(oracle_server: OracleServer) -> Iterator[Client]:
    oracle_server.set_noise(0.5)
    with oracle_server.client() as opened:
        yield opened
    oracle_server.assert_quiet()


@pytest.mark.parametrize("draft_mode", ["tree", "chain", "off"])
def test_a_trace_agrees_with_the_answer(client: Client, draft_mode: str) -> None:
    stream = client.stream(
        input_ids=PROMPT, max_tokens=30, draft_mode=draft_mode, tree_budget=12, ignore_eos=True, trace=True
    )
    for chunk in stream:
        # Every chunk is one round, and its trace says what is in it.
        (told,) = chunk.trace
        assert tuple(told["emitted"]["ids"]) == chunk.token_ids
        assert told["finish_reason"] == chunk.finish_reason
    result = stream.result
    first, *rounds = result.trace
    assert first["drafting"] == "prefill"
    assert len(rounds) == result.stats.rounds
    assert "".join(text for each in result.trace for text in each["emitted"]["texts"]) == result.text
    assert sum(len(each["accepted_path"]) for each in rounds) == result.stats.accepted_draft_tokens
    assert sum(each["nodes_verified"] for each in rounds) == result.stats.draft_tokens
    for each in rounds:
        path, nodes = each["accepted_path"], each["nodes"]
        assert [nodes["ids"][node - 1] for node in path] == each["emitted"]["ids"][: len(path)]
        assert len(nodes["path_probabilities"]) == len(nodes["ids"])
        assert each["stage_ms"]["verify"] > 0
    assert {each["drafting"] for each in rounds} <= {"drafted", "last_token", "off"}
    assert (draft_mode == "off") == all(not each["nodes"]["ids"] for each in rounds)


def test_the_answer_is_the_same_with_and_without(client: Client) -> None:
    options = {"max_tokens": 20, "return_log_probs": True, "num_top_log_probs": 2, "ignore_eos": True}
    traced = client.generate(input_ids=PROMPT, trace=True, **options)  # type: ignore[arg-type]
    plain = client.generate(input_ids=PROMPT, **options)  # type: ignore[arg-type]
    assert (plain.trace, len(traced.trace) > 1) == ((), True)
    assert traced.token_ids == plain.token_ids
    # Rounded differently where other rows were verified beside them; which tokens is the same.
    assert [[token for token, _ in each.top] for each in traced.log_probs] == [
        [token for token, _ in each.top] for each in plain.log_probs
    ]
    assert [each.model for each in traced.log_probs] == pytest.approx(
        [each.model for each in plain.log_probs], abs=1e-4
    )
    assert traced.log_probs[0].token == plain.log_probs[0].token
    assert traced.stats.input_tokens == plain.stats.input_tokens == len(PROMPT)


def test_rows_of_one_request_have_traces_of_their_own(client: Client) -> None:
    rows = client.generate_many(["one", "zwei ü"], max_tokens=9, ignore_eos=True, trace=True)
    for row in rows:
        told = [token for each in row.trace for token in each["emitted"]["ids"]]
        assert tuple(told) == row.token_ids


def test_who_lists_no_outputs_gets_all_but_the_trace(oracle_server: OracleServer) -> None:
    body = {"text_input": "who asks", "max_tokens": 6, "stream": False}
    status, answer = oracle_server.post("generate", body)
    assert status == 200
    assert "num_rounds" in json.loads(answer)
    assert "trace" not in json.loads(answer)
    with closing(oracle_server.connect()) as connection:
        connection.request("GET", "/v2/models/ddtree")
        declared = json.loads(connection.getresponse().read())["outputs"]
    assert {"name": "trace", "datatype": "BYTES", "shape": [-1, -1]} in declared
