"""Bad requests get INVALID_ARGUMENT with field, rule and value, reach no stage, and disturb nobody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc

from tests.fakes.tiny_models import CONTEXT_LENGTH, VOCAB_SIZE
from tests.triton.echo_server import Stream, flags, floats, ints, text
from tests.triton.oracle_server import OracleServer

pytestmark = pytest.mark.triton

Tensors = dict[str, np.ndarray[Any, Any]]


def ids(*row: int) -> np.ndarray[Any, Any]:
    return np.array([row], dtype=np.int32)


def raw(*words: bytes) -> np.ndarray[Any, Any]:
    return np.array([words], dtype=np.object_)


@dataclass(frozen=True)
class Bad:
    """A request that must be refused, and what the refusal says, in order."""

    name: str
    tensors: Tensors
    says: tuple[str, ...]  # field, rule, value


def asks(**options: np.ndarray[Any, Any]) -> Tensors:
    return {"text_input": text("Hello"), **options}


CONTEXT = f"do not fit the context of {CONTEXT_LENGTH} tokens together"
PROMPTS = "exactly one of text_input, input_ids and messages is the prompt"
BAD = [
    Bad("empty text", {"text_input": text("")}, ("text_input", "must not be empty", "got b''")),
    Bad("empty ids", {"input_ids": ids()}, ("input_ids", "must not be empty", "got no ids")),
    Bad(
        "no ids by length",
        {"input_ids": ids(5), "input_lengths": ints(0)},
        ("input_ids", "must not be empty"),
    ),
    Bad(
        "empty messages",
        {"messages": text("[]")},
        ("messages", "a list of one message or more", "empty list"),
    ),
    Bad("no prompt", {"max_tokens": ints(3)}, (PROMPTS, "got none of them")),
    Bad("two prompts", asks(input_ids=ids(5)), (PROMPTS, "got text_input and input_ids")),
    Bad(
        "prompt and answer over the context",
        {"input_ids": ids(*range(200), *range(200)), "max_tokens": ints(CONTEXT_LENGTH - 399)},
        ("prompt of 400 tokens and max_tokens of 113", CONTEXT),
    ),
    Bad("prompt over the context", {"text_input": text("a" * 600)}, ("prompt of 600 tokens", CONTEXT)),
    Bad(
        "10 MB", {"text_input": text("a" * 10_000_000)}, ("text_input", "8192 bytes at most", "got 10000000")
    ),
    Bad(
        "10 MB of messages", {"messages": text("a" * 10_000_000)}, ("messages", "8192 bytes", "got 10000000")
    ),
    Bad("10 MB of ids", {"input_ids": ids(*[7] * 2_500_000)}, ("prompt of 2500000 tokens", CONTEXT)),
    Bad("no tokens wanted", asks(max_tokens=ints(0)), ("max_tokens", "must be above 0", "got 0")),
    Bad("fewer than none wanted", asks(max_tokens=ints(-7)), ("max_tokens", "must be above 0", "got -7")),
    Bad("by the other name", asks(request_output_len=ints(0)), ("max_tokens", "must be above 0", "got 0")),
    Bad(
        "two names disagree",
        asks(max_tokens=ints(3), request_output_len=ints(4)),
        ("request_output_len", "is another name of max_tokens", "got 4"),
    ),
    Bad(
        "temperature", asks(temperature=floats(-0.5)), ("temperature", "must be finite and 0 or more", "-0.5")
    ),
    Bad("temperature nan", asks(temperature=floats(np.nan)), ("temperature", "must be finite", "got nan")),
    Bad("top_p above", asks(top_p=floats(1.5)), ("top_p", "must be in [0, 1]", "got 1.5")),
    Bad("top_p below", asks(top_p=floats(-0.25)), ("top_p", "must be in [0, 1]", "got -0.25")),
    Bad("top_k", asks(top_k=ints(-2)), ("top_k", "must be -1 or 0 (off) or more", "got -2")),
    Bad("budget", asks(tree_budget=ints(257)), ("tree_budget", "must be in [0, 256] draft nodes", "got 257")),
    Bad("budget below", asks(tree_budget=ints(-2)), ("tree_budget", "must be in [0, 256]", "got -2")),
    Bad("draft mode", asks(draft_mode=text("forest")), ("draft_mode", "one of tree, chain, off", "'forest'")),
    Bad("beams", asks(beam_width=ints(2)), ("beam_width", "above 1 is not supported", "got 2")),
    Bad("no beam", asks(beam_width=ints(0)), ("beam_width", "must be above 0", "got 0")),
    Bad(
        "id above the vocabulary",
        {"input_ids": ids(1, 2, VOCAB_SIZE)},
        ("input_ids[2]", f"must be in the vocabulary [0, {VOCAB_SIZE})", f"got {VOCAB_SIZE}"),
    ),
    Bad("id below", {"input_ids": ids(-1)}, ("input_ids[0]", "must be in the vocabulary", "got -1")),
    Bad(
        "end id", asks(end_id=ints(VOCAB_SIZE)), ("end_id", "must be in the vocabulary", f"got {VOCAB_SIZE}")
    ),
    Bad("no UTF-8", {"text_input": raw(b"a\xff\xfe")}, ("text_input", "must be UTF-8", r"got b'\xff\xfe'")),
    Bad(
        "stop word of no UTF-8",
        asks(stop_words=raw(b"ok", b"\xc3")),
        ("stop_words[1]", "must be UTF-8", r"got b'\xc3'"),
    ),
    Bad(
        "empty stop word",
        asks(stop_words=raw(b"", b"x")),
        ("stop_words[0]", "must have 1 to 256 bytes", "got 0"),
    ),
    Bad("messages that are none", {"messages": text("{")}, ("messages", "must be JSON")),
    Bad(
        "a bad row",
        {"text_input": text("a", "b", ""), "max_tokens": ints(1, 2, 3)},
        ("row 2: text_input", "must not be empty"),
    ),
    Bad(
        "rows that do not agree",
        {"text_input": text("a", "b", "c"), "max_tokens": ints(1, 1, 0)},
        ("row 2: max_tokens", "must be above 0", "got 0"),
    ),
    Bad(
        "stop without an id",
        {"stop": flags(True)},
        ("stop needs the id of the request to cancel", "got none"),
    ),
]


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
        # All was answered. To cancel now, as the server closes the stream too, can make Triton 2.51 keep
        # a request for ever, so that the model is never unloaded (6 of 18 busy runs; 0 of 14 without).
        client.stop_stream()


def complaints(stream: Stream, bad: Bad) -> list[str]:
    """What is wrong with the answer to a bad request."""
    received = stream.ask(bad.tensors)
    error = received[0].error
    if len(received) != 1 or "INVALID_ARGUMENT: " not in error:
        return [f"{bad.name}: {len(received)} responses, the first is {received[0]}"]
    position, missing = 0, []
    for part in bad.says:
        found = error.find(part, position)
        if found < 0:
            missing.append(f"{bad.name}: no {part!r} in {error!r}")
        position = max(found, position)
    return missing


def test_every_bad_request_is_refused_and_reaches_no_stage(
    oracle_server: OracleServer, stream: Stream
) -> None:
    def ask() -> None:
        wrong = [complaint for bad in BAD for complaint in complaints(stream, bad)]
        assert not wrong, "\n".join(wrong)

    oracle_server.assert_reaches_no_stage(ask)


def test_other_streams_are_not_disturbed(oracle_server: OracleServer, stream: Stream) -> None:
    prompt = list(b"undisturbed")
    expected = oracle_server.reference(prompt, 250)
    is_over = False

    def read() -> list[list[int]]:
        answers = []
        while not is_over:
            with oracle_server.client() as client:
                answers.append(
                    list(client.generate(input_ids=prompt, max_tokens=250, tree_budget=4).token_ids)
                )
        return answers

    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(read) for _ in range(2)]
        try:
            wrong = [complaint for bad in BAD for complaint in complaints(stream, bad)]
        finally:
            is_over = True
        answers = [answer for each in reading for answer in each.result()]
    assert not wrong, "\n".join(wrong)
    assert all(answer == expected for answer in answers)


@pytest.mark.parametrize(
    "neutral",
    [
        {"top_p": floats(0.0)},
        {"top_p": floats(1.0), "temperature": floats(0.0), "beam_width": ints(1)},
        {"temperature": floats(0.7), "top_k": ints(1)},
        {"tree_budget": ints(-1), "stop_words": raw(b""), "bad_words": raw(b"")},
        {"tree_budget": ints(256), "draft_mode": text("tree")},
    ],
)
def test_values_that_change_nothing_are_accepted(
    oracle_server: OracleServer, stream: Stream, neutral: Tensors
) -> None:
    (received,) = stream.ask(asks(max_tokens=ints(8), **neutral))
    assert received.error == ""
    prompt = oracle_server.codec.encode("Hello")
    assert received.outputs["output_ids"][0][0].tolist() == oracle_server.reference(prompt, 8)


def test_absent_values_mean_greedy_and_sixteen_tokens(oracle_server: OracleServer, stream: Stream) -> None:
    (received,) = stream.ask(asks(ignore_eos=flags(True)))
    prompt = oracle_server.codec.encode("Hello")
    expected = oracle_server.reference(prompt, 16)
    assert received.outputs["output_ids"][0][0].tolist()[: len(expected)] == expected
    assert received.outputs["output_ids"].shape == (1, 1, 16)


def test_http_maps_a_refusal_to_bad_request(oracle_server: OracleServer) -> None:
    status, body = oracle_server.post("generate", {"text_input": "Hello", "max_tokens": 0})
    assert status == 400
    assert "INVALID_ARGUMENT: max_tokens must be above 0, got 0" in json.loads(body)["error"]
    status, body = oracle_server.post("generate_stream", {"text_input": "", "stream": True})
    assert "INVALID_ARGUMENT: text_input must not be empty" in body
