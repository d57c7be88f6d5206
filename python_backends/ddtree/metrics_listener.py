"""Turns what happens into numbers (`metrics`). Knows what events mean, not who publishes the numbers."""

from __future__ import annotations

import time
from collections import Counter as Occurrences
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddtree.events import (
    Emitted,
    Event,
    FellBack,
    Preempted,
    PrefixHit,
    RequestArrived,
    RequestEnded,
    RequestWatch,
    RoundDone,
    SequenceQueued,
    SessionLost,
    StageCalled,
)
from ddtree.live import Live
from ddtree.metrics import Metrics
from ddtree.sequence import SequenceState, Stats
from ddtree.types import Usage

# Operations that are part of decoding; the others (`describe`, `release`) would only blur the times.
_TIMED = frozenset({"prefill", "draft", "build_tree", "verify", "read_features"})


@dataclass
class _Progress:
    """How far a sequence's tokens are counted."""

    stats: Stats
    emitted_s: float = 0.0  # 0 until there is a token


class MetricsListener:
    """Hears events, fills `metrics`."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        on_change: Callable[[], None] = lambda: None,
        on_turn: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take the numbers to fill.

        Args:
            metrics: the numbers.
            on_change: called at every event; must be cheap.
            on_turn: called when the first request comes and when the last one ends.
            clock: seconds, as `RequestWatch.arrived_s` counts them.
        """
        self._metrics = metrics
        self._on_change = on_change
        self._on_turn = on_turn
        self._clock = clock
        self._in_hand: dict[RequestWatch, list[Live]] = {}
        self._answered: set[RequestWatch] = set()  # those with a first token
        self._progress: dict[int, _Progress] = {}
        self._accepted: Occurrences[int] = Occurrences()  # rounds of a sequence by accepted tokens
        self._verify_seconds = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {
            RequestArrived: self._arrived,
            RequestEnded: self._ended,
            SequenceQueued: self._queued,
            Emitted: self._emitted,
            RoundDone: self._round_done,
            StageCalled: self._stage_called,
            SessionLost: lambda event: metrics.recoveries(event.stage).add(),
            Preempted: lambda _: metrics.preemptions().add(),
            PrefixHit: lambda event: metrics.prefix_hit_tokens().add(event.tokens),
            FellBack: lambda event: metrics.fallbacks(event.reason).add(),
        }

    def __call__(self, event: Event) -> None:
        """Count an event."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)
        # Calls of stages come with events of their own, but for those that the publisher makes itself.
        if not isinstance(event, StageCalled):
            self._on_change()

    def stop(self) -> None:
        """Hear nothing more: nobody publishes."""
        self._handlers.clear()
        self._in_hand.clear()

    @property
    def has_requests(self) -> bool:
        """Whether a request is in hand."""
        return bool(self._in_hand)

    def refresh(self) -> None:
        """Bring up to date what is read off rather than counted: a gauge so made cannot drift."""
        queued = 0
        states: Occurrences[SequenceState] = Occurrences()
        for lives in self._in_hand.values():
            states.update(live.sequence.state for live in lives)
            queued += bool(lives) and all(live.sequence.state is SequenceState.WAITING for live in lives)
        self._metrics.active_requests().set(len(self._in_hand) - queued)
        self._metrics.queued_requests().set(queued)
        running = states[SequenceState.PREFILLING] + states[SequenceState.DECODING]
        self._metrics.sequences("running").set(running)
        self._metrics.sequences("waiting").set(states[SequenceState.WAITING])
        at_least = 0
        for depth in range(max(self._accepted, default=0), 0, -1):
            at_least += self._accepted[depth]
            self._metrics.accepted_at_depth(str(depth)).add(at_least)
        self._accepted.clear()

    def note_usage(self, stage: str, usage: Usage) -> None:
        """Take what a stage says that it holds."""
        self._metrics.kv_pages_used(stage).set(usage.pages_used)
        self._metrics.kv_pages_capacity(stage).set(usage.pages_total)
        self._metrics.sessions(stage).set(usage.sessions)
        if usage.states_total:
            self._metrics.states_used(stage).set(usage.states_used)
            self._metrics.states_capacity(stage).set(usage.states_total)
            self._metrics.snapshots(stage).set(usage.snapshots)

    def _arrived(self, event: RequestArrived) -> None:
        if not self._in_hand:
            self._on_turn()
        self._in_hand[event.request] = []

    def _queued(self, event: SequenceQueued) -> None:
        live = event.live
        self._in_hand[live.request].append(live)
        self._progress[live.sequence.session_id] = _Progress(live.sequence.stats)
        self._metrics.prompt_tokens().add(live.sequence.stats.prompt_tokens)

    def _ended(self, event: RequestEnded) -> None:
        for live in self._in_hand.pop(event.request):
            self._progress.pop(live.sequence.session_id, None)
        if not self._in_hand:
            self._on_turn()
        self._answered.discard(event.request)
        self._metrics.requests(event.outcome).add()
        if event.outcome == "completed":
            self._metrics.request_seconds().observe(self._clock() - event.request.arrived_s)
        elif event.outcome == "cancelled":
            self._metrics.cancellations(event.cause or "client_gone").add()

    def _emitted(self, event: Emitted) -> None:
        progress = self._progress.get(event.live.sequence.session_id)
        if progress is None:  # its request failed in another row and is over
            return
        before, stats = progress.stats, event.live.sequence.stats
        progress.stats = stats
        tokens = len(event.delta.token_ids)
        if tokens:
            self._time_tokens(event.live.request, progress, tokens)
        if stats.rounds == before.rounds:
            self._metrics.plain_equivalent_tokens().add(
                tokens
            )  # the prefill's token costs both ways the same
            return
        drafted = stats.draft_tokens - before.draft_tokens
        self._metrics.sequence_rounds("with" if drafted else "without").add()
        if drafted:
            accepted = stats.accepted_tokens - before.accepted_tokens
            self._metrics.draft_tokens().add(drafted)
            self._metrics.accepted_tokens().add(accepted)
            self._metrics.tree_size().observe(drafted)
            self._metrics.acceptance_length().observe(tokens)
            self._accepted[accepted] += 1

    def _time_tokens(self, request: RequestWatch, progress: _Progress, tokens: int) -> None:
        now = self._clock()
        self._metrics.emitted_tokens().add(tokens)
        if progress.emitted_s:
            self._metrics.inter_token_seconds().observe((now - progress.emitted_s) / tokens, tokens)
        elif request not in self._answered:
            self._answered.add(request)
            self._metrics.first_token_seconds().observe(now - request.arrived_s)
        progress.emitted_s = now

    def _round_done(self, event: RoundDone) -> None:
        record, metrics = event.record, self._metrics
        metrics.rounds().add()
        if record.is_whole:
            for stage in ("draft", "build_tree", "verify"):
                if record.stage_ms[stage]:  # without drafts the first two have nothing to do
                    metrics.stage_seconds(stage).observe(record.stage_ms[stage] / 1e3)
        else:
            commit_seconds = record.cache_commit_ms / 1e3
            metrics.stage_seconds("verify").observe(max(0.0, self._verify_seconds - commit_seconds))
            metrics.stage_seconds("cache_commit").observe(commit_seconds)
        metrics.stage_seconds("commit").observe(record.stage_ms["commit"] / 1e3)
        round_ms = sum(record.stage_ms.values())
        plain_tokens = record.sequences * round_ms / record.plain_ms if record.nodes else record.emitted
        metrics.plain_equivalent_tokens().add(plain_tokens)
        drafting = {live.sequence.session_id for live in event.drafting}
        for live, size in zip(event.batch, event.tree_sizes, strict=True):
            if live.sequence.session_id in drafting:
                if live.is_budget_open:
                    metrics.budget("auto").observe(size)
                else:
                    metrics.budget("request").observe(live.node_cap)

    def _stage_called(self, event: StageCalled) -> None:
        self._metrics.stage_up(event.stage).set(not event.has_failed)
        if event.has_failed:
            self._metrics.stage_errors(event.stage).add()
        elif event.operation in _TIMED:
            self._metrics.stage_seconds("hop").observe(max(0.0, event.seconds - event.work_seconds))
            if event.operation == "verify":
                self._verify_seconds = event.work_seconds  # its commit is told apart, when the round is done
            else:
                self._metrics.stage_seconds(event.operation).observe(event.work_seconds)
