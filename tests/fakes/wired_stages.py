"""Stages behind their operations without a server: what crosses between them are arrays, as in Triton.

The verifier can be killed and loaded again, and its sessions can lose their pages to others. The drafter is
an oracle that sees to it that context features are those of the ids they come with.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddtree.engine import Engine
from ddtree.feature_references import DrafterReferences, VerifierReferences
from ddtree.scheduler import Scheduler
from ddtree.shared_features import FeatureReader
from ddtree.stages.base import DRAFTER, TARGET_VERIFIER, TREE_BUILDER
from ddtree.stages.bls import BlsStages
from ddtree.stages.operations import Operation, drafter_operations, exchange, verifier_operations
from ddtree.text import TextCodec
from ddtree.tree import build_trees
from ddtree.types import DraftRequest, DraftResult, PrefillRequest, SessionBatch, Status, TreeRequest
from ddtree.wire import Arrays
from tests.fakes.oracle_drafter import OracleDrafter
from tests.fakes.pipeline import CPU, idle, make_verifier
from tests.fakes.tiny_models import BLOCK_SIZE

CHUNK = 16  # tokens of a prompt that are read in a step


class CheckingDrafter(OracleDrafter):
    """An oracle that compares the features it is given with those of a verifier of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, block_size=BLOCK_SIZE, draft_hash="tiny", noise=0.5)
        self._verifier = make_verifier(folder, prefix_cache=False)
        self.rows = 0  # that were right
        self.wrong: list[int] = []  # lengths of contexts with a wrong one
        self.lost = 0  # sequences that brought context and were lost

    def draft(self, request: DraftRequest) -> DraftResult:
        """Check the context, and draft."""
        result = super().draft(request)
        given = request.context_features.split(request.counts.tolist())
        for session_id, status, rows in zip(
            request.sessions.ids.tolist(), result.status.tolist(), given, strict=True
        ):
            if status != Status.OK:
                self.lost += len(rows) > 0
            elif len(rows):
                ids = self._sessions[session_id][1]
                if torch.allclose(rows, self._features(ids)[-len(rows) :], rtol=1e-3, atol=1e-4):
                    self.rows += len(rows)
                else:
                    self.wrong.append(len(ids))
        return result

    def _features(self, ids: list[int]) -> torch.Tensor:
        zero, count = torch.zeros(1, dtype=torch.int32), torch.tensor([len(ids)], dtype=torch.int32)
        request = PrefillRequest(SessionBatch(zero.long(), zero, zero), torch.tensor(ids), count, count)
        features = self._verifier.prefill(request).features
        self._verifier.release([0])
        return features


class WiredStages:
    """A `StageCall` to stages of this process; `before` is told of each call's operation first."""

    def __init__(self, folder: Path, choice: str) -> None:
        """Load the stages; `choice` is the setting `features_by_reference`."""
        self._folder = folder
        self._choice = choice
        self.before: Callable[[str], None] = lambda _: None
        self.widths: Counter[int] = Counter()  # rows of features that crossed, by bytes a row
        self.drafter = CheckingDrafter(folder)
        reads = DrafterReferences(FeatureReader(CPU, torch.float32), is_wanted=choice == "always")
        self._refers: VerifierReferences | None = None
        self._operations: dict[str, dict[str, Operation]] = {
            DRAFTER: drafter_operations(self.drafter, reads),
            TREE_BUILDER: {"build_tree": exchange(build_trees, TreeRequest, torch.float32)},
        }
        self.load_verifier()

    def load_verifier(self) -> None:
        """Load the verifier; one that was loaded before is gone, as if its process had been killed."""
        if self._refers is not None and self._refers._shared is not None:
            os.close(self._refers._shared._number)
        self.verifier = make_verifier(self._folder)
        self._refers = VerifierReferences.of(self.verifier, self._choice)
        self._operations[TARGET_VERIFIER] = verifier_operations(self.verifier, self._refers)

    def take_pages(self) -> None:
        """Let the verifier forget its sessions, and somebody else write to all of its pages."""
        self.verifier.release([session.session_id for session in self.verifier.sessions])
        pages = self.verifier.pool.reserve(self.verifier.pool.total_slots)
        assert pages is not None
        self.verifier.pool.features.normal_()
        self.verifier.pool.release(pages)

    async def __call__(self, model: str, operation: str, arrays: Arrays) -> Mapping[str, Any]:
        """Answer an operation."""
        self.before(operation)
        with torch.inference_mode():
            answer = self._operations[model][operation](arrays)
        if "features" in answer:
            self.widths[answer["features"].shape[1]] += len(answer["features"])
        return {name: np.array(array) for name, array in answer.items()}


@asynccontextmanager
async def engine_of(
    folder: Path, wired: WiredStages, stages: BlsStages | None = None
) -> AsyncIterator[Engine]:
    """An engine over these stages; afterwards nothing wrong was drafted from, and the stages are empty."""
    scheduler = Scheduler(max_sequences=32, max_waiting=64, prefill_chunk=CHUNK)
    engine = Engine(
        stages or BlsStages(wired), TextCodec.from_folder(folder), scheduler=scheduler, feed_chunk=8
    )
    await engine.start()
    try:
        yield engine
        wired.before = lambda _: None
        await idle(engine)
        assert wired.drafter.wrong == []
        wired.verifier.check_integrity()
        assert wired.verifier.usage().pages_used == wired.drafter.usage().sessions == 0
    finally:
        await engine.stop()
