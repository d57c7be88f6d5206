"""A prompt that was served before is not read again, and answered alike, by a real server's own numbers."""

from __future__ import annotations

import random
import time

import pytest

from ddtree_client import Result
from tests.deploy.prometheus.scraping import Scrape, at_rest, scrape
from tests.triton.oracle_server import OracleServer

pytestmark = pytest.mark.triton

PAGE = 64  # the default


def hit_tokens(reading: Scrape) -> float:
    """Prompt tokens found in the cache so far."""
    return sum(reading.values("ddtree_prefix_cache_hit_tokens_total"))


def wait_for_hits(server: OracleServer, expected: float) -> None:
    """Metrics are published a moment later."""
    deadline = time.monotonic() + 30
    while (shown := hit_tokens(scrape(server.triton.metrics_url))) != expected:
        assert time.monotonic() < deadline, f"{shown} cached tokens are counted, {expected} were hit"
        time.sleep(0.05)


def hits_until_now(server: OracleServer) -> float:
    """Prompt tokens found in the cache by requests that have ended, though they may have just now."""
    ask(server, [1])  # the numbers come with the first request
    return hit_tokens(at_rest(server.triton.metrics_url))


def ask(server: OracleServer, prompt: list[int], **options: object) -> Result:
    with server.client() as client:
        return client.generate(input_ids=prompt, max_tokens=40, tree_budget=16, **options)  # type: ignore[arg-type]


def test_the_second_request_is_a_hit_with_the_same_answer(oracle_server: OracleServer) -> None:
    source = random.Random(77)
    prompt = [source.randrange(256) for _ in range(2 * PAGE + 20)]
    before = hits_until_now(oracle_server)
    expected = oracle_server.reference(prompt, 40)
    for hits in (0, 2 * PAGE, 4 * PAGE):
        assert list(ask(oracle_server, prompt).token_ids) == expected
        wait_for_hits(oracle_server, before + hits)
    # Another salt is another cache; an answer is a beginning too.
    assert list(ask(oracle_server, prompt, cache_salt="tenant").token_ids) == expected
    turn = [*prompt, *expected, *(source.randrange(256) for _ in range(9))]
    assert list(ask(oracle_server, turn).token_ids) == oracle_server.reference(turn, 40)
    wait_for_hits(oracle_server, before + 4 * PAGE + (len(prompt) + len(expected) - 1) // PAGE * PAGE)
    oracle_server.assert_quiet()


def test_a_salt_that_is_too_long_is_refused(oracle_server: OracleServer) -> None:
    status, body = oracle_server.post("generate", {"text_input": "x", "cache_salt": "s" * 300})
    assert status == 400
    assert "cache_salt may have 256 bytes at most" in body
