"""Worker: our engine with both stages in this process, no server and no hops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from benchmarks.measurement import Answer, Job, Setup
from benchmarks.workers.channel import serve
from ddtree import assembly
from ddtree.config import ServingConfig
from ddtree.engine import Engine
from ddtree.events import RoundRecord, rounds_only
from ddtree.params import GenerationParams
from ddtree.scheduler import Scheduler
from ddtree.sequence import Delta, Stats
from ddtree.text import TextCodec


class _TimedSink:
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
        self.total_s = time.perf_counter() - self._start
        self.token_ids += delta.token_ids
        self.rounds = stats.rounds
        if not self.first_tokens:
            self.first_tokens, self.first_s = len(self.token_ids), self.total_s

    def is_cancelled(self) -> bool:
        return False


class _InProcess:
    def __init__(self, setup: Setup) -> None:
        config = ServingConfig(
            target=Path(setup.target),
            draft=Path(setup.draft),
            dtype=setup.dtype,
            threads=setup.threads,
            prefix_cache=False,  # peers read every prompt anew
        )
        self._records: list[RoundRecord] = []
        self._loop = asyncio.new_event_loop()
        self._engine = Engine(
            assembly.load_in_process(config),
            TextCodec.from_folder(config.target),
            scheduler=Scheduler(max_sequences=1, max_waiting=1, prefill_chunk=config.prefill_chunk),
            observe=rounds_only(self._records.append),
        )
        self._loop.run_until_complete(self._engine.start())

    def decode(self, job: Job) -> Answer:
        answer = self._loop.run_until_complete(self._decode(job))
        while not self._engine.is_idle:  # the sessions' release must not fall into the next job
            self._loop.run_until_complete(asyncio.sleep(0))
        return answer

    async def _decode(self, job: Job) -> Answer:
        params = GenerationParams(
            job.input_ids,
            max_tokens=job.max_tokens,
            draft_mode=job.draft_mode,
            tree_budget=job.tree_budget,
            stop_ids=frozenset(job.stop_ids),
        )
        self._records.clear()
        sink = _TimedSink()
        await self._engine.generate(params, sink)
        return Answer(
            token_ids=tuple(sink.token_ids),
            first_tokens=sink.first_tokens,
            first_s=sink.first_s,
            total_s=sink.total_s,
            rounds=sink.rounds,
            nodes=fmean(record.nodes for record in self._records) if self._records else None,
            stage_ms=_medians(self._records),
        )


def _medians(records: Sequence[RoundRecord]) -> dict[str, float]:
    """Milliseconds per stage; `cache_commit` is the part of `verify` that moves the cache."""
    if not records:
        return {}
    stages = {name: median(record.stage_ms[name] for record in records) for name in records[0].stage_ms}
    return {**stages, "cache_commit": median(record.cache_commit_ms for record in records)}


if __name__ == "__main__":
    serve(_InProcess)
