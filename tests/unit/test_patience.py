"""Time limits, patience and rest around calls to stages, on a clock of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from ddtree.errors import Unavailable
from ddtree.stages import patience
from ddtree.stages.patience import PatienceLimits, PatientCall, StageGone
from ddtree.wire import Arrays

ANSWER: Mapping[str, Any] = {"status": 0}


@dataclass
class Stages:
    """Answers what the script says, call by call; the last entry stays. A float is a time to take."""

    script: list[Exception | float]
    calls: list[tuple[str, str]] = field(default_factory=list)
    now: float = 0.0

    async def __call__(self, model: str, operation: str, arrays: Arrays) -> Mapping[str, Any]:
        del arrays
        says = self.script[min(len(self.calls), len(self.script) - 1)]
        self.calls.append((model, operation))
        self.now += 1.0  # what Triton takes to find that a process is dead
        if isinstance(says, Exception):
            raise says
        await asyncio.sleep(says)
        return ANSWER

    def clock(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_AGAIN_S", 0.0)


GONE = StageGone("stage x failed: Stub process 'x' is not healthy.")


@pytest.mark.parametrize("operation", ["prefill", "verify", "read_features"])
def test_a_lost_verifier_is_asked_again_until_it_is_back(operation: str) -> None:
    stages = Stages([GONE, GONE, GONE, 0.0])
    call = PatientCall(stages, PatienceLimits(recovery_s=10), stages.clock)
    assert asyncio.run(_ask(call, "target_verifier", operation)) == ANSWER
    assert len(stages.calls) == 4


def test_a_verifier_that_stays_away_is_an_error_when_the_time_is_over() -> None:
    stages = Stages([GONE])
    call = PatientCall(stages, PatienceLimits(recovery_s=5), stages.clock)
    with pytest.raises(StageGone, match="is not healthy"):
        asyncio.run(_ask(call, "target_verifier", "verify"))
    assert len(stages.calls) == 6  # at once, and once a second


def test_without_patience_there_is_one_call() -> None:
    stages = Stages([GONE])
    call = PatientCall(stages, PatienceLimits(), stages.clock)
    with pytest.raises(StageGone):
        asyncio.run(_ask(call, "target_verifier", "verify"))
    assert len(stages.calls) == 1


def test_what_a_living_stage_refuses_is_not_asked_again() -> None:
    stages = Stages([Unavailable("stage x failed: INTERNAL: out of memory"), 0.0])
    call = PatientCall(stages, PatienceLimits(recovery_s=10), stages.clock)
    with pytest.raises(Unavailable, match="out of memory"):
        asyncio.run(_ask(call, "target_verifier", "verify"))
    assert len(stages.calls) == 1


@pytest.mark.parametrize("model", ["drafter", "tree_builder"])
def test_what_is_not_missed_is_left_alone_after_a_loss_and_asked_again_later(model: str) -> None:
    stages = Stages([GONE, 0.0])
    call = PatientCall(stages, PatienceLimits(recovery_s=10, rest_s=5), stages.clock)
    for said in ("not healthy", "left alone", "left alone"):
        with pytest.raises(StageGone, match=said):
            asyncio.run(_ask(call, model, "draft"))
    assert len(stages.calls) == 1
    stages.now += 5
    assert asyncio.run(_ask(call, model, "draft")) == ANSWER


def test_the_rest_of_one_stage_is_not_the_others() -> None:
    stages = Stages([GONE, 0.0])
    call = PatientCall(stages, PatienceLimits(), stages.clock)
    with pytest.raises(StageGone):
        asyncio.run(_ask(call, "drafter", "draft"))
    assert asyncio.run(_ask(call, "tree_builder", "build_tree")) == ANSWER
    assert asyncio.run(_ask(call, "drafter", "describe")) == ANSWER, "how it is may always be asked"


def test_a_drafter_that_is_too_slow_is_done_without() -> None:
    stages = Stages([60.0])
    call = PatientCall(stages, PatienceLimits(draft_s=0.01, rest_s=5), stages.clock)
    with pytest.raises(StageGone, match=r"drafter did not draft within 0\.01 s"):
        asyncio.run(_ask(call, "drafter", "draft"))
    with pytest.raises(StageGone, match="left alone"):
        asyncio.run(_ask(call, "drafter", "draft"))


def test_a_verifier_that_hangs_counts_as_lost() -> None:
    stages = Stages([60.0, 0.0])
    call = PatientCall(stages, PatienceLimits(call_s=0.01, recovery_s=5), stages.clock)
    assert asyncio.run(_ask(call, "target_verifier", "verify")) == ANSWER
    assert len(stages.calls) == 2


async def _ask(call: PatientCall, model: str, operation: str) -> Mapping[str, Any]:
    return await call(model, operation, {})
