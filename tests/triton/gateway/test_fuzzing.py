"""Bodies made from the service's own OpenAPI document: whatever is sent, the answer is never a failure."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok

from ddtree_gateway.schema import ChatRequest
from tests.triton.gateway.running import Gateway

pytestmark = pytest.mark.triton


BOUNDED = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def test_no_body_makes_it_fail(gateway: Gateway) -> None:
    document = schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")
    operations = [each.ok() for each in document.get_all_operations() if isinstance(each, Ok)]
    assert {operation.path for operation in operations} >= {"/v1/chat/completions", "/v1/completions"}
    for operation in operations:

        @BOUNDED
        @given(case=operation.as_strategy())
        def answer_is_no_failure(case: Any) -> None:
            case.call_and_validate(checks=[not_a_server_error], timeout=30)

        answer_is_no_failure()


def test_a_sound_body_with_one_odd_value_does_not_make_it_fail(gateway: Gateway) -> None:
    """Made bodies rarely get past the first check, so values are changed one at a time as well."""
    sound = {"model": "ddtree", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    names = sorted(ChatRequest.model_fields)
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
        max_leaves=5,
    )

    @settings(parent=BOUNDED, max_examples=150)
    @given(name=st.sampled_from(names), value=values)
    def answer_is_no_failure(name: str, value: Any) -> None:
        body = json.dumps({**sound, name: value}).encode()
        headers = {"content-type": "application/json"}
        answer = client.post("/v1/chat/completions", content=body, headers=headers)
        assert answer.status_code in (200, 400, 404), (body, answer.text)
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]

    with httpx.Client(base_url=gateway.url, timeout=30) as client:
        answer_is_no_failure()
