"""A drafter that keeps the context it is given and lets another one draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ddtree.stages.in_process import DraftStage
from ddtree.types import DrafterInfo, DraftRequest, DraftResult, Usage


@dataclass
class Context:
    """What one session was told."""

    ids: list[int] = field(default_factory=list)
    features: list[torch.Tensor] = field(default_factory=list)


class RecordingDrafter:
    """Passes every call on; released sessions stay recorded."""

    def __init__(self, drafter: DraftStage) -> None:
        self._drafter = drafter
        self.contexts: dict[int, Context] = {}

    def info(self) -> DrafterInfo:
        """The other's."""
        return self._drafter.info()

    def release(self, session_ids: Sequence[int]) -> Usage:
        """The other's."""
        return self._drafter.release(session_ids)

    def draft(self, request: DraftRequest) -> DraftResult:
        """Keep the context, then draft."""
        start = 0
        for session, count in zip(request.sessions.ids.tolist(), request.counts.tolist(), strict=True):
            context = self.contexts.setdefault(session, Context())
            context.ids += request.context_ids[start : start + count].tolist()
            context.features.append(request.context_features[start : start + count].clone())
            start += count
        return self._drafter.draft(request)
