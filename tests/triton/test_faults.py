"""A stage's process is killed under sixteen streams: they go on, and a watchdog brings the stage back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_client.watchdog import Watchdog, WatchLimits
from tests.soak.drills import (
    EXIT_S,
    PROMPTS,
    STREAMS,
    Expected,
    expected_answers,
    kill_orchestrator,
    kill_stage,
)
from tests.soak.world import World, soaked

pytestmark = [pytest.mark.triton, pytest.mark.timeout(300)]
_TTL_S = 5


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, project_root: Path) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("faults")
    with soaked(folder, project_root, exit_timeout_s=EXIT_S, DDTREE_SESSION_TTL_S=str(_TTL_S)) as world:
        yield world
        # No clean end is asked for: Triton 2.51 never unloads a copy whose process died in a call.
        assert world.triton.stop().forced is False


@pytest.fixture(scope="module")
def expected(world: World) -> Expected:
    return expected_answers(world)


@pytest.mark.parametrize("stage", ["target_verifier", "drafter", "tree_builder"])
def test_streams_outlive_a_killed_stage(world: World, expected: Expected, stage: str) -> None:
    drill = kill_stage(world, stage, expected)
    assert (drill.finished, drill.failed, drill.wrong, drill.hung) == (STREAMS, (), 0, 0)
    assert world.held_at_rest() == {"sessions": 0, "pages_used": 0}


def test_a_killed_orchestrators_sessions_expire_in_the_stages(world: World, expected: Expected) -> None:
    with (
        world.client() as client,
        client.stream(input_ids=PROMPTS[0], max_tokens=450, tree_budget=1, ignore_eos=True) as stream,
    ):
        chunks = iter(stream)  # held: a stream whose chunks nobody reads is cancelled
        next(chunks)
        assert world.held()["sessions"] >= 1
        dog = world.watchdog()
        os.kill(world.stub_of("ddtree"), signal.SIGKILL)
        (line, back) = dog.look()
        assert "loading it again" in line
        assert "ddtree is back" in back
        time.sleep(_TTL_S)  # of the sessions, by the stages' own clocks
        answer = client.generate(input_ids=PROMPTS[1], max_tokens=4, ignore_eos=True)
        assert answer.token_ids == expected[PROMPTS[1]][:4]
    assert world.held_at_rest() == {"sessions": 0, "pages_used": 0}


def test_a_drafter_that_hangs_is_done_without_and_left_for_its_copy(
    tmp_path: Path, project_root: Path, expected: Expected
) -> None:
    """Its socket stays open: who went on calling there would never draft again."""
    prompt, drafted = PROMPTS[0], 0
    with (
        soaked(tmp_path, project_root, exit_timeout_s=EXIT_S, DDTREE_DRAFT_TIMEOUT_MS="500") as world,
        world.client() as client,
    ):
        dog = Watchdog(world.control(), ["drafter"], WatchLimits(answer_s=1.0, patience=2))
        assert list(dog.look()) == []
        assert client.generate(input_ids=prompt, max_tokens=9, tree_budget=4).stats.draft_tokens
        stub = world.stub_of("drafter")
        os.kill(stub, signal.SIGSTOP)
        try:
            answer = client.generate(input_ids=prompt, max_tokens=40, tree_budget=4, ignore_eos=True)
            assert answer.token_ids == expected[prompt][:40]
            assert not answer.stats.draft_tokens
            told = [line for _ in range(2) for line in dog.look()]  # Triton may notice before the second look
            assert "drafter is back" in told[-1]
            assert world.stub_of("drafter") != stub
            deadline = time.monotonic() + 60
            while not drafted and time.monotonic() < deadline:
                time.sleep(0.5)  # it is left alone for some seconds after it failed
                answer = client.generate(input_ids=prompt, max_tokens=20, tree_budget=4, ignore_eos=True)
                assert answer.token_ids == expected[prompt][:20]
                drafted = answer.stats.draft_tokens
        finally:
            os.kill(stub, signal.SIGCONT)
    assert drafted, "nobody drafts again"


def test_a_killed_orchestrators_streams_are_told(
    tmp_path: Path, project_root: Path, expected: Expected
) -> None:
    drill = kill_orchestrator(tmp_path, project_root, expected)
    assert (drill.finished, len(drill.failed), drill.unaccounted) == (0, STREAMS, 0)
