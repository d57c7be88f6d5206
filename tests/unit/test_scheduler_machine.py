"""The scheduler against a model of it, over whatever can happen to sequences in any order."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ddtree.errors import ResourceExhausted
from ddtree.live import Live
from ddtree.scheduler import Scheduler
from ddtree.sequence import SequenceState
from tests.fakes.clock import ManualClock
from tests.fakes.lives import make_live

QUEUE_TIMEOUT_MS = 8000


class SchedulerMachine(RuleBasedStateMachine):
    """Sequences arrive, run, lose their session, are postponed, end, give up and come too late."""

    @initialize(places=st.integers(1, 4), queue=st.integers(0, 4), chunk=st.integers(1, 12))
    def start(self, places: int, queue: int, chunk: int) -> None:
        self.places, self.queue, self.chunk = places, queue, chunk
        self.clock = ManualClock()
        self.scheduler = Scheduler(
            max_sequences=places,
            max_waiting=queue,
            prefill_chunk=chunk,
            queue_timeout_ms=QUEUE_TIMEOUT_MS,
            clock=self.clock,
        )
        self.live: list[Live] = []  # those in it, by arrival
        self.arrived = 0
        self.admitted: list[int] = []  # session ids in the order in which they first ran

    @rule(prompt=st.integers(1, 20), max_tokens=st.integers(1, 6), deadline=st.none() | st.integers(0, 12))
    def arrive(self, prompt: int, max_tokens: int, deadline: int | None) -> None:
        live = make_live(self.arrived, prompt=prompt, max_tokens=max_tokens)
        live.deadline_ns = None if deadline is None else self.clock() + deadline * 1_000_000_000
        self.arrived += 1
        is_full = len(self.live) >= self.places + self.queue
        try:
            self.scheduler.add(live)
        except ResourceExhausted:
            assert is_full
            return
        assert not is_full
        self.live.append(live)

    @rule()
    def admit(self) -> None:
        before = self.scheduler.running
        self.scheduler.admit()
        new = self.scheduler.running[len(before) :]
        assert self.scheduler.running[: len(before)] == before
        trying = [live.is_postponed and not live.committed for live in (*before, *new)]
        assert not new or not any(trying[: len(before)]), "who waits for pages is let in alone"
        assert not any(trying[:-1]) or not new
        for live in self.scheduler.running:
            if live.sequence.session_id not in self.admitted:
                self.admitted.append(live.sequence.session_id)

    @rule()
    def prefill(self) -> None:
        batch = self.scheduler.prefill_batch()
        wanting = [live for live in self.scheduler.running if live.sequence.state is SequenceState.PREFILLING]
        needs = [live.to_commit - live.committed for live in wanting]
        assert sum(count for _, count in batch) == min(self.chunk, sum(needs)), "no more, and none is wasted"
        if wanting:
            assert batch[0][0] is wanting[0]
            assert batch[0][1] >= min(needs[0], self.chunk / 2), "the oldest comes on by half a chunk"
        for live, count in batch:
            assert live.sequence.state is SequenceState.PREFILLING
            assert 0 < count <= live.to_commit - live.committed
            live.committed += count
            if live.committed == live.to_commit:
                live.sequence.state = SequenceState.DECODING
                if not live.sequence.output_ids:
                    self.emit(live, 1)

    @rule(tokens=st.integers(1, 4))
    def decode(self, tokens: int) -> None:
        for live in self.scheduler.decode_batch():
            assert live.sequence.output_ids
            assert live.committed == live.to_commit
            live.committed += tokens
            self.emit(live, tokens)

    @precondition(lambda self: bool(self.scheduler.running))
    @rule(data=st.data())
    def lose_session(self, data: Any) -> None:
        data.draw(st.sampled_from(self.scheduler.running)).reopen()

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)
        now = self.clock()
        late = [live for live in self.live if live.deadline_ns is not None and live.deadline_ns <= now]
        assert {id(live) for live in self.scheduler.past_deadline()} == {id(live) for live in late}
        for live in late:
            self.end(live)
        waiting = {live for live in self.live if live.sequence.state is SequenceState.WAITING}
        limit = now - QUEUE_TIMEOUT_MS * 1_000_000
        too_long = self.scheduler.overdue()
        assert set(too_long) == {live for live in waiting if live.waiting_since_ns <= limit}
        for live in too_long:
            assert "retry in " in self.scheduler.why_waiting(live, "time is up")
            self.end(live)

    @precondition(lambda self: any(live.committed == 0 for live in self.scheduler.running))
    @rule(data=st.data())
    def pool_is_full(self, data: Any) -> None:
        new = [live for live in self.scheduler.running if live.committed == 0]
        chosen = data.draw(st.sets(st.sampled_from(range(len(new))), min_size=1))
        for live in [new[index] for index in sorted(chosen)]:  # as one call's answer comes
            was_alone = self.scheduler.num_running == 1
            try:
                self.scheduler.postpone(live)
            except ResourceExhausted:
                assert was_alone
                self.end(live)
            else:
                assert live not in self.scheduler.running
                assert live.is_postponed

    @precondition(lambda self: bool(self.live))
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        live = data.draw(st.sampled_from(self.live))
        live.sequence.end("cancelled")
        self.end(live)

    def emit(self, live: Live, tokens: int) -> None:
        left = live.sequence.remaining_tokens
        if live.sequence.append([3] * tokens, draft_tokens=tokens - 1).finish_reason:
            assert tokens >= left
            self.end(live)

    def end(self, live: Live) -> None:
        self.scheduler.remove(live)
        self.live.remove(live)

    @invariant()
    def everybody_is_there_once(self) -> None:
        if not hasattr(self, "live"):
            return
        held = list(self.scheduler)
        assert sorted(map(id, held)) == sorted(map(id, self.live))
        assert bool(self.scheduler) == bool(self.live)
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (
            len(self.scheduler.running),
            len(held) - len(self.scheduler.running),
        )
        assert self.scheduler.num_running <= self.places
        assert len(held) <= self.places + self.queue

    @invariant()
    def the_queue_is_in_order_and_states_fit(self) -> None:
        if not hasattr(self, "live"):
            return
        waiting = list(self.scheduler)[self.scheduler.num_running :]
        ids = [live.sequence.session_id for live in waiting]
        assert ids == sorted(ids), "a waiting sequence never overtakes"
        assert {live.sequence.state for live in waiting} <= {SequenceState.WAITING}
        running = {live.sequence.state for live in self.scheduler.running}
        assert running <= {SequenceState.PREFILLING, SequenceState.DECODING}
        assert self.admitted == sorted(self.admitted)

    def teardown(self) -> None:
        """From any state the rest can be served to its end, if each fits alone."""
        for _ in range(500):
            if not getattr(self, "live", None):
                return
            self.admit()
            self.prefill()
            self.decode(2)
        raise AssertionError(f"{len(self.live)} sequences never end")


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
