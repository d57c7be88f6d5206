"""What rank 0 tells its workers, and what they answer.

Arrays cross as numpy's. Sessions stay on rank 0: a worker is told pages, lengths and who sees whom, which is
all that attention needs. Knows neither processes nor collectives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ddtree.attention.plan import Segment, StepPlan
from ddtree.kv_cache import KvPool, Pages


@dataclass(frozen=True)
class Join:
    """Become a member of the process group. Answered."""

    rank: int
    world: int
    port: int  # of rank 0's store, on loopback
    device: str
    timeout_s: float  # of every collective
    threads: int  # CPU threads


@dataclass(frozen=True)
class Load:
    """Load this rank's share of a target; it replaces an earlier one. Answered."""

    folder: str
    dtype: str
    taps: tuple[int, ...]


@dataclass(frozen=True)
class Probe:
    """Try whether the target can be verified with trees, together with all ranks. Answered."""


@dataclass(frozen=True)
class MakePool:
    """Allocate pages for this rank's KV heads; they replace earlier ones. Answered."""

    num_pages: int
    page_size: int


@dataclass(frozen=True)
class Rows:
    """One segment of a step, see `Segment`."""

    start: int
    count: int
    prefix: int
    pages: tuple[int, ...]  # only those that the step touches
    depths: npt.NDArray[np.int64]  # [count] int64
    sees: npt.NDArray[np.uint8] | None  # [count, ceil(count / 8)] uint8, bits of `Segment.sees`

    @classmethod
    def of(cls, segment: Segment, page_size: int) -> Rows:
        """Take from a segment what a worker needs."""
        touched = -(-(segment.prefix + segment.count) // page_size)
        sees = None if segment.sees is None else np.packbits(segment.sees.cpu().numpy(), axis=1)
        return cls(
            segment.start,
            segment.count,
            segment.prefix,
            segment.pages.indices[:touched],
            segment.depths.cpu().numpy(),
            sees,
        )

    def segment(self, pool: WorkerPool, device: torch.device) -> Segment:
        """The segment over a worker's own pages."""
        sees = None
        if self.sees is not None:
            bits = np.unpackbits(self.sees, axis=1, count=self.count)
            sees = torch.from_numpy(bits).to(device, torch.bool)
        depths = torch.from_numpy(self.depths).to(device)
        return Segment(self.start, self.count, pool.pages_of(self.pages), self.prefix, depths, sees)


@dataclass(frozen=True)
class Forward:
    """Run one packed step, together with all ranks."""

    token_ids: npt.NDArray[np.int64]  # [rows] int64
    keep: npt.NDArray[np.int64]  # [kept] int64
    segments: tuple[Rows, ...]

    @classmethod
    def of(cls, token_ids: torch.Tensor, plan: StepPlan, keep: torch.Tensor) -> Forward:
        """Take from a step what a worker needs."""
        segments = tuple(Rows.of(segment, plan.pool.page_size) for segment in plan.segments)
        return cls(token_ids.cpu().numpy(), keep.cpu().numpy(), segments)


@dataclass(frozen=True)
class Move:
    """Copy whole slots, see `KvPool.move`."""

    source: npt.NDArray[np.int64]  # [n] int64
    destination: npt.NDArray[np.int64]  # [n] int64


Command = Join | Load | Probe | MakePool | Forward | Move
ANSWERED = (Join, Load, Probe, MakePool)


@dataclass(frozen=True)
class Done:
    """A worker is ready for commands, or has carried one out."""


@dataclass(frozen=True)
class Failed:
    """A worker could not carry out a command; it ends."""

    reason: str


class WorkerPool(KvPool):
    """A worker's pages. Who holds which is known on rank 0 only, so its own table stays empty."""

    def pages_of(self, indices: tuple[int, ...]) -> Pages:
        """The pages of a session, as rank 0 says."""
        return self._pages(indices)
