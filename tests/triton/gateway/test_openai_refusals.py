"""What the gateway refuses of the OpenAI API and what it lets pass, told by the official package."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.triton.gateway.running import MESSAGES, MODEL

pytestmark = pytest.mark.triton


@pytest.mark.parametrize(
    ("param", "more"),
    [
        ("tools", {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("temperature", {"temperature": -1}),
        ("top_p", {"top_p": 0}),
        ("n", {"n": 2, "temperature": 0}),
        ("n", {"n": 0}),
        ("stop", {"stop": ["x"] * 17}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("logit_bias", {"logit_bias": {"a": 1}}),
        ("logit_bias[1]", {"logit_bias": {"1": 500}}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
        ("response_format", {"response_format": {"type": "xml"}}),
        ("reasoning_effort", {"reasoning_effort": "high"}),
        ("modalities", {"modalities": ["audio"]}),
        ("store", {"store": True}),
        ("tree_budget", {"extra_body": {"tree_budget": 100_000}}),
        ("draft_mode", {"extra_body": {"draft_mode": "forest"}}),
        ("best_off", {"extra_body": {"best_off": 1}}),
        ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("messages[0]", {"messages": [{"role": "user"}]}),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(
    openai_client: OpenAI, param: str, more: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        openai_client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **more})
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [], "tool_choice": "none", "store": False, "user": "me", "metadata": {"a": "b"}},
        {"modalities": ["text"], "service_tier": "auto", "parallel_tool_calls": False},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, *MESSAGES]},
    ],
)
def test_what_asks_for_nothing_new_passes(openai_client: OpenAI, more: dict[str, Any]) -> None:
    answer = openai_client.chat.completions.create(
        **{"model": MODEL, "messages": MESSAGES, "max_tokens": 2, "temperature": 0, **more}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


def test_too_long_a_prompt_has_its_own_code(openai_client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="512 tokens") as refused:
        openai_client.completions.create(model=MODEL, prompt="x" * 600)
    assert refused.value.code == "context_length_exceeded"
