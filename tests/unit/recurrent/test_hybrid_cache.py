"""Pages and states as one cache: whose state is what; a shared prefix brings the state of its end."""

from __future__ import annotations

import hashlib
import random

import torch

from ddtree.hybrid_cache import HybridPool
from ddtree.kv_cache import CacheShape
from ddtree.prefix_cache import PageKeys, Prefix
from ddtree.recurrent.state_pool import PoolSize, StatePool, StateShape
from ddtree.sessions import Session, SessionTable

CPU = torch.device("cpu")
SIZE = 4
PAGES = CacheShape(layers=1, kv_heads=1, head_dim=1, dtype=torch.float32)
STATES = StateShape((0, 2), 1, 1, key_dim=1, value_dim=1, kernel=2, dtype=torch.float32)


def content(salt: str, ids: tuple[int, ...]) -> float:
    """What a state holds after these ids; an empty state is zero."""
    return (
        float(int.from_bytes(hashlib.sha256(f"{salt}:{ids}".encode()).digest()[:3], "little")) if ids else 0.0
    )


class Cache:
    """A pool with a session table; `commit` writes states as layers would."""

    def __init__(self, states: int, pages: int = 40) -> None:
        self.states = StatePool(STATES, PoolSize(states, 8), CPU)
        budget = PAGES.bytes_per_slot * SIZE * pages
        self.pool = HybridPool(PAGES, self.states, budget_bytes=budget, page_size=SIZE, device=CPU)
        self.table = SessionTable(self.pool, ttl_s=100, keys=PageKeys("draft", SIZE))
        self.texts: dict[int, tuple[int, ...]] = {}

    def open(self, session_id: int, ids: tuple[int, ...], salt: str = "") -> Session | None:
        session = self.table.open(session_id, 0, len(ids) + 8, Prefix(ids, salt, computed=1))
        if session is not None:
            self.texts[session_id] = ids[: session.length]
        return session

    def commit(self, session: Session, ids: tuple[int, ...], *, reads: bool = False) -> None:
        """Take in ids as a round does, or as a chunk of a prompt, which is marked where a page ends in it."""
        mark = self.pool.mark(session.pages, session.length, len(ids)) if reads else None
        if mark is not None:
            text = self.texts[session.session_id] + ids[: mark.rows]
            assert len(text) % SIZE == 0
            value = content(session.prefix.salt, text)
            self.states.matrices[:, mark.state], self.states.tails[:, mark.state] = value, value + 1
        self.texts[session.session_id] += ids
        value = content(session.prefix.salt, self.texts[session.session_id])
        state = self.pool.state_of(session.pages)
        self.states.matrices[:, state], self.states.tails[:, state] = value, value + 1
        self.table.commit(session, ids)

    def follow(self, session: Session) -> int:
        grown = self.table.catch_up(session)
        if grown:
            self.texts[session.session_id] = tuple(session.prefix.ids[: session.length])
        return grown

    def check(self) -> None:
        """Every state is that of the ids its session committed."""
        self.table.check_integrity()
        for session in self.table:
            ids, state = self.texts[session.session_id], self.pool.state_of(session.pages)
            assert len(ids) == session.length
            expected = content(session.prefix.salt, ids)
            assert self.states.matrices[:, state].flatten().tolist() == [expected] * 2
            wanted_tail = expected + 1 if ids else 0.0
            assert set(self.states.tails[:, state].flatten().tolist()) == {wanted_tail}


def opened(cache: Cache, session_id: int, ids: tuple[int, ...], salt: str = "") -> Session:
    session = cache.open(session_id, ids, salt)
    assert session is not None
    cache.check()
    return session


def test_a_session_goes_on_where_a_snapshot_was_taken() -> None:
    """Three pages are full, the state is known after two of them: that far the prefix is shared."""
    cache, text = Cache(states=5), tuple(range(20))
    first = opened(cache, 1, text)
    for start, stop in ((0, 8), (8, 11), (11, 14)):
        cache.commit(first, text[start:stop])
    assert cache.pool.num_snapshots == 1
    second = opened(cache, 2, text)
    assert second.length == 8
    assert second.pages.indices[:2] == first.pages.indices[:2]
    cache.commit(second, text[8:12])
    assert cache.pool.num_snapshots == 2
    assert opened(cache, 3, text).length == 12
    assert opened(cache, 4, (*text[:8], 99, 99)).length == 8
    assert cache.pool.num_snapshots == 1, "the one at 12 made room"
    opened(cache, 5, text[:3])
    assert cache.open(6, text) is None, "sessions hold all"
    cache.table.release([2])
    assert opened(cache, 6, text).length == 0


def test_pages_without_a_snapshot_are_not_shared() -> None:
    cache, text = Cache(states=3), tuple(range(20))
    cache.commit(opened(cache, 1, text), text[:10])
    assert cache.pool.num_snapshots == 0
    session = opened(cache, 2, text)
    assert session.length == 0
    assert not set(session.pages.indices) & set(next(iter(cache.table)).pages.indices)


def test_a_chunk_that_passes_the_end_of_a_page_leaves_the_state_there() -> None:
    cache, text = Cache(states=6), tuple(range(20))
    first = opened(cache, 1, text)
    cache.commit(first, text[:1], reads=True)
    assert cache.pool.num_snapshots == 0
    cache.commit(first, text[1:10], reads=True)
    cache.commit(first, text[10:11], reads=True)
    assert cache.pool.num_snapshots == 1
    second = opened(cache, 2, text)
    assert second.length == 8
    cache.pool.mark(second.pages, 8, 7)
    assert cache.pool.mark(second.pages, 8, 3) is None, "no page ends there, and the mark before is dropped"
    cache.check()
    cache.pool.mark(second.pages, 8, 7)
    cache.table.release([2])
    cache.check()
    assert len(cache.states) == 2, "a session that ends gives its mark back"


def test_salts_keep_states_apart() -> None:
    cache, text = Cache(states=4), tuple(range(20))
    cache.commit(opened(cache, 1, text, "mine"), text[:8])
    assert opened(cache, 2, text, "yours").length == 0
    assert opened(cache, 3, text, "mine").length == 8


def test_a_session_that_follows_takes_over_the_state_too() -> None:
    cache, text = Cache(states=4), tuple(range(30))
    ahead, behind = opened(cache, 1, text), opened(cache, 2, text)
    cache.commit(behind, text[:3])
    cache.commit(ahead, text[:12])
    assert cache.follow(behind) == 9
    cache.check()
    cache.commit(ahead, text[12:14])
    assert cache.follow(behind) == 0
    cache.check()


def test_the_snapshot_used_longest_ago_makes_room() -> None:
    cache = Cache(states=3)
    texts = [tuple(range(start, start + 9)) for start in (0, 100, 200)]
    for index, text in enumerate(texts[:2]):
        cache.commit(opened(cache, index, text), text[:8])
        cache.table.release([index])
    assert cache.pool.num_snapshots == 2
    assert opened(cache, 10, texts[0]).length == 8  # used: the other one is older now
    opened(cache, 11, texts[2])
    cache.table.release([10, 11])
    assert cache.pool.num_snapshots == 1
    assert opened(cache, 12, texts[1]).length == 0
    assert opened(cache, 13, texts[0]).length == 8


def test_the_only_state_left_is_the_snapshot_itself() -> None:
    """Nothing else can make room: the session goes on in it, and it is no snapshot any more."""
    cache, text = Cache(states=1), tuple(range(20))
    cache.commit(opened(cache, 1, text), text[:8])
    assert cache.pool.num_snapshots == 0, "the session holds the only state"
    cache.table.release([1])
    cache = Cache(states=2)
    cache.commit(opened(cache, 1, text), text[:8])
    assert opened(cache, 2, text).length == 8
    assert cache.pool.num_snapshots == 0
    assert cache.open(3, text) is None
    cache.check()


def test_neither_is_held_when_the_other_lacks() -> None:
    cache = Cache(states=2, pages=8)
    assert cache.open(1, tuple(range(40))) is None, "too few pages"
    assert len(cache.states) == 0
    opened(cache, 2, (1,)), opened(cache, 3, (1,))
    used = cache.pool.pages_used
    cache = Cache(states=1, pages=10)
    opened(cache, 2, (1,))
    assert cache.open(3, (1,)) is None, "too few states"
    assert cache.pool.pages_used == used // 2


def test_usage_tells_states_of_sessions_and_snapshots_apart() -> None:
    cache, text = Cache(states=5), tuple(range(20))
    first = opened(cache, 1, text)
    cache.commit(first, text[:8])
    opened(cache, 2, (*text[:8], 99))
    usage = cache.table.usage()
    assert (usage.states_used, usage.states_total, usage.snapshots) == (2, 5, 1)
    cache.table.release([1, 2])
    usage = cache.table.usage()
    assert (usage.states_used, usage.states_total, usage.snapshots) == (0, 5, 1)


def test_sessions_in_any_order_keep_their_states() -> None:
    """Texts of two letters begin alike often; few states, so that snapshots come and go."""
    source, hits, refused = random.Random(1), 0, 0
    cache = Cache(states=6, pages=24)
    for turn in range(3000):
        live = list(cache.table)
        action = source.random()
        if action < 0.3 or not live:
            text = tuple(
                source.randrange(2) if place % 8 == 0 else 0 for place in range(source.choice((9, 14, 22)))
            )
            session = cache.open(turn, text, source.choice(("", "", "salt")))
            refused += session is None
            hits += session is not None and session.length > 0
        elif action < 0.8:
            session = source.choice(live)
            cache.follow(session)
            rest = tuple(session.prefix.ids[session.length :])
            room = session.pages.capacity - session.length
            is_read = bool(rest)
            ids = rest[: source.choice((1, 3, 4, 6, 8))] or tuple(
                source.randrange(2) for _ in range(min(3, room))
            )
            if ids:
                cache.commit(session, ids, reads=is_read)
        else:
            cache.table.release([source.choice(live).session_id])
        cache.check()
    assert hits > 100
    assert refused > 10
    for session in list(cache.table):
        cache.table.release([session.session_id])
    assert len(cache.states) == cache.pool.num_snapshots
