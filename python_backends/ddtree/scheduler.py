"""Which sequences take part in the next step: admission by arrival, prefill in chunks, one packed round.

Pure bookkeeping: it calls no stage and knows no tensors but the ones a sequence still owes the drafter.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ddtree.errors import ResourceExhausted
from ddtree.events import RequestWatch
from ddtree.round_trace import SequenceTrace
from ddtree.sequence import Delta, Sequence, SequenceState, Stats
from ddtree.types import AUTO_BUDGET


class Sink(Protocol):
    """Where one sequence's answer goes."""

    @property
    def trace(self) -> SequenceTrace | None:
        """Keeps the sequence's rounds, for a caller who asked to see them."""
        ...

    def emit(self, delta: Delta, stats: Stats) -> None:
        """Take what a round added; the delta with a finish reason is the last."""
        ...

    def is_cancelled(self) -> bool:
        """Whether nobody waits for the answer any more."""
        ...


@dataclass
class DraftContext:
    """What the drafter holds of a sequence, and what it is still owed."""

    is_wanted: bool
    is_lost: bool = False
    losses: int = 0
    epoch: int = 0
    length: int = 0  # context tokens the drafter holds
    pending_ids: list[int] = field(default_factory=list)
    pending_features: list[torch.Tensor] = field(default_factory=list)  # each [n, H], aligned with the ids

    def owe(self, ids: list[int], features: torch.Tensor) -> None:
        """Remember newly committed tokens and their context features `[len(ids), H]`."""
        assert len(ids) == len(features), f"{len(ids)} ids, {len(features)} features"
        if self.is_wanted and not self.is_lost:
            self.pending_ids += ids
            self.pending_features.append(features)

    def delivered(self) -> None:
        """Note that the drafter took all that was owed."""
        self.length += len(self.pending_ids)
        self._drop_pending()

    def lose(self) -> None:
        """Note that the drafter does not have the session; it is opened again before the next draft."""
        self.is_lost = True
        self.losses += 1
        self._drop_pending()

    def forget(self) -> None:
        """Begin a new life: nothing is held, nothing is owed yet."""
        self.is_lost = False
        self.epoch += 1
        self.length = 0
        self._drop_pending()

    def give_up(self) -> None:
        """Decode without drafts from now on."""
        self.is_wanted = False
        self._drop_pending()

    def _drop_pending(self) -> None:
        self.pending_ids, self.pending_features = [], []


@dataclass(eq=False)
class Live:
    """A sequence between its arrival and its last delta."""

    sequence: Sequence
    sink: Sink
    done: asyncio.Future[None]
    draft: DraftContext
    node_cap: int  # most draft nodes a round may stage for it
    committed: int = 0  # committed length in the verifier
    recoveries: int = 0
    request: RequestWatch = field(default_factory=RequestWatch)  # whose row it is, for those who listen

    @property
    def log_fields(self) -> dict[str, object]:
        """What a log record about it carries."""
        return {"request_id": self.request.request_id, "session_id": self.sequence.session_id}

    @property
    def to_commit(self) -> int:
        """Ids the verifier must hold before rounds can go on: all but the root token."""
        return self.sequence.length - bool(self.sequence.output_ids)

    @property
    def is_budget_open(self) -> bool:
        """Whether the request leaves it to the engine how much to draft, or not to draft at all."""
        params = self.sequence.params
        return params.draft_mode == "tree" and params.tree_budget == AUTO_BUDGET

    def reopen(self) -> None:
        """Start a new life in the stages; prefill brings back what was committed."""
        self.recoveries += 1
        self.committed = 0
        self.sequence.epoch += 1
        self.sequence.state = SequenceState.PREFILLING
        self.draft.forget()


class Scheduler:
    """Sequences by phase. First come, first served; a waiting one never overtakes."""

    def __init__(self, *, max_sequences: int, max_waiting: int, prefill_chunk: int) -> None:
        self._max_sequences = max_sequences
        self._max_waiting = max_waiting
        self._prefill_chunk = prefill_chunk
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
                "which is the most this server queues; retry in a second or add a replica"
            )
        self._waiting.append(live)

    def admit(self) -> None:
        """Let waiting sequences run, as far as there are places."""
        while self._waiting and len(self._running) < self._max_sequences and not self._is_pool_full:
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
        """Sequences to prefill in this step and how many ids of each; at most one chunk of ids in all."""
        batch, left = [], self._prefill_chunk
        for live in self._running:
            if live.sequence.state is SequenceState.PREFILLING and left > 0:
                count = min(left, live.to_commit - live.committed)
                batch.append((live, count))
                left -= count
        return batch

    def decode_batch(self) -> list[Live]:
        """Sequences that take part in this step's round."""
        return [live for live in self._running if live.sequence.state is SequenceState.DECODING]
