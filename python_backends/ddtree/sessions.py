"""The session table of a stage: its state per request, with epoch, committed length and time to live.

The table decides whether a call belongs to the life of the session it holds. It knows nothing of what a
session's pages contain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ddtree.kv_cache import KvPool, Pages
from ddtree.sampling import SamplerState
from ddtree.types import Status, Usage


@dataclass
class Session:
    """One request's state in a stage."""

    session_id: int
    epoch: int
    pages: Pages
    length: int = 0  # committed length
    sampler: SamplerState | None = None  # in the verifier, when more than the largest logit decides
    last_used: float = field(default=0.0, repr=False)


class SessionTable:
    """Sessions by id, over one pool. A session not used for `ttl_s` seconds is dropped."""

    def __init__(self, pool: KvPool, *, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._ttl_s = ttl_s
        self._clock = clock
        self._sessions: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def open(self, session_id: int, epoch: int, slots: int) -> Session | None:
        """Open a session with `slots` reserved KV slots; None when the pool has too few.

        An earlier life of the same session is dropped first. A call of an earlier life than the one held
        is refused by `find`, so the caller checks `is_stale` before opening.
        """
        assert not self.is_stale(session_id, epoch), f"session {session_id} already lives a later epoch"
        self.release(session_id)
        pages = self._pool.reserve(slots)
        if pages is None:
            return None
        session = Session(session_id, epoch, pages, last_used=self._clock())
        self._sessions[session_id] = session
        return session

    def is_stale(self, session_id: int, epoch: int) -> bool:
        """Whether the table holds a later life of this session than `epoch`."""
        session = self._sessions.get(session_id)
        return session is not None and session.epoch > epoch

    def find(self, session_id: int, epoch: int, length: int) -> Session | None:
        """The session, if it is in this epoch and has this committed length; None means SESSION_LOST."""
        session = self._sessions.get(session_id)
        if session is None or session.epoch != epoch or session.length != length:
            return None
        session.last_used = self._clock()
        return session

    def open_or_find(
        self, session_id: int, epoch: int, length: int, slots: int
    ) -> tuple[Session | None, Status]:
        """Open at length 0, find at any other; gives the session, or None and why there is none."""
        if length > 0 or self.is_stale(session_id, epoch):
            session = self.find(session_id, epoch, length)
            return session, Status.OK if session is not None else Status.SESSION_LOST
        session = self.open(session_id, epoch, slots)
        return session, Status.OK if session is not None else Status.POOL_FULL

    def release(self, session_id: int) -> None:
        """Drop a session and free its pages; an unknown id is no error, it may have expired."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._pool.release(session.pages)

    def expire(self) -> int:
        """Drop every session that outlived its time; gives how many."""
        deadline = self._clock() - self._ttl_s
        outdated = [s.session_id for s in self._sessions.values() if s.last_used < deadline]
        for session_id in outdated:
            self.release(session_id)
        return len(outdated)

    def usage(self) -> Usage:
        """What the table holds."""
        return Usage(len(self._sessions), self._pool.pages_used, self._pool.num_pages)

    def check_integrity(self) -> None:
        """Assert that the pool's pages are exactly those of the live sessions."""
        self._pool.check_integrity(session.pages for session in self)
        for session in self:
            assert 0 <= session.length <= session.pages.capacity, f"{session} is longer than its pages"
