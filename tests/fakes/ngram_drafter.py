"""A drafter that continues as a sample text did: cheap, often right where texts have a fixed form.

After the last two tokens it proposes what followed them in the sample, and tokens of the sample by chance
beside it. It reads no features; that they arrive in the right number is asserted.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import torch

from ddtree.types import DrafterInfo, DraftRequest, DraftResult, Status, Usage


class NgramDrafter:
    """Drafts for any number of sequences; a session is the tokens it was given."""

    def __init__(self, sample: Sequence[int], *, block_size: int, draft_hash: str, seed: int = 0) -> None:
        self._following: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for place in range(2, len(sample)):
            self._following[tuple(sample[place - 2 : place])].append(sample[place])
        self._known = sorted(set(sample))
        self._block_size = block_size
        self._draft_hash = draft_hash
        self._random = random.Random(seed)
        self._sessions: dict[int, tuple[int, list[int]]] = {}  # id: (epoch, context ids)

    def info(self) -> DrafterInfo:
        """Describe like a real drafter."""
        return DrafterInfo(self._block_size, self._draft_hash, cost_ms=1.0, usage=self.usage())

    def usage(self) -> Usage:
        """Sessions; it has no pages."""
        return Usage(len(self._sessions), 0, 1)

    def release(self, session_ids: Sequence[int]) -> Usage:
        """Drop sessions."""
        for session_id in session_ids:
            self._sessions.pop(session_id, None)
        return self.usage()

    def draft(self, request: DraftRequest) -> DraftResult:
        """Take context, give candidates."""
        assert len(request.context_ids) == len(request.context_features) == int(request.counts.sum())
        width = min(request.width, len(self._known))
        status, rows, start = [], [], 0
        for index, session_id in enumerate(request.sessions.ids.tolist()):
            count = int(request.counts[index])
            new_ids = request.context_ids[start : start + count].tolist()
            start += count
            epoch, length = int(request.sessions.epochs[index]), int(request.sessions.lengths[index])
            if length == 0:
                self._sessions[session_id] = (epoch, [])
            known = self._sessions.get(session_id)
            is_known = known is not None and known[0] == epoch and len(known[1]) == length
            status.append(Status.OK if is_known else Status.SESSION_LOST)
            context: list[int] = []
            if known is not None and is_known:
                known[1].extend(new_ids)
                context = known[1]
            rows.append(self._candidates([*context, int(request.root_tokens[index])], request.depth, width))
        log_probs = torch.log_softmax(-torch.arange(width, dtype=torch.float32), dim=0)
        return DraftResult(
            torch.tensor(status, dtype=torch.int32),
            torch.tensor(rows, dtype=torch.int32).reshape(len(rows), request.depth, width),
            log_probs.expand(len(rows), request.depth, width),
        )

    def _candidates(self, ids: list[int], depth: int, width: int) -> list[list[int]]:
        rows = []
        for _ in range(depth):
            likely = dict.fromkeys(self._following.get(tuple(ids[-2:]), ()))
            others = self._random.sample(self._known, width)
            row = list(dict.fromkeys([*likely, *others]))[:width]
            rows.append(row)
            ids.append(row[0])
        return rows
