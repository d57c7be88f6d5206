"""What a drafter promises of its trees, and how far its word holds.

A node's probability comes from candidates and trees, which the orchestrator has anyway: no message carries
it. Drafters are too sure of themselves on some texts and not sure enough on others: on the demo pair the
drafts of arithmetic were accepted 1.24 times as often as promised, those of small talk 0.97 times, and what
was off was the first candidate of a position. The choice of how much to draft rests on these numbers, so
the chance that the first candidate misses is raised to a power that follows what became of the sequence's
drafts. Knows neither stages nor costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ddtree.types import TreeBatch, TreeRequest

_STEP = 0.5  # of what a round's surprise says, taken
_INERTIA = 8.0  # tokens of surprise that count as nothing unusual
_LEAST, _MOST = 0.25, 4.0


def trusted(
    log_probs: torch.Tensor,  # [S, ..., K]
    trust: torch.Tensor,  # [S], positive; 1 changes nothing
) -> torch.Tensor:
    """Correct the best candidate of each position: the chance that it misses is raised to the power `trust`.

    It stays the best one and within [0, 1]; a candidate of -inf stays.
    """
    if not log_probs.numel():
        return log_probs
    # Few and small arrays, of which numpy makes a fraction of torch's work.
    changed = log_probs.cpu().numpy().reshape(-1, log_probs.shape[-1]).copy()
    power = trust.cpu().numpy().repeat(len(changed) // len(trust))
    rows, place = np.arange(len(changed)), changed.argmax(axis=-1)  # the first among equals
    best = changed[rows, place]
    changed[rows, place] = -np.inf
    with np.errstate(divide="ignore"):  # what is sure, and what is not there
        miss = -np.expm1(np.minimum(best, 0))  # not 1 - exp: that is 0 for whatever is nearly sure
        hit = np.log(-np.expm1(power * np.log(miss)))
    changed[rows, place] = np.where(power == 1, best, np.maximum(hit, changed.max(axis=-1)))
    return torch.from_numpy(changed.reshape(log_probs.shape))


@dataclass(frozen=True)
class Promise:
    """Trees with what was promised of their nodes; arrays are `[S, N]`, zeros where there is no node."""

    trees: TreeBatch
    own: NDArray[np.float64]  # probability of a node when its parent was accepted
    paths: NDArray[np.float64]  # probability of a node's path from the root

    @classmethod
    def of(cls, trees: TreeBatch, request: TreeRequest) -> Promise:
        """Look up the nodes of `trees`, built as `request` asked."""
        tokens, parents, depths = (
            field.cpu().numpy().astype(np.int64) for field in (trees.tokens, trees.parents, trees.depths)
        )
        is_node = np.arange(tokens.shape[1]) < trees.counts.cpu().numpy()[:, None]
        rows = np.arange(len(tokens))[:, None]
        places = np.maximum(depths - 1, 0)
        ranks = (request.top_ids.cpu().numpy()[rows, places] == tokens[..., None]).argmax(axis=-1)
        if request.edge_log_probs.numel():
            parent_ranks = np.take_along_axis(np.pad(ranks, ((0, 0), (1, 0))), parents, axis=1)
            log_probs = request.edge_log_probs.cpu().numpy()[rows, places, parent_ranks, ranks]
        else:
            log_probs = request.top_log_probs.cpu().numpy()[rows, places, ranks]
        own = np.where(is_node, np.exp(log_probs.astype(np.float64)), 0.0)
        above, paths = np.ones((len(own), own.shape[1] + 1)), own  # above: of the root too, which is sure
        for _ in range(1, int(depths.max(initial=0))):
            above[:, 1:] = paths
            paths = own * above[rows, parents]
        return cls(trees, own, paths)

    def tokens(self) -> list[float]:
        """Draft tokens promised to be accepted, of each sequence."""
        totals: list[float] = self.paths.sum(axis=1).tolist()
        return totals

    def surprise(
        self,
        accepted: NDArray[np.int64],  # [S, D] accepted tokens
        counts: NDArray[np.int64],  # [S] how many of them count
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Tokens accepted beyond what was promised along the way, and what was promised, both `[S]`.

        Only what the target was asked counts: the children of the root and of every accepted node.
        """
        tokens, parents = (field.cpu().numpy() for field in (self.trees.tokens, self.trees.parents))
        is_node = self.own > 0
        at = np.zeros(len(tokens), dtype=np.int64)
        is_on = np.ones(len(tokens), dtype=np.bool_)
        hits, promised = np.zeros(len(tokens)), np.zeros(len(tokens))
        for depth in range(int(counts.max(initial=0)) + 1):
            children = is_node & (parents == at[:, None]) & is_on[:, None]
            promised += np.minimum((self.own * children).sum(axis=1), 1.0)
            is_on = is_on & (counts > depth)
            hits += is_on
            if depth < accepted.shape[1]:
                at = (children & (tokens == accepted[:, depth, None])).argmax(axis=1) + 1
        return hits - promised, promised


def updated(trust: float, surprise: float, promised: float) -> float:
    """Follow what became of a round's drafts: more trust when more was accepted than promised."""
    changed = trust * float(np.exp(_STEP * surprise / (promised + _INERTIA)))
    return min(_MOST, max(_LEAST, changed))
