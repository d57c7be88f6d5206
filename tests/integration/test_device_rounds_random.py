"""Any mixture of requests over rounds on the device, while either stage loses sessions between rounds.

Every answer is the target's own, however it ends and whoever is in the batch: prompts share cached pages,
sampled and traced sequences send the batch the general way, and some budgets and batches are of no prepared
size. Afterwards nothing is held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ddtree.device.messages import RoundRequest, RoundResult
from ddtree.engine import Engine
from ddtree.params import DraftMode, GenerationParams
from ddtree.round_trace import SequenceTrace
from ddtree.sampling_spec import SamplingSpec
from ddtree.scheduler import Scheduler
from ddtree.stages.in_process import InProcessStages
from ddtree.text import TextCodec
from ddtree.types import AUTO_BUDGET, SessionBatch, VerifyRequest, VerifyResult
from tests.fakes.collecting_sink import CollectingSink
from tests.fakes.pipeline import idle
from tests.fakes.scripted_draft import Script
from tests.integration import test_device_rounds as alike

pair, text, script, stages = alike.pair, alike.text, alike.script, alike.stages
plain_kernels = alike.plain_kernels

Kind = Literal["plain", "stop", "sampled", "traced", "cancelled", "late"]
MODES: list[tuple[DraftMode, int]] = [*alike.MODES, ("tree", 40), ("tree", 256), ("chain", AUTO_BUDGET)]
KINDS: list[Kind] = ["plain", "plain", "plain", "stop", "sampled", "traced", "cancelled", "late"]
LENGTHS = [1, 2, 15, 16, 17, 33, 100, 200, 300]


@dataclass(frozen=True)
class Case:
    """One request; `pick` says where it stops, is left or comes too late, or seeds its noise."""

    length: int
    mode: tuple[DraftMode, int]
    max_tokens: int
    kind: Kind
    pick: int
    salt: str

    def params(self, text: Sequence[int]) -> GenerationParams:
        """As the engine takes it."""
        params = alike.request(text, self.length, *self.mode, max_tokens=self.max_tokens)
        params = replace(params, cache_salt=self.salt)
        if self.kind == "stop":
            stop = frozenset({text[self.length + self.pick]})
            return replace(params, ignore_eos=False, stop_ids=stop)
        if self.kind == "sampled":
            return replace(params, sampling=SamplingSpec(temperature=0.7, seed=self.pick))
        return replace(params, deadline_ms=1 + self.pick) if self.kind == "late" else params

    def sink(self, codec: TextCodec) -> CollectingSink:
        """As its caller listens."""
        trace = SequenceTrace(codec) if self.kind == "traced" else None
        return CollectingSink(1 + self.pick % 5 if self.kind == "cancelled" else None, trace=trace)


class Forgetful(InProcessStages):
    """Loses the session of one sequence in the verifier (v) or the drafter (d) before a round."""

    losses: list[str]

    async def round(self, request: RoundRequest) -> RoundResult:
        """A round on the device."""
        self._lose(request.sessions)
        return await super().round(request)

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        """A round of the general way."""
        self._lose(request.sessions)
        return await super().verify(request)

    def _lose(self, sessions: SessionBatch) -> None:
        lost = self.losses.pop() if self.losses else ""
        one = [int(sessions.ids[-1 if len(self.losses) % 2 else 0])]
        if "v" in lost:
            self.verifier.release(one)
        if "d" in lost:
            self.drafter.release(one)


async def answers(
    stages: InProcessStages, folder: Path, text: Sequence[int], cases: Sequence[Case], losses: Sequence[str],
    *, places: int = 3, has_rounds: bool = True,
) -> list[CollectingSink]:  # fmt: skip
    """Run all of them at once; afterwards both stages hold nothing."""
    own = Forgetful(stages.verifier, stages.drafter, rounds=stages._rounds if has_rounds else None)
    own.losses = list(losses)
    codec = TextCodec.from_folder(folder)
    scheduler = Scheduler(max_sequences=places, max_waiting=64, prefill_chunk=16)
    engine = Engine(own, codec, scheduler=scheduler, feed_chunk=8)
    await engine.start()
    sinks = [case.sink(codec) for case in cases]
    try:
        calls = [engine.generate(case.params(text), sink) for case, sink in zip(cases, sinks, strict=True)]
        failed = await asyncio.gather(*calls, return_exceptions=True)
        await idle(engine)
    finally:
        await engine.stop()
    # A deadline may come before a place does; nobody else fails.
    assert not any(error for error, case in zip(failed, cases, strict=True) if case.kind != "late"), failed
    stages.verifier.check_integrity()
    stages.drafter.check_integrity()  # type: ignore[attr-defined]
    for usage in (stages.verifier.usage(), stages.drafter.info().usage):
        assert usage.sessions == usage.pages_used == 0
    return sinks


def cases() -> st.SearchStrategy[list[Case]]:
    one: dict[str, st.SearchStrategy[Any]] = {
        "length": st.sampled_from(LENGTHS),
        "mode": st.sampled_from(MODES),
        "max_tokens": st.sampled_from([1, 2, 3, 17, 40]),
        "kind": st.sampled_from(KINDS),
        "pick": st.integers(0, 40),
        "salt": st.sampled_from(["", "of others"]),
    }
    return st.lists(st.builds(Case, **one), min_size=2, max_size=6)


# No shrinking: a case takes a tenth of a second, and what happens when is not the same twice.
@settings(
    max_examples=20, deadline=None, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(
    cases=cases(),
    losses=st.lists(st.sampled_from(["", "", "d", "v", "vd"]), max_size=9).filter(
        lambda losses: sum("v" in lost for lost in losses) <= 3  # a sequence ends at the fourth in a row
    ),
    places=st.sampled_from([1, 3, 5]),
    noise=st.sampled_from([0.02, 0.4, 0.9]),
)
def test_any_mixture_gets_the_targets_own_tokens(
    stages: InProcessStages, pair: tuple[Path, Path], text: list[int], script: Script,
    cases: list[Case], losses: list[str], places: int, noise: float,
) -> None:  # fmt: skip
    script.noise = noise
    sinks = asyncio.run(answers(stages, pair[0], text, cases, losses, places=places))
    for case, sink in zip(cases, sinks, strict=True):
        expected = text[case.length : case.length + case.max_tokens]
        if case.kind == "sampled":
            (alone,) = asyncio.run(answers(stages, pair[0], text, [case], [], has_rounds=False))
            expected = alone.token_ids
        elif case.kind == "stop" and (stop := text[case.length + case.pick]) in expected:
            expected = expected[: expected.index(stop) + (stop in sink.token_ids)]
            assert sink.finish_reason == "stop"
        elif case.kind in ("cancelled", "late"):
            expected = expected[: len(sink.token_ids)]
        assert sink.token_ids == expected, case
