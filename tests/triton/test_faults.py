"""A stage's process is killed under sixteen streams: they go on, and a watchdog brings the stage back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def test_a_killed_orchestrators_streams_are_told(
    tmp_path: Path, project_root: Path, expected: Expected
) -> None:
    drill = kill_orchestrator(tmp_path, project_root, expected)
    assert (drill.finished, len(drill.failed), drill.unaccounted) == (0, STREAMS, 0)
