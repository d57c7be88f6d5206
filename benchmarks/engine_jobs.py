"""Jobs decoded by our engine in this process, timed as they come. Knows neither servers nor devices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean, median

from benchmarks.measurement import Answer, Job
from ddtree.engine import Engine
from ddtree.events import RoundRecord
from ddtree.params import GenerationParams
from ddtree.sequence import Delta, Stats


class TimedSink:
    """Notes when the first and the last tokens came."""

    trace = None

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.first_tokens = 0
        self.first_s = 0.0
        self.total_s = 0.0
        self.rounds = 0
        self._start = time.perf_counter()

    def emit(self, delta: Delta, stats: Stats) -> None:
        """Take what came."""
        self.total_s = time.perf_counter() - self._start
        self.token_ids += delta.token_ids
        self.rounds = stats.rounds
        if not self.first_tokens:
            self.first_tokens, self.first_s = len(self.token_ids), self.total_s

    def is_cancelled(self) -> bool:
        """Nobody cancels."""
        return False

    def answer(self, records: Sequence[RoundRecord], stage_ms: dict[str, float]) -> Answer:
        """What a job got that was decoded alone in these rounds."""
        return Answer(
            token_ids=tuple(self.token_ids),
            first_tokens=self.first_tokens,
            first_s=self.first_s,
            total_s=self.total_s,
            rounds=self.rounds,
            nodes=fmean(record.nodes for record in records) if records else None,
            stage_ms=stage_ms,
        )


async def decode(engine: Engine, job: Job) -> TimedSink:
    """Decode one job to its end."""
    params = GenerationParams(
        job.input_ids,
        max_tokens=job.max_tokens,
        draft_mode=job.draft_mode,
        tree_budget=job.tree_budget,
        stop_ids=frozenset(job.stop_ids),
    )
    sink = TimedSink()
    await engine.generate(params, sink)
    return sink


def stage_medians(records: Sequence[RoundRecord]) -> dict[str, float]:
    """Milliseconds of a round by stage, medians; nothing without rounds."""
    if not records:
        return {}
    return {name: median(record.stage_ms[name] for record in records) for name in records[0].stage_ms}
