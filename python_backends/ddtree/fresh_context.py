"""Context on its way to the drafter's cache. Knows neither sessions nor where it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ddtree.types import DraftRequest


@dataclass(frozen=True)
class FreshContext:
    """Context that sequences have got and their sessions have not."""

    features: torch.Tensor  # [sum counts, H], sequence after sequence, on the host or the device
    ids: Sequence[Sequence[int]]  # of each sequence

    @property
    def counts(self) -> list[int]:
        """Of each sequence."""
        return [len(ids) for ids in self.ids]

    @classmethod
    def of(cls, request: DraftRequest, live: Sequence[int]) -> FreshContext:
        """What a request brings for the sequences of some places."""
        stops, ids = torch.cumsum(request.counts, 0).tolist(), request.context_ids.tolist()
        spans = [(stops[place] - int(request.counts[place]), stops[place]) for place in live]
        features = request.context_features
        if len(live) < len(stops):
            rows = [torch.arange(*span) for span in spans]
            features = features[torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)]
        return cls(features, [ids[start:stop] for start, stop in spans])
