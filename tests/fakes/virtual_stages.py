"""Stages without models, on a clock of their own: texts are made up, and a step takes what a formula says.

A drafter that keeps its word: the true token stands at each rank as often as the rank's probability says.
So what drafting gives is known, and what the engine makes of it can be compared over any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ddtree.stages.base import StageInfo
from ddtree.tree import build_trees
from ddtree.types import (
    DrafterInfo,
    DraftRequest,
    DraftResult,
    FeatureRequest,
    FeatureResult,
    PrefillRequest,
    PrefillResult,
    TreeBatch,
    TreeRequest,
    Usage,
    VerifierInfo,
    VerifyRequest,
    VerifyResult,
)

BLOCK_SIZE, WIDTH, VOCABULARY = 9, 6, 5000
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Machine:
    """Milliseconds of steps."""

    verify_ms: Callable[[int, int], float]  # by sequences and rows
    draft_ms: Callable[[int], float]  # by sequences
    load_factor: float = 1.0  # how much slower it was while loading


class VirtualClock:
    """Seconds that pass when a stage works."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s

    def work(self, ms: float) -> None:
        """Let a stage take its time."""
        self.now_s += ms / 1e3


class VirtualStages:
    """See `ddtree.stages.base.Stages`. The first id of a prompt says how sure its drafts are, in percent."""

    def __init__(self, machine: Machine, seed: int = 0) -> None:
        self.clock = VirtualClock()
        self.rows: list[int] = []  # of each verify
        self.drafted: list[int] = []  # sequences of each draft
        self.machine = machine
        self._noise = np.random.default_rng(seed)
        self._sure: dict[int, float] = {}
        self._drafts: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}  # type: ignore[type-arg]

    async def describe(self) -> StageInfo:
        """Say what was measured at load."""
        machine, usage = self.machine, Usage(0, 0, 1)
        ms = tuple(machine.verify_ms(1, rows) * machine.load_factor for rows in _ROWS)
        verifier = VerifierInfo(VOCABULARY, 4096, 256, 100_000, 1, "float32", "virtual", _ROWS, ms, usage)
        draft_ms = machine.draft_ms(1) * machine.load_factor
        return StageInfo(verifier, DrafterInfo(BLOCK_SIZE, "virtual", draft_ms, usage))

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        """Take whole prompts."""
        ids, counts = request.token_ids.tolist(), request.counts.tolist()
        start = 0
        for session, count in zip(request.sessions.ids.tolist(), counts, strict=True):
            self._sure[session] = ids[start] / 100
            start += count
        zeros = torch.zeros(len(counts), dtype=torch.int32)
        tokens = [
            self._truth(session, count)
            for session, count in zip(request.sessions.ids.tolist(), counts, strict=True)
        ]
        return PrefillResult(zeros, torch.tensor(tokens, dtype=torch.int32), torch.zeros(len(counts), 0, 0),
                             torch.zeros(sum(counts), 1), zeros)  # fmt: skip

    async def draft(self, request: DraftRequest) -> DraftResult:
        """Candidates of each position."""
        sessions = request.sessions.ids.tolist()
        status = torch.zeros(len(sessions), dtype=torch.int32)
        if not request.depth:
            return DraftResult(
                status, torch.zeros(len(sessions), 0, 0, dtype=torch.int32), torch.zeros(len(sessions), 0, 0)
            )
        self.clock.work(self.machine.draft_ms(len(sessions)) * self._noise.uniform(0.95, 1.05))
        self.drafted.append(len(sessions))
        held = (request.sessions.lengths + request.counts).tolist()
        rows = [self._candidates(session, place) for session, place in zip(sessions, held, strict=True)]
        ids, probs = (np.stack(each)[:, : request.depth, : request.width] for each in zip(*rows, strict=True))
        return DraftResult(status, torch.from_numpy(ids), torch.from_numpy(np.log(probs)))

    async def build_tree(self, request: TreeRequest) -> TreeBatch:
        """The real builder, in no time."""
        return build_trees(request)

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        """Walk the trees along the true text."""
        sessions, trees = request.sessions.ids.tolist(), request.trees
        rows = len(sessions) + int(trees.counts.sum())
        self.rows.append(rows)
        self.clock.work(self.machine.verify_ms(len(sessions), rows) * self._noise.uniform(0.95, 1.05))
        places = enumerate(zip(sessions, request.sessions.lengths.tolist(), strict=True))
        paths = [self._walk(session, length, trees, index) for index, (session, length) in places]
        counts = torch.tensor([len(path) - 1 for path in paths], dtype=torch.int32)
        accepted = torch.zeros((len(paths), int(counts.max())), dtype=torch.int32)
        for index, path in enumerate(paths):
            accepted[index, : len(path) - 1] = torch.tensor(path[:-1], dtype=torch.int32)
        return VerifyResult(
            status=torch.zeros(len(paths), dtype=torch.int32),
            accepted_tokens=accepted,
            accepted_counts=counts,
            bonus_tokens=torch.tensor([path[-1] for path in paths], dtype=torch.int32),
            node_counts=trees.counts,
            log_probs=torch.zeros(len(paths), 0, 0),
            features=torch.zeros(int(counts.sum()) + len(paths), 1),
            commit_ms=0.0,
        )

    async def read_features(self, request: FeatureRequest) -> FeatureResult:
        """As many as wanted."""
        return FeatureResult(
            torch.zeros(len(request.counts), dtype=torch.int32), torch.zeros(int(request.counts.sum()), 1)
        )

    async def release(self, session_ids: Sequence[int]) -> None:
        """Nothing is held."""

    async def close(self) -> None:
        """Nothing is held."""

    def _truth(self, session: int, place: int) -> int:
        return (session * 7919 + place * 104_729) % VOCABULARY

    def _walk(self, session: int, length: int, trees: TreeBatch, index: int) -> list[int]:
        """Accepted tokens and the bonus token after `length` committed tokens and the root."""
        tokens, parents = trees.tokens[index].tolist(), trees.parents[index].tolist()
        at, path = 0, list[int]()
        while True:
            path.append(self._truth(session, length + 1 + len(path)))
            nodes = range(int(trees.counts[index]))
            found = [node for node in nodes if parents[node] == at and tokens[node] == path[-1]]
            if not found:
                return path
            at = found[0] + 1

    def _candidates(self, session: int, place: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
        """`[D, K]` ids and probabilities after `place` committed tokens and the root; ever the same."""
        key = (session, place)
        if key not in self._drafts:
            random = np.random.default_rng([session % 2**32, place])
            depth = BLOCK_SIZE - 1
            best = np.clip(random.normal(self._sure[session], 0.15, size=(depth, 1)), 0.03, 0.97)
            rest = (1 - best) * 0.5 ** np.arange(1, WIDTH)
            probs = -np.sort(-np.concatenate([best, rest], axis=1), axis=1)
            ids = random.integers(VOCABULARY, 2 * VOCABULARY, size=(depth, WIDTH))  # none is ever true
            draws = (random.random((depth, 1)) > probs.cumsum(axis=1)).sum(axis=1)
            for row in range(depth):
                if draws[row] < WIDTH:
                    ids[row, draws[row]] = self._truth(session, place + 1 + row)
            self._drafts[key] = (ids.astype(np.int32), probs.astype(np.float32))
        return self._drafts[key]
