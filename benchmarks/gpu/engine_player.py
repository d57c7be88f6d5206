"""Our engine in this process on a device: one sequence by itself, or a batch that is kept full."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.engine_jobs import decode, stage_medians
from benchmarks.measurement import Answer, Job
from ddtree import assembly
from ddtree.config import ServingConfig
from ddtree.engine import Engine
from ddtree.events import RoundRecord, rounds_only
from ddtree.scheduler import Scheduler
from ddtree.text import TextCodec


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
        sink = self._loop.run_until_complete(decode(self._engine, job))
        self._settle()
        return sink.answer(self._records, stage_medians(self._records))

    def serve(self, jobs: Sequence[Job], batch: int) -> Served:
        """Decode all jobs, `batch` at a time: when one ends the next begins."""
        self._records.clear()
        started = time.perf_counter()
        tokens = self._loop.run_until_complete(self._serve(jobs, batch))
        seconds = time.perf_counter() - started
        self._settle()
        records = self._records
        nodes = fmean(record.nodes for record in records) if records else 0.0
        return Served(tokens, seconds, len(records), nodes, stage_medians(records))

    def close(self) -> None:
        """End the engine."""
        self._loop.run_until_complete(self._engine.stop())
        self._loop.close()

    async def _serve(self, jobs: Sequence[Job], batch: int) -> int:
        waiting = iter(jobs)

        async def one_after_another() -> int:
            return sum([len((await decode(self._engine, job)).token_ids) for job in waiting])

        return sum(await asyncio.gather(*(one_after_another() for _ in range(batch))))

    def _settle(self) -> None:
        """The sessions' release must not fall into what is measured next."""
        while not self._engine.is_idle:
            self._loop.run_until_complete(asyncio.sleep(0))
