"""The target that rank 0 shows to the verifier: its own share, run together with the workers' shares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ddtree.attention.plan import StepPlan
from ddtree.kv_cache import CacheShape, KvPool
from ddtree.models import loading
from ddtree.models.target import TargetStep
from ddtree.parallel.commands import Forward, Load, MakePool, Move, Probe
from ddtree.parallel.division import check_division
from ddtree.parallel.group import WorkerGroup
from ddtree.parallel.shard import ShardTarget


class ParallelPool(KvPool):
    """Rank 0's pages: all features, and keys and values of its own heads. The workers hold the others'."""

    def __init__(
        self,
        group: WorkerGroup,
        shape: CacheShape,
        *,
        budget_bytes: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        """Allocate this rank's pages, and as many on every worker."""
        super().__init__(shape, budget_bytes=budget_bytes, page_size=page_size, device=device)
        self._group = group
        group.tell(MakePool(self.num_pages, page_size))
        group.wait_loaded()

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy whole slots on every rank."""
        self._group.tell(Move(source.cpu().numpy(), destination.cpu().numpy()))
        super().move(source, destination)


class ParallelTarget:
    """A target divided among ranks; see `Target`. One forward at a time."""

    def __init__(self, group: WorkerGroup, shard: ShardTarget) -> None:
        """Take a group whose workers have loaded their shares."""
        self._group = group
        self._shard = shard
        self._pool: ParallelPool | None = None

    @classmethod
    def load(cls, group: WorkerGroup, folder: Path, *, dtype: str, taps: Sequence[int]) -> ParallelTarget:
        """Load a share on every rank and try whether trees can be verified.

        Args:
            group: the ranks; a target they loaded before is replaced.
            folder: the checkpoint.
            dtype: as in the settings.
            taps: decoder layers whose outputs the drafter reads.

        Raises:
            ConfigError: the target cannot be divided among so many ranks.
            CheckpointError: the folder is no usable target.
            Unavailable: a worker failed.
        """
        check_division(loading.read_target_config(folder), group.world)
        group.tell(Load(str(folder), dtype, tuple(taps)))
        with group.together():
            shard = ShardTarget.load_shard(
                folder, dtype=dtype, device=group.device, taps=taps, mesh=group.mesh
            )
        group.wait_loaded()
        group.tell(Probe())
        with group.together():
            shard.check_works()
        group.wait_loaded()
        return cls(group, shard)

    @property
    def is_whole(self) -> bool:
        """Whether every rank is there, see `WorkerGroup.is_whole`; any thread may ask."""
        return self._group.is_whole

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary.

        Raises:
            Unavailable: a worker is lost; a watchdog that asks the stage what it is learns of it by this.
        """
        self._group.check()
        return self._shard.vocab_size

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence."""
        return self._shard.context_length

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations and cache."""
        return self._shard.dtype

    @property
    def device(self) -> torch.device:
        """Where logits and taps are: the device of rank 0."""
        return self._shard.device

    def make_pool(self, feature_size: int, *, budget_bytes: int, page_size: int) -> KvPool:
        """Pages on every rank; `budget_bytes` is what rank 0 takes, its features included.

        One pool at a time: it replaces an earlier one of this target.
        """
        self._pool = ParallelPool(
            self._group,
            self._shard.cache_shape(feature_size),
            budget_bytes=budget_bytes,
            page_size=page_size,
            device=self.device,
        )
        return self._pool

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, plan: StepPlan, keep: torch.Tensor) -> TargetStep:
        """Run one packed step on every rank, see `TargetModel.forward`.

        Raises:
            Unavailable: a rank failed or did not take part in time; nothing is served until this process is
                loaded again.
        """
        assert plan.pool is self._pool, "a step belongs to the pool that was made last"
        self._group.tell(Forward.of(token_ids, plan, keep))
        with self._group.together():
            step = self._shard.forward(token_ids, plan, keep)
            if self.device.type == "cuda":
                done = torch.cuda.Event()
                done.record(torch.cuda.current_stream(self.device))
                self._group.finish(done.query)
        return step

    def close(self) -> None:
        """End the workers."""
        self._group.close()
