"""The model `ddtree` in a real tritonserver, its engine replaced by an echo (see tests/fakes/echo_model)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc

from tests.fakes import tokenizers
from tests.triton.echo_server import (
    EXISTING_CLIENTS,
    FOX,
    EchoServer,
    Prepared,
    Stream,
    flags,
    floats,
    ints,
    joined,
    one,
    text,
)

pytestmark = pytest.mark.triton


SLOW = "slow " + "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, project_root: Path) -> Prepared:
    target = tokenizers.save_target(tmp_path_factory.mktemp("target"), tokenizers.byte_level(), eos=1)
    repository = tmp_path_factory.mktemp("models")
    shutil.copytree(project_root / "tests" / "fakes" / "echo_model", repository / "ddtree")
    shutil.copy(project_root / "model_repository" / "ddtree" / "config.pbtxt", repository / "ddtree")
    return Prepared(repository, target)


@pytest.fixture(scope="module")
def server(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EchoServer]:
    with prepared.server(tmp_path_factory.mktemp("log") / "triton.log") as server:
        yield server
        report = server.triton.stop()
        assert (report.exit_code, report.forced, report.orphans_killed) == (0, False, 0)
        assert "the echo engine was stopped" in server.triton.log_path.read_text(errors="replace")


@pytest.fixture
def stream(server: EchoServer) -> Iterator[Stream]:
    with grpc.InferenceServerClient(server.triton.grpc_url) as client:
        stream = Stream(client)
        stream.open()
        yield stream
        # All was answered. To cancel now, as the server closes the stream too, can make Triton 2.51 keep
        # a request for ever, so that the model is never unloaded (6 of 18 busy runs; 0 of 14 without).
        client.stop_stream()


def test_a_stream_gives_deltas_and_the_last_one_is_final(server: EchoServer, stream: Stream) -> None:
    received = stream.ask({"text_input": text(FOX), "max_tokens": ints(100), "stream": flags(True)})
    ids = server.codec.encode(FOX)
    assert len(received) == -(-len(ids) // 3)
    assert joined(received) == FOX
    assert [response.is_final for response in received] == [False] * (len(received) - 1) + [True]
    assert [response.outputs["finish_reason"].tolist() for response in received[-2:]] == [[b""], [b"stop"]]
    sent = [token for response in received for token in response.outputs["output_ids"][0][0].tolist()]
    assert sent == [*ids, 1]
    assert sum(one(response, "num_output_tokens") for response in received) == len(sent)
    last = received[-1].outputs
    assert {name: array.shape for name, array in last.items()} == {
        "text_output": (1,),
        "finish_reason": (1,),
        "output_ids": (1, 1, last["num_output_tokens"][0, 0]),
        **dict.fromkeys(
            ("sequence_length", "batch_index", "sequence_index", "num_input_tokens", "num_output_tokens",
             "num_rounds", "total_draft_tokens", "total_accepted_draft_tokens", "acceptance_rate"),
            (1, 1),
        ),
    }  # fmt: skip
    assert one(received[-1], "num_input_tokens") == len(ids)
    rounds = len(received) - 1
    assert (one(received[-1], "num_rounds"), one(received[-1], "total_draft_tokens")) == (rounds, 5 * rounds)
    accepted = one(received[-1], "total_accepted_draft_tokens")
    assert one(received[-1], "acceptance_rate") == pytest.approx(accepted / (5 * rounds))
    assert "num_rounds" not in received[0].outputs


def test_without_stream_there_is_one_response(server: EchoServer, stream: Stream) -> None:
    received = stream.ask({"text_input": text(FOX), "max_tokens": ints(100)})
    assert len(received) == 1
    assert joined(received) == FOX
    assert one(received[0], "num_output_tokens") == len(server.codec.encode(FOX)) + 1


def test_only_wanted_outputs_are_sent(stream: Stream) -> None:
    outputs = [grpc.InferRequestedOutput("text_output"), grpc.InferRequestedOutput("cum_log_probs")]
    received = stream.ask({"text_input": text(FOX), "stream": flags(True)}, outputs=outputs)
    assert {name for response in received for name in response.outputs} == {"text_output"}


def test_rows_are_sequences_and_the_last_to_end_is_final(stream: Stream) -> None:
    rows = ("a", FOX, "The fox")
    received = stream.ask(
        {"text_input": text(*rows), "max_tokens": ints(50, 50, 2), "stream": flags(*[True] * 3)}
    )
    for index, expected in enumerate(("a", FOX, None)):
        own = [response for response in received if one(response, "batch_index") == index]
        assert expected is None or joined(own) == expected
        assert sum(bool(response.outputs["finish_reason"][0]) for response in own) == 1
    assert one(received[-1], "batch_index") == 1
    assert [response.is_final for response in received].count(True) == 1


def test_rows_without_stream_give_one_response_each(stream: Stream) -> None:
    received = stream.ask({"text_input": text("a", "b"), "stream": flags(False, False)})
    assert sorted((one(r, "batch_index"), joined([r])) for r in received) == [
        (0, "a"),
        (1, "b"),
    ]


def test_the_prompt_comes_back_when_asked_for(server: EchoServer, stream: Stream) -> None:
    ask = {"text_input": text(FOX), "max_tokens": ints(2), "exclude_input_in_output": flags(False)}
    (whole,) = stream.ask(ask)
    ids = server.codec.encode(FOX)
    assert joined([whole]) == FOX + server.codec.decode(ids[:2])
    assert whole.outputs["output_ids"][0][0].tolist() == [*ids, *ids[:2]]
    assert (one(whole, "sequence_length"), one(whole, "num_output_tokens")) == (len(ids) + 2, 2)


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"max_tokens": ints(3)}, "INVALID_ARGUMENT: exactly one of text_input, input_ids and messages"),
        (
            {"text_input": np.array([[b"\xff\xfe"]], dtype=np.object_)},
            "INVALID_ARGUMENT: text_input must be UTF-8",
        ),
        ({"text_input": text("a" * 10_000_000)}, "INVALID_ARGUMENT: text_input may have 8192 bytes at most"),
        (
            {"text_input": text("a fox " * 1000)},
            "INVALID_ARGUMENT: prompt of .* do not fit the context of 512",
        ),
        ({"text_input": text("a"), "beam_width": ints(2)}, "INVALID_ARGUMENT: beam_width above 1"),
        ({"input_ids": np.array([[1, 400]], np.int32)}, r"INVALID_ARGUMENT: input_ids\[1\] must be in"),
        (
            {"text_input": text("a", ""), "stream": flags(True, True)},
            "INVALID_ARGUMENT: row 1: text_input must not",
        ),
        ({"stop": flags(True)}, "INVALID_ARGUMENT: stop needs the id"),
    ],
)
def test_bad_requests_get_one_error(
    server: EchoServer, stream: Stream, tensors: dict[str, np.ndarray[Any, Any]], complaint: str
) -> None:
    before = server.report()
    (received,) = stream.ask(tensors)
    with pytest.raises(AssertionError, match=complaint):
        raise AssertionError(received.error)
    after = server.report()
    assert sum(after.values()) - sum(before.values()) == 1, "only the report itself reached the engine"


def test_errors_carry_a_status_for_clients_that_ask(prepared: Prepared, tmp_path: Path) -> None:
    # A server of its own: Triton 2.51 uses freed memory after such an error (server #8708), and sometimes
    # dies of it when the status has long arrived.
    with prepared.server(tmp_path / "triton.log") as server:
        for prompt, status in (("", "INVALID_ARGUMENT"), ("fail and fail", "UNAVAILABLE")):
            with grpc.InferenceServerClient(server.triton.grpc_url) as client:
                stream = Stream(client)
                stream.open(headers={"triton_grpc_error": "true"})
                (received,) = stream.ask({"text_input": text(prompt)})
                assert received.status == f"StatusCode.{status}"


def test_generate_maps_a_refusal_to_bad_request(server: EchoServer) -> None:
    status, body = server.post("generate", {"text_input": "", "max_tokens": 3})
    assert status == 400
    assert "INVALID_ARGUMENT: text_input must not be empty" in json.loads(body)["error"]


def test_generate_and_generate_stream(server: EchoServer) -> None:
    ask = {"text_input": FOX, "max_tokens": 100, "bad_words": "", "stop_words": ""}
    status, body = server.post("generate", ask)
    assert (status, json.loads(body)["text_output"]) == (200, FOX)
    status, body = server.post("generate_stream", {**ask, "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line]
    assert status == 200
    assert "".join(event["text_output"] for event in events) == FOX
    assert [event["finish_reason"] for event in events][-2:] == ["", "stop"]


def test_an_engine_that_fails_ends_the_request_with_its_error(stream: Stream) -> None:
    received = stream.ask({"text_input": text("fail and fail"), "stream": flags(True)})
    assert len(received) == 2
    assert received[-1].error.endswith("UNAVAILABLE: the engine was told to fail; retry later")


def test_what_nobody_foresaw_is_an_error_without_details(server: EchoServer, stream: Stream) -> None:
    received = stream.ask({"text_input": text("bug and bug")}, request_id="r7")
    assert len(received) == 1
    assert received[0].error.endswith("INTERNAL: the server failed on request 'r7'; its log says why")
    assert "nobody foresaw this" in server.triton.log_path.read_text(errors="replace")


def test_one_row_that_fails_ends_the_others(server: EchoServer, stream: Stream) -> None:
    before = server.report().get("cancelled", 0)
    received = stream.ask({"text_input": text(SLOW, "fail and fail"), "max_tokens": ints(200, 200)})
    assert len(received) == 1
    assert "told to fail" in received[0].error
    server.wait_for_cancelled(before + 1)


def test_stop_cancels_the_request_of_the_same_id(server: EchoServer, stream: Stream) -> None:
    ask = {"text_input": text(SLOW), "max_tokens": ints(200), "stream": flags(True)}
    stream.send(ask, request_id="to-stop")
    assert stream.next().outputs["text_output"] != b""
    with grpc.InferenceServerClient(server.triton.grpc_url) as client:
        other = Stream(client)
        other.open()
        (answer,) = other.ask({"stop": flags(True)}, request_id="to-stop")
        assert answer.outputs["finish_reason"].tolist() == [b"cancelled"]
        assert "output_ids" not in answer.outputs
        client.stop_stream()
    received = [stream.next()]
    while not received[-1].is_final:
        received.append(stream.next())
    assert received[-1].outputs["finish_reason"].tolist() == [b"cancelled"]
    assert len(joined(received)) < len(SLOW)


def test_stop_of_an_ended_request_is_no_error(stream: Stream) -> None:
    (answer,) = stream.ask({"stop": flags(True)}, request_id="long-gone")
    assert answer.error == ""


def test_a_client_that_cancels_ends_the_sequence(server: EchoServer) -> None:
    before = server.report().get("cancelled", 0)
    with grpc.InferenceServerClient(server.triton.grpc_url) as client:
        stream = Stream(client)
        stream.open()
        stream.send({"text_input": text(SLOW), "max_tokens": ints(200), "stream": flags(True)})
        stream.next()
        client.stop_stream(cancel_requests=True)
    server.wait_for_cancelled(before + 1)


def test_a_dropped_connection_ends_the_sequence(server: EchoServer) -> None:
    before = server.report().get("cancelled", 0)
    connection = server.connect()
    body = json.dumps({"text_input": SLOW, "max_tokens": 200, "stream": True})
    connection.request("POST", "/v2/models/ddtree/generate_stream", body)
    assert connection.getresponse().read(20)
    connection.close()
    server.wait_for_cancelled(before + 1)


def test_many_requests_overlap(server: EchoServer, stream: Stream) -> None:
    for number in range(8):
        stream.send({"text_input": text(SLOW), "max_tokens": ints(12)}, request_id=str(number))
    assert all(stream.next().is_final for _ in range(8))
    assert server.report()["most at once"] >= 4


@pytest.mark.parametrize("name", EXISTING_CLIENTS)
def test_tensors_of_existing_clients(stream: Stream, name: str) -> None:
    assert joined(stream.ask(EXISTING_CLIENTS[name])) == FOX


def test_tensors_of_the_token_dialect(server: EchoServer, stream: Stream) -> None:
    ids = server.codec.encode(FOX)
    ask = {
        "input_ids": np.array([ids], np.int32), "input_lengths": ints(len(ids)), "streaming": flags(True),
        "request_output_len": ints(100), "runtime_top_k": ints(1), "runtime_top_p": floats(0.0),
        "end_id": ints(1), "pad_id": ints(1), "beam_width": ints(1), "temperature": floats(1.0),
        "min_length": ints(0),
    }  # fmt: skip
    received = stream.ask(ask)
    tokens: list[int] = []
    for response in received:
        assert response.outputs["sequence_length"][0][0] == len(response.outputs["output_ids"][0][0])
        tokens += list(response.outputs["output_ids"][0][0])
    assert tokens == [*ids, 1]
