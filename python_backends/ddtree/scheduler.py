"""Which sequences take part in the next step: admission by arrival, prefill in chunks, one packed round.

Pure bookkeeping: it calls no stage and knows no tensors.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from ddtree.errors import ResourceExhausted
from ddtree.live import Live
from ddtree.retry_hint import retry_hint
from ddtree.sequence import SequenceState


class Scheduler:
    """Sequences by phase. First come, first served; a waiting one never overtakes."""

    def __init__(
        self,
        *,
        max_sequences: int,
        max_waiting: int,
        prefill_chunk: int,
        queue_timeout_ms: int = 30_000,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Begin empty.

        Args:
            max_sequences: most sequences that run at the same time.
            max_waiting: most sequences that wait for a place.
            prefill_chunk: most ids to prefill in a step, over all sequences.
            queue_timeout_ms: how long a sequence may wait for a place; 0 for as long as it takes.
            clock: nanoseconds, as a sequence's stats count them.
        """
        self._max_sequences = max_sequences
        self._max_waiting = max_waiting
        self._prefill_chunk = prefill_chunk
        self._queue_timeout_ms = queue_timeout_ms
        self.clock = clock
        self._waiting: deque[Live] = deque()
        self._running: list[Live] = []
        self._is_pool_full = False

    def __iter__(self) -> Iterator[Live]:
        yield from self._running
        yield from self._waiting

    def __bool__(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def running(self) -> tuple[Live, ...]:
        """Sequences that hold pages or are about to."""
        return tuple(self._running)

    @property
    def num_running(self) -> int:
        """Sequences that hold pages or are about to."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that no stage knows yet."""
        return len(self._waiting)

    def add(self, live: Live) -> None:
        """Queue a new sequence.

        Raises:
            ResourceExhausted: the queue is full.
        """
        # Together: places are given in the next step, and until then everybody new is waiting.
        if len(self._running) + len(self._waiting) >= self._max_sequences + self._max_waiting:
            raise ResourceExhausted(
                f"{len(self._running)} sequences are running and {len(self._waiting)} are waiting, "
                f"which is the most this server queues; {self.retry_hint()} or add a replica"
            )
        live.waiting_since_ns = self.clock()
        self._waiting.append(live)

    def retry_hint(self) -> str:
        """When a place may be free, in words."""
        return retry_hint(self._running, self.clock())

    def past_deadline(self) -> list[Live]:
        """Sequences whose deadline has come."""
        now = self.clock()
        return [live for live in self if live.deadline_ns is not None and live.deadline_ns <= now]

    def overdue(self) -> list[Live]:
        """Sequences that have waited for a place as long as one may."""
        if not self._queue_timeout_ms:
            return []
        latest = self.clock() - self._queue_timeout_ms * 1_000_000
        return [live for live in self._waiting if live.waiting_since_ns <= latest]

    def why_waiting(self, live: Live, what_came: str) -> str:
        """Say why a waiting sequence has no place, now that it cannot wait any longer."""
        waited_s = (self.clock() - live.waiting_since_ns) / 1e9
        if self._is_pool_full:
            reason = "the KV pool has no room for it"
        elif len(self._running) < self._max_sequences:
            reason = "no step began meanwhile"
        else:
            reason = "all places are taken"
        return (
            f"{what_came} after {waited_s:.1f} s in the queue: {reason} ({len(self._running)} sequences are "
            f"running, {len(self._waiting)} waiting); {self.retry_hint()} or add a replica"
        )

    def admit(self) -> None:
        """Let waiting sequences run, as far as there are places.

        One that the pool had no room for comes alone: nobody who came later takes the pages it waits for.
        """
        while (
            self._waiting
            and len(self._running) < self._max_sequences
            and not self._is_pool_full
            and not any(live.is_postponed and not live.committed for live in self._running)
        ):
            live = self._waiting.popleft()
            live.sequence.state = SequenceState.PREFILLING
            self._running.append(live)

    def postpone(self, live: Live, *, others_ended: bool = False) -> None:
        """Put a sequence back into the queue, before all that came later: the pool has no pages for it now.

        Args:
            live: a running sequence.
            others_ended: whether sequences that just ended still hold pages, which they are about to lose.

        Raises:
            ResourceExhausted: nobody else holds pages, so waiting could not help.
        """
        if len(self._running) == 1 and not others_ended:
            raise ResourceExhausted(
                f"the KV pool cannot hold {live.sequence.length + live.sequence.remaining_tokens} tokens; "
                "ask for fewer tokens or give the server a larger kv_cache_mib"
            )
        self._running.remove(live)
        live.sequence.state = SequenceState.WAITING
        live.is_postponed = True
        if live.sequence.output_ids:  # it ran before: its time in the queue begins now
            live.waiting_since_ns = self.clock()
        arrived = live.sequence.stats.arrival_ns
        earlier = sum(other.sequence.stats.arrival_ns <= arrived for other in self._waiting)
        self._waiting.insert(earlier, live)
        self._is_pool_full = bool(self._running)

    def remove(self, live: Live) -> None:
        """Take a sequence out; its pages are free for others soon."""
        if live in self._running:
            self._running.remove(live)
            self._is_pool_full = False
        else:
            self._waiting.remove(live)

    def prefill_batch(self) -> list[tuple[Live, int]]:
        """Sequences to prefill in this step and how many ids of each; at most one chunk of ids in all.

        Half of the chunk is the oldest one's, so that it ends in bounded time. New ones begin with one id,
        which reserves their pages by arrival. The rest goes to those that need least, so that a short prompt
        does not wait for a long one that came before.
        """
        wanting = [live for live in self._running if live.sequence.state is SequenceState.PREFILLING]
        if not wanting:
            return []
        need = [live.to_commit - live.committed for live in wanting]
        counts = [0] * len(wanting)
        counts[0] = min(need[0], (self._prefill_chunk + 1) // 2)
        left = self._prefill_chunk - counts[0]
        for index, live in enumerate(wanting[1:], start=1):
            counts[index] = min(left, not live.committed)
            left -= counts[index]
        for index in [*sorted(range(1, len(wanting)), key=lambda index: need[index]), 0]:
            more = min(left, need[index] - counts[index])
            counts[index] += more
            left -= more
        return [(live, count) for live, count in zip(wanting, counts, strict=True) if count]

    def decode_batch(self) -> list[Live]:
        """Sequences that take part in this step's round."""
        return [live for live in self._running if live.sequence.state is SequenceState.DECODING]
