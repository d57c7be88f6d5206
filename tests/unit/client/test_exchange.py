"""Responses in order become chunks and results."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from ddtree_client.errors import (
    DeadlineExceededError,
    IncompleteAnswerError,
    InvalidRequestError,
    OverloadedError,
)
from ddtree_client.exchange import Exchange
from ddtree_client.wire import many_prompts


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def exchange(clock: Clock | None = None, rows: int = 1) -> Exchange:
    return Exchange(
        address="here:8001",
        model="ddtree",
        prompts=many_prompts(["x"] * rows, None),
        options={},
        deadline_s=4.0,
        clock=clock or Clock(),
    )


def data(text: str, *, row: int = 0, finish: str = "", tokens: int | None = None, **counters: int) -> Any:
    message = service_pb2.ModelStreamInferResponse()
    numbers = {"batch_index": row, **counters}
    if tokens is not None:
        numbers["num_output_tokens"] = tokens
    for name, number in numbers.items():
        message.infer_response.outputs.add(name=name, datatype="INT32", shape=[1, 1])
        message.infer_response.raw_output_contents.append(struct.pack("<i", number))
    for name, value in (("text_output", text), ("finish_reason", finish)):
        message.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1])
        encoded = value.encode()
        message.infer_response.raw_output_contents.append(struct.pack("<I", len(encoded)) + encoded)
    return message


def failure(text: str) -> Any:
    return service_pb2.ModelStreamInferResponse(error_message=text)


def test_the_last_chunk_comes_when_the_stream_is_closed() -> None:
    one = exchange()
    first = one.receive(data("a", tokens=1))
    assert first is not None
    assert (first.text, first.final) == ("a", False)
    assert not one.ended
    assert one.receive(data("b", tokens=1, finish="stop")) is None
    assert one.ended
    last = one.finish()
    assert (last.text, last.final, last.finish_reason) == ("b", True, "stop")
    assert one.results()[0].text == "ab"


def test_statistics_take_sums_per_chunk_and_the_newest_totals() -> None:
    clock = Clock()
    one = exchange(clock)
    clock.now += 0.25
    one.receive(data("", tokens=0, num_input_tokens=9))  # a chunk without a token is not the first token
    clock.now += 0.25
    one.receive(data("a", tokens=1, num_rounds=0))
    clock.now += 1.0
    one.receive(
        data(
            "bcd",
            tokens=3,
            finish="length",
            num_rounds=2,
            total_draft_tokens=32,
            total_accepted_draft_tokens=1,
        )
    )
    stats = one.results()[0].stats
    assert (stats.input_tokens, stats.output_tokens, stats.first_chunk_tokens) == (9, 4, 1)
    assert (stats.rounds, stats.draft_tokens, stats.accepted_draft_tokens) == (2, 32, 1)
    assert (stats.time_to_first_token_s, stats.total_s) == (0.5, 1.5)
    assert stats.tokens_per_second == 3.0


def test_rows_are_kept_apart() -> None:
    three = exchange(rows=3)
    for row, text, finish in ((2, "x", ""), (0, "a", "stop"), (2, "y", "length"), (1, "ü", "stop")):
        three.receive(data(text, row=row, finish=finish, tokens=1))
    assert [result.text for result in three.results()] == ["a", "ü", "xy"]
    assert three.finish().row == 1


def test_a_row_that_was_not_asked_for_is_refused() -> None:
    with pytest.raises(IncompleteAnswerError, match="row 1 of a request of 1 rows"):
        exchange().receive(data("a", row=1))


def test_an_error_is_raised_when_the_stream_is_closed() -> None:
    one = exchange()
    assert one.receive(failure("RESOURCE_EXHAUSTED: no pages")) is None
    assert one.ended
    one.close()
    with pytest.raises(OverloadedError, match="no pages"):
        one.finish()


def test_an_error_is_raised_at_once_when_other_rows_go_on() -> None:
    two = exchange(rows=2)
    two.receive(failure("INVALID_ARGUMENT: row 0"))
    with pytest.raises(InvalidRequestError, match="row 0"):
        two.receive(data("b", row=1))


def test_a_stream_closed_too_early_is_an_error() -> None:
    two = exchange(rows=2)
    two.receive(data("a", row=1, finish="stop"))
    two.close()
    with pytest.raises(IncompleteAnswerError, match=r"rows \[0\] of 2"):
        two.finish()


def test_a_broken_stream_is_an_error_unless_the_answer_is_complete() -> None:
    one = exchange()
    one.fail("DEADLINE_EXCEEDED", "late")
    with pytest.raises(DeadlineExceededError, match="within 4 s"):
        one.finish()
    other = exchange()
    other.receive(data("a", finish="stop"))
    other.fail("DEADLINE_EXCEEDED", "late")
    assert other.finish().text == "a"


def test_results_before_the_end_are_refused() -> None:
    one = exchange()
    one.receive(data("a"))
    with pytest.raises(IncompleteAnswerError, match="not read to its end"):
        one.results()
