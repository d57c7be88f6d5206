"""Three times as many requests as there are places and queue: everybody is answered, in bounded time."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddtree_client import Client, DDTreeClientError
from tests.soak.world import World, soaked

pytestmark = pytest.mark.triton

PLACES, QUEUE = 4, 4
PROMPT = list(b"crowd")
TOKENS = 300  # so many that the first ones still run when the last ones come, on a busy machine too
# A refusal costs a look at a queue: what it may take is a busy machine's share.
_REFUSED_WITHIN_S = 20.0


@dataclass(frozen=True)
class Answer:
    """How one request ended."""

    tokens: tuple[int, ...]
    error: str
    seconds: float


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, project_root: Path) -> Iterator[World]:
    folder, places, queue = tmp_path_factory.mktemp("overload"), str(PLACES), str(QUEUE)
    with soaked(folder, project_root, DDTREE_MAX_SEQUENCES=places, DDTREE_MAX_WAITING=queue) as world:
        yield world
        report = world.triton.stop()
    assert (report.exit_code, report.orphans_killed, report.regions_removed) == (0, 0, 0)


def ask(client: Client) -> Answer:
    started = time.monotonic()
    try:
        answer = client.generate(input_ids=PROMPT, max_tokens=TOKENS, ignore_eos=True, draft_mode="off")
        tokens, error = answer.token_ids, ""
    except DDTreeClientError as refused:
        tokens, error = (), f"{refused.code}: {refused.message}"
    return Answer(tokens, error, time.monotonic() - started)


def test_a_crowd_gets_right_answers_or_refusals_that_say_when_to_retry(world: World) -> None:
    crowd = 3 * (PLACES + QUEUE)
    with world.client() as client, ThreadPoolExecutor(crowd) as pool:
        expected = ask(client)
        answers = list(pool.map(ask, [client] * crowd))
        refused = [answer for answer in answers if answer.error]
        served = [answer for answer in answers if not answer.error]
        assert all(answer.tokens == expected.tokens for answer in served)
        assert PLACES + QUEUE <= len(served) < crowd
        for answer in refused:
            assert re.match(r"RESOURCE_EXHAUSTED: .* retry in \d+(\.\d+)? s", answer.error), answer.error
            assert answer.seconds < _REFUSED_WITHIN_S
        assert ask(client).tokens == expected.tokens, "who comes back later is served"
    assert world.held_at_rest() == {"sessions": 0, "pages_used": 0}
