"""Worker: our engine with both stages in this process, no server and no hops."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.engine_jobs import decode, stage_medians
from benchmarks.measurement import Answer, Job, Setup
from benchmarks.workers.channel import serve
from ddtree import assembly
from ddtree.config import ServingConfig
from ddtree.engine import Engine
from ddtree.events import RoundRecord, rounds_only
from ddtree.scheduler import Scheduler
from ddtree.text import TextCodec


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
        self._records.clear()
        sink = self._loop.run_until_complete(decode(self._engine, job))
        while not self._engine.is_idle:  # the sessions' release must not fall into the next job
            self._loop.run_until_complete(asyncio.sleep(0))
        return sink.answer(self._records, _medians(self._records))


def _medians(records: Sequence[RoundRecord]) -> dict[str, float]:
    """Milliseconds per stage; `cache_commit` is the part of `verify` that moves the cache."""
    if not records:
        return {}
    return {
        **stage_medians(records),
        "cache_commit": median(record.cache_commit_ms for record in records),
    }


if __name__ == "__main__":
    serve(_InProcess)
