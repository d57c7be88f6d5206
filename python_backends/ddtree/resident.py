"""Rounds that stay on the device: one call of the stages instead of draft, build tree, verify and commit.

For a batch in which every sequence takes the target's most probable token; others go the general way, round
by round, on the same sessions. How many nodes a tree gets is decided before the round, since nothing of it
is seen on the host in between: by what the last trees of each sequence promised, corrected by what became of
them, and by what a round of each prepared size takes. This module knows no device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ddtree.device.messages import NO_DRAFTER, RoundResult, RoundSizes
from ddtree.events import FellBack, Observe, ignore
from ddtree.live import Live
from ddtree.planner import RoundPlanner
from ddtree.stages.base import WholeRounds
from ddtree.types import Status

_WEIGHT = 0.2  # of the newest tree in what is expected of the next
_TRY_EVERY = 32  # plain rounds, after which one drafts: nothing else tells what drafts give by now
_COST_WEIGHT = 0.1  # of the newest round in what rounds of its size take
_INERTIA = 8.0  # accepted tokens that count as nothing unusual


@dataclass
class Forecast:
    """What trees of one sequence are expected to give, by their size."""

    tokens: list[float] | None = None  # draft tokens accepted with so many nodes, by size
    trust: float = 1.0  # accepted over promised

    def learn(self, promised: Sequence[float], accepted: float, at: float) -> None:
        """Take what a tree promised by size, and what was accepted where `at` was promised."""
        expected = self.trust * at
        self.trust *= math.exp(_WEIGHT * (accepted - expected) / (expected + _INERTIA))
        self.trust = min(4.0, max(0.25, self.trust))
        known = promised if self.tokens is None else self.tokens
        self.tokens = [old + _WEIGHT * (new - old) for old, new in zip(known, promised, strict=True)]


@dataclass(frozen=True)
class FinishedTrees:
    """Trees of a round and what was accepted of them."""

    sessions: Sequence[int]  # whose they are
    log_probs: NDArray[np.float32]  # [S, N] of the paths to their nodes, best first, then -inf
    counts: NDArray[np.int32]  # [S] nodes, at least one
    accepted: NDArray[np.int32]  # [S]


@dataclass
class RoundChoice:
    """Which size of trees gives the most tokens per millisecond, by what rounds take."""

    sizes: RoundSizes
    forecasts: dict[int, Forecast] = field(default_factory=dict)  # by session
    typical: Forecast = field(default_factory=Forecast)  # of a sequence that has not drafted yet
    host_ms: float = 0.0  # of a round, beside what the device takes
    plain_rounds: int = 0  # since the last one with drafts
    is_resting: bool = False  # whether trees do not pay; one may be tried all the same
    device_ms: dict[tuple[int, int], float] = field(init=False)  # as `sizes.ms`, by what rounds take since
    _nodes: NDArray[np.int64] = field(init=False, repr=False)  # those of `sizes`, ascending from 0

    def __post_init__(self) -> None:
        self.device_ms = dict(self.sizes.ms)
        self._nodes = np.asarray(self.sizes.nodes)

    def nodes(self, open_sessions: Sequence[int], fixed: int, sequences: int, most_nodes: int) -> int:
        """Nodes for every sequence that leaves its budget open; the round must hold `fixed` anyway."""
        best, best_rate, weighed = 0, 0.0, 0
        places = self._places(sequences)
        prepared, expected = self.sizes.prepared(places), self._expected(open_sessions)
        for nodes, tokens in zip(self.sizes.nodes, expected, strict=True):
            size = next((size for size in prepared if size >= max(nodes, fixed)), None)
            if size is None or (nodes > most_nodes and nodes > 0):
                break
            weighed += nodes > 0
            rate = (sequences + tokens) / (self.device_ms[(places, size)] + self.host_ms)
            if rate > best_rate:
                best, best_rate = nodes, rate
        if weighed:  # else there was no choice: what trees would pay is as unknown as before
            self.is_resting = best == 0
        self.plain_rounds = 0 if best or fixed else self.plain_rounds + 1
        if self.plain_rounds > _TRY_EVERY:
            self.plain_rounds = 0
            smallest = next((n for n in self.sizes.nodes if 0 < n <= most_nodes), 0)
            best = smallest if self.sizes.nodes_for(sequences, smallest) is not None else 0
        return best

    def learn(self, trees: FinishedTrees) -> None:
        """Take a round's trees."""
        promised, totals = self._promised(trees)
        accepted = trees.accepted.tolist()
        for session, *seen in zip(trees.sessions, promised, accepted, totals, strict=True):
            forecast = self.forecasts.get(session)
            if forecast is None:
                forecast = self.forecasts[session] = Forecast(trust=self.typical.trust)
            forecast.learn(*seen)
        count = len(accepted)
        mean = [sum(of_size) / count for of_size in zip(*promised, strict=True)]
        self.typical.learn(mean, sum(accepted) / count, sum(totals) / count)

    def _promised(self, trees: FinishedTrees) -> tuple[list[list[float]], list[float]]:
        """`[S, sizes]` what trees of each size promise, and `[S]` what these do.

        Best first, no node beyond a tree is more probable than its last. Probabilities fall with rank about
        as a power of it: here to the -1.5.
        """
        probabilities, counts = np.exp(trees.log_probs), trees.counts
        sums = probabilities.cumsum(axis=1, dtype=np.float64)
        last = probabilities[np.arange(len(counts)), counts - 1]
        beyond = 1 - np.sqrt(counts[:, None] / np.maximum(self._nodes, counts[:, None]))
        beyond *= (2 * last * counts)[:, None]
        beyond += sums[:, np.minimum(self._nodes, sums.shape[1]) - 1]
        beyond[:, 0] = 0.0  # no nodes, no tokens
        return beyond.tolist(), sums[:, -1].tolist()

    def observe(self, sequences: int, nodes: int, device_ms: float, wall_ms: float) -> None:
        """Note what a round took on the device, and in all."""
        key = (self._places(sequences), nodes)
        self.device_ms[key] += _COST_WEIGHT * (device_ms - self.device_ms[key])
        self.host_ms += _COST_WEIGHT * (max(0.0, wall_ms - device_ms) - self.host_ms)

    def plain_ms(self, sequences: int) -> float:
        """What a round without drafts takes."""
        return self.device_ms[(self._places(sequences), 0)] + self.host_ms

    def forget(self, batch: Sequence[Live]) -> None:
        """Keep what is known of these sequences only."""
        if len(self.forecasts) > 2 * len(batch) + 64:
            live = {live.sequence.session_id for live in batch}
            self.forecasts = {s: f for s, f in self.forecasts.items() if s in live}

    def _places(self, sequences: int) -> int:
        places = self.sizes.places_for(sequences)
        assert places is not None, "the batch was looked at before"
        return places

    def _expected(self, sessions: Sequence[int]) -> list[float]:
        """Draft tokens that these sequences are expected to accept together, by size."""
        expected = [0.0] * len(self.sizes.nodes)
        for session in sessions:
            forecast = self.forecasts.get(session, self.typical)
            tokens, trust = forecast.tokens, forecast.trust
            if tokens is None:  # nothing was ever drafted: take the drafter at its best
                tokens, trust = [1.0 + math.log2(nodes) if nodes else 0.0 for nodes in self.sizes.nodes], 1.0
            expected = [known + trust * more for known, more in zip(expected, tokens, strict=True)]
        return expected


@dataclass(frozen=True)
class ResidentRound:
    """A finished round and who drafted in it."""

    result: RoundResult
    drafting: list[Live]

    def stage_ms(self, wall_ms: float) -> dict[str, float]:
        """Milliseconds by stage; what the host took beside the device counts as verifying."""
        device = self.result.stage_ms
        return {**device, "verify": device["verify"] + max(0.0, wall_ms - sum(device.values()))}


class ResidentRounds:
    """Plans rounds for stages that do them in one call."""

    def __init__(
        self,
        rounds: WholeRounds,
        planner: RoundPlanner,
        lost: Callable[[Live], None],
        timer: Callable[[], float] = time.perf_counter,
        observe: Observe = ignore,
    ) -> None:
        self._rounds = rounds
        self._planner = planner
        self._lost = lost  # told of a sequence that the drafter did not have
        self._timer = timer
        self._observe = observe
        self.choice = RoundChoice(rounds.sizes)

    def takes(self, batch: Sequence[Live]) -> bool:
        """Whether a round of these sequences can stay on the device."""
        budget = max(0 if live.is_budget_open else live.node_cap for live in batch)
        is_prepared = self.choice.sizes.nodes_for(len(batch), budget) is not None
        return is_prepared and all(not live.settings and live.sink.trace is None for live in batch)

    async def run(self, batch: Sequence[Live]) -> ResidentRound:
        """Do one round. A drafter that was in step with its verifier is so after it; others draft nothing."""
        started = self._timer()
        drafters = [live.draft.is_ready and live.draft.length == live.committed for live in batch]
        budgets, nodes = self._budgets(batch, drafters)
        epochs = [
            live.draft.epoch if has_drafter else NO_DRAFTER
            for live, has_drafter in zip(batch, drafters, strict=True)
        ]
        result = await self._rounds.round(self._planner.resident(batch, budgets, epochs, nodes))
        is_held = [status == Status.OK for status in result.status.tolist()]
        self._learn(batch, result, is_held)
        told = zip(result.draft_status.tolist(), result.accepted_counts.tolist(), drafters, strict=True)
        for live, held, (draft_status, accepted, has_drafter) in zip(batch, is_held, told, strict=True):
            if not held:
                continue
            if draft_status != Status.OK:
                self._lost(live)
            else:
                self._follow(live, has_drafter, accepted + 1)
        wall_ms = (self._timer() - started) * 1e3
        if all(is_held):  # else the round was a smaller one than was asked for
            self.choice.observe(len(batch), nodes, sum(result.stage_ms.values()), wall_ms)
        self.choice.forget(batch)
        drafting = [live for live, budget in zip(batch, budgets, strict=True) if budget]
        return ResidentRound(result, drafting)

    def _learn(self, batch: Sequence[Live], result: RoundResult, is_held: Sequence[bool]) -> None:
        """Learn from trees whose size was chosen here: of the others nothing is ever expected."""
        log_probs, counts = result.path_log_probs.numpy(), result.node_counts.numpy()
        accepted = result.accepted_counts.numpy()
        told = zip(batch, counts.tolist(), is_held, strict=True)
        places = [p for p, (live, count, held) in enumerate(told) if held and count and live.is_budget_open]
        if not places:
            return
        if len(places) < len(batch):
            log_probs, counts, accepted = log_probs[places], counts[places], accepted[places]
        sessions = [batch[place].sequence.session_id for place in places]
        self.choice.learn(FinishedTrees(sessions, log_probs, counts, accepted))

    def _budgets(self, batch: Sequence[Live], drafters: Sequence[bool]) -> tuple[list[int], int]:
        """Nodes for each sequence, and the prepared size that holds them."""
        able = [
            has_drafter and live.sequence.remaining_tokens > 1
            for live, has_drafter in zip(batch, drafters, strict=True)
        ]
        drafting = [live for live, is_able in zip(batch, able, strict=True) if is_able]
        free = [live for live in drafting if live.is_budget_open]
        fixed = max((live.node_cap for live in drafting if not live.is_budget_open), default=0)
        chosen = 0
        if free:
            sessions = [live.sequence.session_id for live in free]
            chosen = self.choice.nodes(sessions, fixed, len(batch), min(live.node_cap for live in free))
            self._note_rest(free)
        budgets = [
            0 if not is_able else chosen if live.is_budget_open else live.node_cap
            for live, is_able in zip(batch, able, strict=True)
        ]
        nodes = self.choice.sizes.nodes_for(len(batch), max(budgets))
        assert nodes is not None, "`takes` looked at the fixed budgets, and a chosen one is a size"
        return budgets, nodes

    def _note_rest(self, free: Sequence[Live]) -> None:
        """Tell of those who begin to go on without drafts because these do not pay."""
        is_resting = self.choice.is_resting
        for live in free:
            if is_resting and not live.outlook.is_resting:
                self._observe(FellBack("not_paying"))
            live.outlook.is_resting = is_resting

    @staticmethod
    def _follow(live: Live, has_drafter: bool, count: int) -> None:
        """Note what the drafter has now that `count` tokens more are committed."""
        if has_drafter:
            live.draft.length += count
            live.draft.drafts += 1
        elif live.draft.is_wanted and not live.draft.is_lost:
            live.draft.fall_behind(live.committed + count)
