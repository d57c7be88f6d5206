"""Context on its way to the drafter's cache. Knows neither sessions nor where it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ddtree.errors import InvalidArgument
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

    def taken(self) -> FreshContext:
        """What is left of it when the sessions have it."""
        return FreshContext(self.features[:0], [()] * len(self.ids))

    @classmethod
    def of(cls, request: DraftRequest, live: Sequence[int]) -> FreshContext:
        """What a request brings for the sequences of some places.

        Raises:
            InvalidArgument: the counts do not divide what it brings.
        """
        counts, ids = request.counts.tolist(), request.context_ids.tolist()
        features, stops = request.context_features, list(accumulate(counts))
        if min(counts) < 0 or not stops[-1] == len(ids) == len(features):
            raise InvalidArgument.of(
                "counts",
                f"must be 0 or more each and add up to {len(ids)} context_ids and {len(features)} features",
                counts,
                "send a count for every sequence",
            )
        spans = [slice(stops[place] - counts[place], stops[place]) for place in live]
        if len(live) < len(counts):
            features = torch.cat([features[:0], *(features[span] for span in spans)])
        return cls(features, [ids[span] for span in spans])
