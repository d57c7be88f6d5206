"""Answers of the real model through a real server: streams, rows, dialects, and where an answer ends."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc

from tests.fakes.tiny_models import BLOCK_SIZE, CONTEXT_LENGTH
from tests.triton.echo_server import Stream, flags, floats, ints, joined, one, text
from tests.triton.oracle_server import SPARK, SPOKEN, OracleServer

pytestmark = pytest.mark.triton

LONG = 60


@pytest.fixture(autouse=True)
def quiet_afterwards(oracle_server: OracleServer) -> Iterator[None]:
    yield
    oracle_server.assert_quiet()


@pytest.fixture
def stream(oracle_server: OracleServer) -> Iterator[Stream]:
    with grpc.InferenceServerClient(oracle_server.triton.grpc_url) as client:
        stream = Stream(client)
        stream.open()
        yield stream
        client.stop_stream()  # see test_orchestrator: no cancel after the end


@pytest.fixture
def sure_oracle(oracle_server: OracleServer) -> Iterator[None]:
    """Every draft is accepted, so that what ends an answer lies inside a path."""
    oracle_server.set_noise(0.0)
    yield
    oracle_server.set_noise(0.6)


def prompt_of(seed: int, length: int = 20) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(256) for _ in range(length)]


def id_rows(*rows: list[int]) -> np.ndarray[Any, Any]:
    return np.array(rows, dtype=np.int32)


@pytest.mark.parametrize("seed", range(3))
def test_deltas_join_to_the_whole_answer_and_to_decoding_its_ids(
    oracle_server: OracleServer, seed: int
) -> None:
    server = oracle_server
    prompt = [*prompt_of(seed), SPARK]
    expected = server.reference(prompt, LONG)
    ask = {"input_ids": prompt, "max_tokens": LONG, "tree_budget": 12}
    with server.client() as client:
        streamed = client.stream(input_ids=prompt, max_tokens=LONG, tree_budget=12)
        chunks = list(streamed)
    status, body = server.post("generate", {**ask, "stream": False})
    assert status == 200, body
    assert len(chunks) > 2
    assert "".join(chunk.text for chunk in chunks) == json.loads(body)["text_output"]
    assert streamed.result.text == server.codec.decode(expected)
    assert streamed.result.text.startswith(SPOKEN)
    assert [token for chunk in chunks for token in chunk.token_ids] == expected
    assert json.loads(body)["output_ids"] == expected


def test_a_character_is_sent_once_it_is_whole(oracle_server: OracleServer) -> None:
    with oracle_server.client() as client:
        chunks = list(
            client.stream(input_ids=[*prompt_of(1), SPARK], max_tokens=len(SPOKEN.encode()), draft_mode="off")
        )
    assert [chunk.text for chunk in chunks] == ["", "", "", "😀", "", "é", "", "", "世"]
    assert [len(chunk.token_ids) for chunk in chunks] == [1] * 9


def test_the_final_flag_comes_once_and_with_data(stream: Stream) -> None:
    for is_streamed in (True, False):
        ask = {
            "input_ids": id_rows(prompt_of(1)),
            "max_tokens": ints(LONG),
            "tree_budget": ints(8),
            "stream": flags(is_streamed),
        }
        # A client that wants empty final responses would be told of a second one.
        received = stream.ask(ask, enable_empty_final_response=True)
        time.sleep(0.2)
        assert stream.responses.empty()
        assert len(received) > 2 if is_streamed else len(received) == 1
        assert [response.is_final for response in received] == [False] * (len(received) - 1) + [True]
        assert all(response.outputs["output_ids"].size > 0 for response in received)
        assert bool(received[-1].outputs["finish_reason"][0])


def test_eight_streams_at_once(oracle_server: OracleServer) -> None:
    def read(seed: int) -> tuple[list[int], str]:
        with oracle_server.client() as client:
            answer = client.stream(input_ids=prompt_of(seed), max_tokens=LONG, tree_budget=2 * seed)
            texts = [chunk.text for chunk in answer]
            return list(answer.result.token_ids), "".join(texts)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(read, range(8)))
    for seed, (ids, said) in enumerate(answers):
        expected = oracle_server.reference(prompt_of(seed), LONG)
        assert (ids, said) == (expected, oracle_server.codec.decode(expected))


@pytest.mark.parametrize("is_streamed", [True, False])
def test_rows_are_sequences_of_their_own(
    oracle_server: OracleServer, stream: Stream, is_streamed: bool
) -> None:
    server = oracle_server
    texts, limits = ("a", "The second row", "😀"), (25, 3, 40)
    received = stream.ask(
        {
            "text_input": text(*texts),
            "max_tokens": ints(*limits),
            "tree_budget": ints(1, 16, 64),
            "stream": flags(*[is_streamed] * 3),
        }
    )
    assert [response.is_final for response in received].count(True) == 1
    for row, (prompt, max_tokens) in enumerate(zip(texts, limits, strict=True)):
        own = [response for response in received if one(response, "batch_index") == row]
        expected = server.reference(server.codec.encode(prompt), max_tokens)
        assert [t for response in own for t in response.outputs["output_ids"][0][0].tolist()] == expected
        assert joined(own) == server.codec.decode(expected)
        assert len(own) == 1 or is_streamed


def test_generate_gives_one_response_and_generate_stream_an_event_a_round(
    oracle_server: OracleServer,
) -> None:
    server = oracle_server
    ask = {"text_input": "Hello", "max_tokens": LONG, "tree_budget": 8}
    expected = server.codec.decode(server.reference(server.codec.encode("Hello"), LONG))
    status, body = server.post("generate", {**ask, "stream": False})
    assert (status, json.loads(body)["text_output"]) == (200, expected)
    status, body = server.post("generate_stream", {**ask, "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line]
    assert status == 200
    assert len(events) > 2
    assert "".join(event["text_output"] for event in events) == expected
    assert [bool(event["finish_reason"]) for event in events] == [False] * (len(events) - 1) + [True]


def test_messages_go_through_the_chat_template(oracle_server: OracleServer) -> None:
    server = oracle_server
    with server.client() as client:
        answer = client.generate(messages=[{"role": "user", "content": "Grüße"}], max_tokens=12)
    assert list(answer.token_ids) == server.reference(server.codec.encode("user: Grüße\nassistant:"), 12)


def test_tensors_of_the_token_dialect(oracle_server: OracleServer, stream: Stream) -> None:
    first, second = prompt_of(1), prompt_of(2, length=9)
    received = stream.ask(
        {
            "input_ids": id_rows(first, [*second, *[0] * 11]), "input_lengths": ints(20, 9),
            "request_output_len": ints(12, 7), "streaming": flags(True, True), "runtime_top_k": ints(1, 1),
            "runtime_top_p": floats(0, 0), "beam_width": ints(1, 1), "temperature": floats(1, 1),
        }
    )  # fmt: skip
    for row, (prompt, count) in enumerate(((first, 12), (second, 7))):
        own = [response for response in received if one(response, "batch_index") == row]
        tokens = []
        for response in own:
            tokens += response.outputs["output_ids"][0][0].tolist()
            assert one(response, "sequence_length") == response.outputs["output_ids"].shape[-1]
        assert tokens == oracle_server.reference(prompt, count)


# --- where an answer ends


@pytest.mark.usefixtures("sure_oracle")
@pytest.mark.parametrize("is_streamed", [True, False])
def test_nothing_after_a_stop_string_leaks(
    oracle_server: OracleServer, stream: Stream, is_streamed: bool
) -> None:
    server, prompt = oracle_server, [*prompt_of(1), SPARK]
    ids = server.reference(prompt, LONG)
    # Tokens 5 and 6 of the answer, when the first round's path goes on to the eighth.
    stops = np.array([["é".encode(), b"never", "é!".encode()]], dtype=np.object_)
    received = stream.ask(
        {
            "input_ids": id_rows(prompt), "max_tokens": ints(LONG), "tree_budget": ints(BLOCK_SIZE - 1),
            "stop_words": stops, "stream": flags(is_streamed),
        }
    )  # fmt: skip
    assert joined(received) == "😀"
    assert [t for r in received for t in r.outputs["output_ids"][0][0].tolist()] == ids[:6]
    assert received[-1].outputs["finish_reason"].tolist() == [b"stop"]
    # The verifier accepted seven; what was dropped does not count.
    assert (one(received[-1], "num_rounds"), one(received[-1], "total_accepted_draft_tokens")) == (1, 5)


@pytest.mark.usefixtures("sure_oracle")
def test_what_only_begins_like_a_stop_string_is_not_lost(oracle_server: OracleServer) -> None:
    server, prompt = oracle_server, [*prompt_of(1), SPARK]
    expected = server.reference(prompt, len(SPOKEN.encode()))
    with server.client() as client:
        answer = client.generate(
            input_ids=prompt, max_tokens=len(expected), stop=["世é", "é世!"], tree_budget=BLOCK_SIZE - 1
        )
    assert (answer.text, answer.finish_reason, list(answer.token_ids)) == (SPOKEN, "length", expected)


@pytest.mark.usefixtures("sure_oracle")
def test_a_stop_id_inside_a_path_is_the_last_one(oracle_server: OracleServer, stream: Stream) -> None:
    prompt = [*prompt_of(1), SPARK]
    ids = oracle_server.reference(prompt, LONG)
    (received,) = stream.ask(
        {
            "input_ids": id_rows(prompt), "max_tokens": ints(LONG), "end_id": ints(ids[5]),
            "tree_budget": ints(BLOCK_SIZE - 1),
        }
    )  # fmt: skip
    assert received.outputs["output_ids"][0][0].tolist() == ids[: ids.index(ids[5]) + 1]
    assert received.outputs["finish_reason"].tolist() == [b"stop"]


@pytest.mark.usefixtures("sure_oracle")
def test_max_tokens_is_met_exactly(oracle_server: OracleServer) -> None:
    prompt = prompt_of(2)
    ids = oracle_server.reference(prompt, 2 * BLOCK_SIZE + 2)
    assert len(ids) == 2 * BLOCK_SIZE + 2
    with oracle_server.client() as client:
        for count in range(1, len(ids) + 1):
            answer = client.generate(input_ids=prompt, max_tokens=count, tree_budget=64)
            assert (list(answer.token_ids), answer.finish_reason) == (ids[:count], "length")


@pytest.mark.parametrize("mode", ["tree", "chain", "off"])
def test_a_prompt_of_one_token(oracle_server: OracleServer, mode: str) -> None:
    with oracle_server.client() as client:
        answer = client.generate(input_ids=[7], max_tokens=20, draft_mode=mode)
    assert list(answer.token_ids) == oracle_server.reference([7], 20)


@pytest.mark.parametrize("length", [CONTEXT_LENGTH - 50, CONTEXT_LENGTH - 1])
def test_prompt_and_answer_fill_the_context_exactly(oracle_server: OracleServer, length: int) -> None:
    prompt = prompt_of(8, length)
    count = CONTEXT_LENGTH - length
    expected = oracle_server.reference(prompt, count)
    with oracle_server.client() as client:
        answer = client.generate(input_ids=prompt, max_tokens=count, tree_budget=256)
    assert list(answer.token_ids) == expected
