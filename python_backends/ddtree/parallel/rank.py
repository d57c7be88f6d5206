"""What a worker holds, and how it carries out each command."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers.utils import logging as transformers_logging

from ddtree.attention.plan import StepPlan
from ddtree.parallel import ranks
from ddtree.parallel.commands import Command, Forward, Join, Load, MakePool, Move, Probe, WorkerPool
from ddtree.parallel.shard import ShardTarget


class Rank:
    """One worker's share of the target and of its pool."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        transformers_logging.disable_progress_bar()  # rank 0 shows one
        self._mesh: DeviceMesh | None = None
        self._device = torch.device("cpu")
        self._shard: ShardTarget | None = None
        self._pool: WorkerPool | None = None

    def run(self, command: Command) -> None:
        """Carry out one command; whatever goes wrong is raised."""
        if isinstance(command, Forward):
            self._forward(command)
        elif isinstance(command, Move):
            self._move(command)
        elif isinstance(command, MakePool):
            self._make_pool(command)
        elif isinstance(command, Load):
            self._load(command)
        elif isinstance(command, Probe):
            self._loaded().check_works()
        elif isinstance(command, Join):
            self._join(command)

    def _join(self, command: Join) -> None:
        torch.set_num_threads(command.threads)
        self._device = torch.device(command.device)
        store = ranks.reach_store(command.port, command.world, command.timeout_s)
        self._mesh = ranks.join(
            store,
            rank=command.rank,
            world=command.world,
            device=self._device,
            timeout_s=command.timeout_s,
        )

    def _load(self, command: Load) -> None:
        assert self._mesh is not None, "a rank joins before it loads"
        self._shard = self._pool = None  # before the next one takes memory
        self._shard = ShardTarget.load_shard(
            Path(command.folder),
            dtype=command.dtype,
            device=self._device,
            taps=command.taps,
            mesh=self._mesh,
        )

    def _make_pool(self, command: MakePool) -> None:
        shape = self._loaded().cache_shape(0)  # features are rank 0's
        self._pool = None
        self._pool = WorkerPool(
            shape,
            budget_bytes=command.num_pages * command.page_size * shape.bytes_per_slot,
            page_size=command.page_size,
            device=self._device,
        )

    def _forward(self, command: Forward) -> None:
        pool = self._pages()
        segments = tuple(rows.segment(pool, self._device) for rows in command.segments)
        token_ids = torch.from_numpy(command.token_ids).to(self._device)
        keep = torch.from_numpy(command.keep).to(self._device)
        self._loaded().forward(token_ids, StepPlan.build(pool, segments), keep)

    def _move(self, command: Move) -> None:
        source = torch.from_numpy(command.source).to(self._device)
        self._pages().move(source, torch.from_numpy(command.destination).to(self._device))

    def _loaded(self) -> ShardTarget:
        assert self._shard is not None, "a target is loaded before it is used"
        return self._shard

    def _pages(self) -> WorkerPool:
        assert self._pool is not None, "the pool is made before it is used"
        return self._pool
