"""Context on its way to the drafter's cache. Knows neither sessions nor where it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
        counts, ids = request.counts.tolist(), request.context_ids.tolist()
        stops = list(accumulate(counts))
        spans = [slice(stops[place] - counts[place], stops[place]) for place in live]
        features = request.context_features
        if len(live) < len(counts):
            features = torch.cat([features[:0], *(features[span] for span in spans)])
        return cls(features, [ids[span] for span in spans])
