"""Which server a request goes to."""

from __future__ import annotations

import pytest

from ddtree_client import InvalidRequestError, ServerUnavailableError
from ddtree_client.metrics import ClientMetrics
from ddtree_gateway.endpoints import Endpoints
from ddtree_gateway.generation import Generation
from ddtree_gateway.options import completion_order
from ddtree_gateway.schema import CompletionRequest
from ddtree_gateway.settings import Settings, SettingsError


def order(endpoints: Endpoints) -> list[str]:
    return [endpoint.client.address for endpoint in endpoints.by_load()]


async def test_ready_ones_first_then_the_least_busy_then_in_turns() -> None:
    endpoints = Endpoints(Settings(endpoints=("a:1", "b:1", "c:1")))
    first, second, third = endpoints.all
    assert not endpoints.is_ready
    for each in (first, second, third):
        each.note(ready=True)
    assert endpoints.is_ready
    assert {order(endpoints)[0] for _ in range(3)} == {"a:1", "b:1", "c:1"}
    with first.serving(), first.serving(), second.serving():
        assert order(endpoints) == ["c:1", "b:1", "a:1"]
        third.note(ready=False)
        assert order(endpoints) == ["b:1", "a:1", "c:1"]
    assert [each.in_flight for each in endpoints.all] == [0, 0, 0]
    await endpoints.stop()


async def test_a_server_that_is_not_there_is_not_ready() -> None:
    endpoints = Endpoints(Settings(endpoints=("127.0.0.1:1",), check_interval_s=60))
    await endpoints.start()
    assert not endpoints.is_ready
    await endpoints.stop()


async def test_a_server_that_has_died_since_the_last_look_is_noticed_by_its_first_caller() -> None:
    settings = Settings(endpoints=("127.0.0.1:1",), check_interval_s=60)
    endpoints = Endpoints(settings)
    endpoints.all[0].note(ready=True)
    request = CompletionRequest.model_validate({"model": "ddtree", "prompt": "x"})
    generation = Generation(completion_order(request, settings), endpoints, ClientMetrics())
    with pytest.raises(ServerUnavailableError):
        await anext(generation.chunks())
    assert not endpoints.is_ready
    assert endpoints.all[0].in_flight == 0
    await endpoints.stop()


def test_settings_say_what_is_wrong() -> None:
    with pytest.raises(SettingsError, match="endpoints needs at least one"):
        Settings(endpoints=())
    with pytest.raises(SettingsError, match="max_body_bytes must be above 0, got 0"):
        Settings(endpoints=("a:1",), max_body_bytes=0)
    with pytest.raises(InvalidRequestError, match="HOST:PORT"):
        Endpoints(Settings(endpoints=("http://a",)))
