"""Our engine in this process on a device: one sequence by itself, or a batch that is kept full."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

import torch

from benchmarks.measurement import Answer, Job
from ddtree import assembly
from ddtree.config import ServingConfig
from ddtree.engine import Engine
from ddtree.events import RoundRecord, rounds_only
from ddtree.params import GenerationParams
from ddtree.scheduler import Scheduler
from ddtree.sequence import Delta, Stats
from ddtree.text import TextCodec


class _Sink:
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


@dataclass(frozen=True)
class Served:
    """What a batch got."""

    tokens: int
    seconds: float
    rounds: int
    nodes: float  # draft nodes of a round, over all sequences, mean
    stage_ms: dict[str, float] = field(default_factory=dict)  # medians

    @property
    def tokens_per_s(self) -> float:
        """Of all sequences together, prompts' reading included."""
        return self.tokens / self.seconds


class EnginePlayer:
    """A loaded pair behind the engine."""

    def __init__(
        self, *, target: Path, draft: Path, device: torch.device, dtype: torch.dtype, most_sequences: int
    ) -> None:
        """Load the pair and start the engine.

        Raises:
            CheckpointError: target or draft cannot be used.
        """
        config = ServingConfig(
            target=target,
            draft=draft,
            device=device.type,
            topology="in_process",
            dtype=str(dtype).removeprefix("torch."),
            kv_cache_mib=64 if device.type == "cpu" else 4096,
            draft_kv_cache_mib=64 if device.type == "cpu" else 1024,
            max_sequences=most_sequences,
            prefix_cache=False,  # the peer reads every prompt anew
        )
        self._records: list[RoundRecord] = []
        self._loop = asyncio.new_event_loop()
        self._engine = Engine(
            assembly.load_in_process(config),
            TextCodec.from_folder(target),
            scheduler=Scheduler(
                max_sequences=most_sequences, max_waiting=most_sequences, prefill_chunk=config.prefill_chunk
            ),
            max_step_nodes=config.max_step_nodes,
            observe=rounds_only(self._records.append),
        )
        self._loop.run_until_complete(self._engine.start())

    def decode(self, job: Job) -> Answer:
        """Decode one prompt, alone."""
        self._records.clear()
        sink = self._loop.run_until_complete(self._generate(job))
        self._settle()
        records = self._records
        return Answer(
            token_ids=tuple(sink.token_ids),
            first_tokens=sink.first_tokens,
            first_s=sink.first_s,
            total_s=sink.total_s,
            rounds=sink.rounds,
            nodes=fmean(record.nodes for record in records) if records else None,
            stage_ms=_stage_ms(records),
        )

    def serve(self, jobs: Sequence[Job], batch: int) -> Served:
        """Decode all jobs, `batch` at a time: when one ends the next begins."""
        self._records.clear()
        started = time.perf_counter()
        tokens = self._loop.run_until_complete(self._serve(jobs, batch))
        seconds = time.perf_counter() - started
        self._settle()
        records = self._records
        nodes = fmean(record.nodes for record in records) if records else 0.0
        return Served(tokens, seconds, len(records), nodes, _stage_ms(records))

    def close(self) -> None:
        """End the engine."""
        self._loop.run_until_complete(self._engine.stop())
        self._loop.close()

    async def _serve(self, jobs: Sequence[Job], batch: int) -> int:
        waiting = iter(jobs)

        async def one_after_another() -> int:
            return sum([len((await self._generate(job)).token_ids) for job in waiting])

        return sum(await asyncio.gather(*(one_after_another() for _ in range(batch))))

    async def _generate(self, job: Job) -> _Sink:
        params = GenerationParams(
            job.input_ids,
            max_tokens=job.max_tokens,
            draft_mode=job.draft_mode,
            tree_budget=job.tree_budget,
            stop_ids=frozenset(job.stop_ids),
        )
        sink = _Sink()
        await self._engine.generate(params, sink)
        return sink

    def _settle(self) -> None:
        """The sessions' release must not fall into what is measured next."""
        while not self._engine.is_idle:
            self._loop.run_until_complete(asyncio.sleep(0))


def _stage_ms(records: Sequence[RoundRecord]) -> dict[str, float]:
    if not records:
        return {}
    return {name: median(record.stage_ms[name] for record in records) for name in records[0].stage_ms}
