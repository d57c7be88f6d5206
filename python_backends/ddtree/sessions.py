"""The session table of a stage: its state per request, with epoch, committed length and time to live.

The table decides whether a call belongs to the life of the session it holds, and lets sessions that begin
alike share pages: a page that a session filled is published under its key, and a session that opens takes
the longest run of published pages it begins with. It knows nothing of what a page contains.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ddtree.kv_cache import KvPool, Pages
from ddtree.prefix_cache import KeyChain, PageKeys, Prefix
from ddtree.sampling import SamplerState
from ddtree.types import Status, Usage

_LOG = logging.getLogger(__name__)


@dataclass
class Session:
    """One request's state in a stage."""

    session_id: int
    epoch: int
    pages: Pages = field(default_factory=Pages.none)
    length: int = 0  # committed length
    prefix: Prefix = field(default_factory=Prefix, repr=False)
    sampler: SamplerState | None = None  # in the verifier, when more than the largest logit decides
    keys: KeyChain | None = None  # of its pages; None: they are shared with nobody
    last_used: float = field(default=0.0, repr=False)


class SessionTable:
    """Sessions by id, over one pool. A session not used for `ttl_s` seconds is dropped."""

    def __init__(
        self,
        pool: KvPool,
        *,
        ttl_s: float,
        keys: PageKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the pool; without `keys` no page is ever shared."""
        self._pool = pool
        self._ttl_s = ttl_s
        self._keys = keys if pool.can_share else None
        self._clock = clock
        self._sessions: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def open(self, session_id: int, epoch: int, slots: int, prefix: Prefix | None = None) -> Session | None:
        """Open a session with `slots` reserved KV slots; None when the pool has too few.

        It begins with as much of `prefix` as is cached, in whole pages: its length says how much. Without a
        prefix it shares nothing, now or later. An earlier life of the same session is dropped first. A call
        of an earlier life than the one held is refused by `find`, so the caller checks `is_stale` before.
        """
        assert not self.is_stale(session_id, epoch), f"session {session_id} already lives a later epoch"
        self._drop(session_id)
        session = Session(session_id, epoch, prefix=prefix or Prefix(), last_used=self._clock())
        if self._keys is not None and prefix is not None:
            session.keys = self._keys.begin(prefix.salt)
        shared = self._look_up(session)
        pages = self._pool.reserve_after(shared, slots) if shared else self._pool.reserve(slots)
        if pages is None:
            return None
        session.pages = pages
        self._skip(session, len(shared))
        self._sessions[session_id] = session
        return session

    def catch_up(self, session: Session) -> int:
        """Take over what others committed of the session's prefix since it opened; gives how many ids.

        Sessions that open together and begin alike all find nothing: one is ahead, and the others follow it.
        """
        length = session.length
        if shared := self._look_up(session):
            session.pages = self._pool.replace(session.pages, length // self._pool.page_size, shared)
            self._skip(session, len(shared))
        return session.length - length

    def _look_up(self, session: Session) -> Sequence[int]:
        """The cached pages that follow the full pages of a session and hold what its prefix goes on with."""
        shared: list[int] = []
        if session.keys is None:
            return shared
        chain, prefix, size = session.keys.fork(), session.prefix, self._pool.page_size
        first = session.length // size * size
        for start in range(first, len(prefix.ids) - prefix.computed - size + 1, size):
            (key,) = chain.push(prefix.ids[start : start + size])
            page = self._pool.table.find(key)
            if page is None:
                break
            shared.append(page)
        return self._pool.usable(shared)

    def _skip(self, session: Session, pages: int) -> None:
        """Go on after so many pages that others filled; they are published already."""
        if pages:
            stop = (session.length // self._pool.page_size + pages) * self._pool.page_size
            self._grow(session, session.prefix.ids[session.length : stop])

    def commit(self, session: Session, ids: Sequence[int]) -> Status:
        """Note that these ids are committed now, and all that is kept of them is in the pool.

        A session whose sampler cannot take them is dropped: SAMPLER_FAILED.
        """
        length = session.length
        try:
            keys = self._grow(session, ids)
        except Exception:  # noqa: BLE001 - whatever broke, it is this session's own
            _LOG.exception("a sampler cannot take what is committed")
            session.sampler = None
            self._drop(session.session_id)
            return Status.SAMPLER_FAILED
        if keys:
            for place, key in enumerate(keys, start=length // self._pool.page_size):
                self._pool.table.publish(session.pages.indices[place], key)
            self._pool.keep(keys[-1], session.pages, session.length)
        return Status.OK

    def commit_paths(
        self, sessions: Sequence[Session], roots: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> list[Status]:
        """The same for the root and accepted draft tokens of each session."""
        rows = zip(sessions, roots, paths, strict=True)
        return [self.commit(session, [root, *tokens]) for session, root, tokens in rows]

    @staticmethod
    def _grow(session: Session, ids: Sequence[int]) -> list[bytes]:
        """Let everything that follows the committed ids take these too; gives the keys of pages now full."""
        session.length += len(ids)
        if session.sampler is not None:
            session.sampler.push(ids)
        return [] if session.keys is None else session.keys.push(ids)

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
        self, session_id: int, epoch: int, length: int, slots: int, prefix: Prefix | None = None
    ) -> tuple[Session | None, Status]:
        """Open at length 0, find at any other; gives the session, or None and why there is none."""
        if length > 0 or self.is_stale(session_id, epoch):
            session = self.find(session_id, epoch, length)
            return session, Status.OK if session is not None else Status.SESSION_LOST
        session = self.open(session_id, epoch, slots, prefix)
        return session, Status.OK if session is not None else Status.POOL_FULL

    def release(self, session_ids: Sequence[int]) -> Usage:
        """Drop sessions; an unknown id is no error, it may have expired."""
        for session_id in session_ids:
            self._drop(session_id)
        return self.usage()

    def _drop(self, session_id: int) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._pool.release(session.pages)

    def expire(self) -> int:
        """Drop every session that outlived its time; gives how many."""
        deadline = self._clock() - self._ttl_s
        outdated = [s.session_id for s in self._sessions.values() if s.last_used < deadline]
        for session_id in outdated:
            self._drop(session_id)
        return len(outdated)

    def usage(self) -> Usage:
        """What is held now; sessions past their time are dropped first."""
        self.expire()
        pool = self._pool
        usage = Usage(len(self._sessions), pool.pages_used, pool.num_pages, pool.pages_cached)
        if (states := pool.states) is None:
            return usage
        snapshots = pool.num_snapshots
        return replace(
            usage,
            states_used=len(states) - snapshots,
            states_total=states.size.states,
            snapshots=snapshots,
        )

    def check_integrity(self) -> None:
        """Assert that the pages held are those of the live sessions, and none is shared that is written."""
        self._pool.check_integrity(session.pages for session in self)
        for session in self:
            assert 0 <= session.length <= session.pages.capacity, f"{session} is longer than its pages"
            written = session.pages.indices[session.length // self._pool.page_size :]
            for page in written:
                references = self._pool.table.references(page)
                assert references == 1, f"{session} writes to page {page}, which {references} hold"
