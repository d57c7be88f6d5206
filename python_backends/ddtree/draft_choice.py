"""Which sequences draft in a round: those whose drafts give more tokens than their time would give otherwise.

A sequence that drafts badly does not draft, and keeps nobody else from it. What its drafts would give now is
found out by trying again, for which a fixed share of the time may be lost: where drafts almost pay a try
costs almost nothing and is often made, where they are hopeless it is rare.

This module sees probabilities, costs and how deep trees became, no trees and no stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddtree.promise import updated
from ddtree.round_cost import RoundCost

# Rounds, one of which is plain where drafting pays little: nothing else tells what plain takes.
_PLAIN_EVERY = 32
_CLEAR_ADVANTAGE = 1.6
_LEAST_TRIED = 0.25  # of those that rest, in one try: a draft for one costs almost as much as for several
_WEIGHT = 0.15  # of the newest draft in what is expected of the next
_WEIGHT_AFTER_REST = 0.5
_WEIGHT_OF_ONE = 0.05  # in what is expected of a sequence that has not drafted yet
_DEEPER = 3  # positions beyond the deepest node of late that are asked for


@dataclass
class Outlook:
    """What drafts of one sequence give: a mean over its last ones."""

    tokens: float = 0.0  # draft tokens expected to be accepted in a round
    nodes: float = 0.0  # draft nodes verified for that
    drafted: int = 0  # round of the last draft; 0 before the first
    is_resting: bool = False
    trust: float = 1.0  # see `promise`
    reach: int = 0  # depth of its trees lately

    def depth(self, most: int) -> int:
        """Draft positions worth asking for, where a tree's size is open: each costs a row of the head."""
        return min(most, self.reach + _DEEPER) if self.drafted else most

    def reached(self, depth: int) -> None:
        """Take how deep a tree became; what was deeper before is forgotten step by step."""
        self.reach = max(depth, self.reach - 1)

    def learn(self, tokens: float, nodes: float, weight: float) -> None:
        """Take what a draft promised and what it took."""
        self.tokens += weight * (tokens - self.tokens)
        self.nodes += weight * (nodes - self.nodes)


@dataclass(frozen=True)
class _Best:
    """The sequences whose drafting gives the most tokens per millisecond."""

    worthy: list[int]
    rate: float  # tokens per millisecond
    advantage: float  # times the rate when nobody drafts who need not
    row_ms: float  # of one more draft node


class DraftChoice:
    """Decides for all sequences of a round together."""

    def __init__(self, cost: RoundCost, try_share: float = 0.02) -> None:
        """Take what rounds cost; at most `try_share` of the time may be lost with tries."""
        self._cost = cost
        self._try_share = try_share
        self._round = 0
        self._plain_round = 0  # the last one in which nobody drafted
        self._credit_ms = 0.0  # that may be lost with tries now
        self._typical = Outlook()

    def choose(self, outlooks: Sequence[Outlook], fixed: Sequence[Outlook], sequences: int) -> list[bool]:
        """Say for each sequence whether it drafts, and note which of them rest.

        Args:
            outlooks: of the sequences that may draft or not.
            fixed: of those that draft in any case.
            sequences: all of the round, drafting or not.
        """
        self._round += 1
        if not outlooks:
            return []
        for outlook in outlooks:
            if not outlook.drafted:
                outlook.trust = self._typical.trust
        if not self._typical.drafted:
            return [True] * len(outlooks)
        expected = [outlook if outlook.drafted else self._typical for outlook in outlooks]
        tokens = np.array([each.tokens for each in expected])
        nodes = np.array([each.nodes for each in expected])
        best = self._best(tokens, nodes, fixed, sequences)
        is_due = self._round - self._plain_round >= _PLAIN_EVERY
        if is_due and not fixed and best.advantage < _CLEAR_ADVANTAGE:
            self._plain_round = self._round
            return [False] * len(outlooks)
        chosen = [False] * len(outlooks)
        for index in best.worthy:
            chosen[index] = True
        resting = [index for index, is_chosen in enumerate(chosen) if not is_chosen]
        for index, outlook in enumerate(outlooks):
            outlook.is_resting = not chosen[index]
        resting.sort(key=lambda index: outlooks[index].drafted)
        loss_ms = nodes[resting] * best.row_ms - tokens[resting] / best.rate
        drafting = len(fixed) + len(best.worthy)
        for index in resting[: self._affordable(loss_ms, drafting, sequences)]:
            chosen[index] = True
        if not fixed and not any(chosen):
            self._plain_round = self._round
        return chosen

    def learn(self, outlook: Outlook, tokens: float, nodes: int) -> None:
        """Take what a draft of a sequence promised: draft tokens to be accepted, for so many nodes."""
        if not self._typical.drafted:
            self._typical = Outlook(tokens, nodes, drafted=self._round, trust=self._typical.trust)
        self._typical.learn(tokens, nodes, _WEIGHT_OF_ONE)
        weight = _WEIGHT_AFTER_REST if outlook.is_resting else _WEIGHT
        outlook.learn(tokens, nodes, weight if outlook.drafted else 1.0)
        outlook.drafted = self._round

    def note_surprise(self, outlook: Outlook, surprise: float, promised: float) -> None:
        """Take how many more of a sequence's draft tokens were accepted than promised."""
        outlook.trust = updated(outlook.trust, surprise, promised)
        self._typical.trust += _WEIGHT_OF_ONE * (outlook.trust - self._typical.trust)

    def _affordable(self, loss_ms: NDArray[np.float64], drafting: int, sequences: int) -> int:
        """How many of those that rest may try now, given what each one's rows and tokens make it lose."""
        self._credit_ms += self._try_share * self._cost.plain_ms(sequences)
        if not len(loss_ms):
            return 0
        draft_ms = self._cost.draft_table(drafting + len(loss_ms))[drafting:]
        losses = _sums(loss_ms) + draft_ms - draft_ms[0]
        self._credit_ms = min(self._credit_ms, max(losses[-1], 0.0))
        least = math.ceil(_LEAST_TRIED * len(loss_ms))
        count = int(np.flatnonzero(losses <= self._credit_ms)[-1])  # none at all loses nothing
        if count < least:
            return 0
        self._credit_ms -= max(0.0, losses[count])
        return count

    def _best(
        self,
        tokens: NDArray[np.float64],  # [n]
        nodes: NDArray[np.float64],  # [n]
        fixed: Sequence[Outlook],
        sequences: int,
    ) -> _Best:
        base_tokens = sequences + sum(outlook.tokens for outlook in fixed)
        base_nodes = sum(outlook.nodes for outlook in fixed)
        verify_ms = self._cost.table(sequences, 0, math.ceil(base_nodes + nodes.sum()) + 1)[sequences - 1 :]
        draft_ms = self._cost.draft_table(len(fixed) + len(tokens))[len(fixed) :]
        row_ms = float(verify_ms[-1] - verify_ms[0]) / (len(verify_ms) - 1)
        rate = base_tokens / float(verify_ms[round(base_nodes)] + draft_ms[0])
        order, count = np.arange(len(tokens)), 0
        for _ in range(2):  # the order depends on the rate: what a row costs is worth so many tokens
            order = np.argsort(rate * row_ms * nodes - tokens, kind="stable")
            rows = np.rint(base_nodes + _sums(nodes[order])).astype(np.int64)
            rates = (base_tokens + _sums(tokens[order])) / (verify_ms[rows] + draft_ms)
            count = int(rates.argmax())
            rate = float(rates[count])
        return _Best(order[:count].tolist(), rate, float(rates[count] / rates[0]), row_ms)


def _sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums of the first 0, 1, … values."""
    return np.concatenate([[0.0], np.cumsum(values)])
