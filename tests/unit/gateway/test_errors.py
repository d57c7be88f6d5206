"""Failures as the API words them."""

from __future__ import annotations

import pytest

from ddtree_client import InvalidRequestError, OverloadedError, ServerUnavailableError
from ddtree_gateway.errors import from_client


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ("top_k must be small, got 7; lower it", "top_k", "invalid_value"),
        ("stop_words[3] must have 1 to 256 bytes, got 0; leave it out", "stop[3]", "invalid_value"),
        ("messages[0].content[1] must be a part of type 'text'", "messages[0].content[1]", "invalid_value"),
        ("guided_json cannot be compiled", "response_format", "invalid_value"),
        ("num_return_sequences above 1 needs a temperature", "n", "invalid_value"),
        ("row 2: temperature must be finite", "temperature", "invalid_value"),
        ("prompt of 9 tokens and more do not fit the context", None, "context_length_exceeded"),
        ("messages cannot be rendered with the target's chat template", "messages", "invalid_value"),
        ("text_input is long, more cannot fit the context", "prompt", "context_length_exceeded"),
        ("exactly one of text_input and messages is the prompt", None, "invalid_value"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_apis_parameter(message: str, param: str | None, code: str) -> None:
    error = from_client(InvalidRequestError(message))
    assert (error.status, error.param, error.code) == (400, param, code)
    assert error.body == {
        "error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    }


@pytest.mark.parametrize(
    ("said", "wait"), [("full; retry in 7 s", "7"), ("retry in 0.2 s", "1"), ("full", "1"), ("in 9 s", "1")]
)
def test_the_wait_is_in_whole_seconds_and_never_none(said: str, wait: str) -> None:
    assert from_client(OverloadedError(said)).headers == {"retry-after": wait}
    assert from_client(ServerUnavailableError(said)).headers == {"retry-after": wait}
