"""What goes over the wire of a stream, field by field, against the API's own types without room for more."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from tests.triton.gateway.running import Gateway

pytestmark = pytest.mark.triton

CHAT = {"model": "ddtree", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "seed": 1}
TEXT = {"model": "ddtree", "prompt": "Hi", "max_tokens": 12, "seed": 1}
EXTENSIONS = {"metrics", "warnings"}  # at the root, where vLLM has the first and aiperf reads it


def assert_is(kind: type[BaseModel], value: dict[str, Any]) -> None:
    """Every field is one of the API's, at every depth, and has its type."""
    parsed = kind.model_validate(value, strict=True)
    assert unknown_fields(parsed) <= EXTENSIONS
    assert parsed.model_dump(exclude_unset=True, by_alias=True) == value


def unknown_fields(value: Any) -> set[str]:
    """Names that a parsed body has and its type does not."""
    if isinstance(value, BaseModel):
        found = set(value.model_extra or ())
        return found.union(*(unknown_fields(getattr(value, name)) for name in type(value).model_fields))
    if isinstance(value, list):
        return set().union(*map(unknown_fields, value))
    return set()


def events(gateway: Gateway, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of every event; the last one is the word that ends the stream."""
    with httpx.stream("POST", f"{gateway.url}{path}", json={**body, "stream": True}, timeout=30) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        text = response.read().decode()
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    assert data[-1] == "[DONE]"
    return [json.loads(each) for each in data[:-1]]


def test_a_chat_begins_with_the_role_and_ends_with_the_reason(gateway: Gateway) -> None:
    chunks = events(gateway, "/v1/chat/completions", CHAT)
    for chunk in chunks:
        assert_is(ChatCompletionChunk, chunk)
        assert "usage" not in chunk
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert middle
    assert all(choice["delta"].keys() == {"content"} for choice in middle)
    assert [choice["finish_reason"] for choice in (first, *middle)] == [None] * (len(middle) + 1)
    assert (last["delta"], last["finish_reason"]) == ({}, "length")


def test_usage_comes_alone_at_the_end_when_asked_for(gateway: Gateway) -> None:
    body = {**CHAT, "stream_options": {"include_usage": True}}
    *chunks, usage = events(gateway, "/v1/chat/completions", body)
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert_is(ChatCompletionChunk, usage)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    whole = httpx.post(f"{gateway.url}/v1/chat/completions", json=CHAT, timeout=30).json()
    assert_is(ChatCompletion, whole)
    tokens = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [usage["usage"][name] for name in tokens] == [whole["usage"][name] for name in tokens]
    assert usage["metrics"].keys() == whole["metrics"].keys() == {"speculative_decoding"}


def test_log_probs_stream_with_their_tokens(gateway: Gateway) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    chunks = events(gateway, "/v1/chat/completions", body)
    for chunk in chunks:
        assert_is(ChatCompletionChunk, chunk)
    shown = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    entries = [entry for each in shown if each for entry in each["content"]]
    whole = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=30).json()
    assert_is(ChatCompletion, whole)
    expected = whole["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [entry["bytes"] for entry in expected]
    assert len(entries) == 12


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"logprobs": 2}, {"stream_options": {"include_usage": True}}])
def test_completions_keep_to_the_schema(gateway: Gateway, more: dict[str, Any]) -> None:
    chunks = events(gateway, "/v1/completions", {**TEXT, **more})
    for chunk in chunks:
        if chunk["choices"] and "finish_reason" in chunk["choices"][0]:
            # The package's type is that of whole answers, whose reason is never null.
            reason = chunk["choices"][0]["finish_reason"]
            chunk["choices"][0]["finish_reason"] = reason or "stop"
        assert_is(Completion, chunk)
    assert_is(
        Completion, httpx.post(f"{gateway.url}/v1/completions", json={**TEXT, **more}, timeout=30).json()
    )


def test_n_sequences_are_told_apart(gateway: Gateway) -> None:
    chunks = events(gateway, "/v1/chat/completions", {**CHAT, "n": 3})
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["index"] for choice in choices if "role" in choice["delta"]] == [0, 1, 2]
    ended = [choice["index"] for choice in choices if choice["finish_reason"]]
    assert sorted(ended) == [0, 1, 2]
