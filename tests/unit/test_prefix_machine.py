"""Pool, session table and prefix cache in any order of calls, against a slow model of them.

What stands in a slot is made of all ids up to it and of the salt, so a page that belongs to another text, a
page that somebody wrote to after it was shared, and a salt that is not looked at all show in the contents.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ddtree.kv_cache import CacheShape, KvPool
from ddtree.prefix_cache import PageKeys, Prefix
from ddtree.sessions import Session, SessionTable
from ddtree.types import Status
from tests.oracles.page_model import Held, PageModel

SIZE, NUM_PAGES = 3, 8
SHAPE = CacheShape(layers=1, kv_heads=1, head_dim=1, feature_size=1, dtype=torch.float64)
# Few beginnings, tails and lengths: hits of every size, and sessions of the same length, are common.
TEXTS = st.tuples(
    st.sampled_from([(0,) * 9, (0, 0, 0, 1, 1, 1, 0, 1, 0)]),
    st.integers(0, 9),
    st.sampled_from([(1,), (0, 1), (1, 1, 1, 1)]),
).map(lambda parts: (*parts[0][: parts[1]], *parts[2]))
SALTS = st.sampled_from(["", "", "other"])


def content(salt: str, ids: tuple[int, ...]) -> float:
    digest = hashlib.sha256(f"{salt}:{ids}".encode()).digest()
    return float(int.from_bytes(digest[:6], "little"))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class PrefixMachine(RuleBasedStateMachine):
    """Sessions open, read, decode, end, expire and come again."""

    def __init__(self) -> None:
        super().__init__()
        budget = SHAPE.bytes_per_slot * SIZE * NUM_PAGES
        self.pool = KvPool(SHAPE, budget_bytes=budget, page_size=SIZE, device=torch.device("cpu"))
        self.clock = Clock()
        self.keys = PageKeys("draft", SIZE)
        self.table = SessionTable(self.pool, ttl_s=10, keys=self.keys, clock=self.clock)
        self.model = PageModel(NUM_PAGES, SIZE)
        self.next_session = 0

    def open(self, session: int, epoch: int, text: tuple[int, ...], salt: str) -> None:
        slots = len(text) + 4
        found, status = self.table.open_or_find(session, epoch, 0, slots, Prefix(text, salt, computed=1))
        opened = self.model.open(session, Held(salt, text, epoch=epoch), slots)
        assert (status == Status.OK) == opened, f"{status} where the model says {opened}"
        if found is not None:
            assert found.length == len(self.model.sessions[session].ids)

    @rule(text=TEXTS, salt=SALTS)
    def arrive(self, text: tuple[int, ...], salt: str) -> None:
        self.open(self.next_session, 0, text, salt)
        self.next_session += 1

    def choose(self, data: Any) -> tuple[int, Held, Session]:
        session = data.draw(st.sampled_from(sorted(self.model.sessions)))
        held = self.model.sessions[session]
        found = self.table.find(session, held.epoch, len(held.ids))
        assert found is not None
        return session, held, found

    def write(self, found: Session, values: list[float]) -> None:
        slots = found.pages.slots[found.length : found.length + len(values)]
        rows = torch.tensor(values, dtype=torch.float64)[:, None, None]
        self.pool.write(0, slots, rows, -rows)
        self.pool.features[slots] = rows[:, 0]

    @precondition(lambda self: self.model.sessions)
    @rule(data=st.data(), count=st.integers(1, 5))
    def prefill(self, data: Any, count: int) -> None:
        session, held, found = self.choose(data)
        assert self.table.catch_up(found) == self.model.catch_up(session)
        ids = list(held.beginning[len(held.ids) : len(held.ids) + count])
        self.commit(session, held, found, ids)

    @precondition(lambda self: self.model.sessions)
    @rule(data=st.data(), rows=st.integers(1, 3), ids=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def verify(self, data: Any, rows: int, ids: list[int]) -> None:
        """Stage a tree of anything, and commit a path of it."""
        session, held, found = self.choose(data)
        room = found.pages.capacity - found.length
        if len(held.ids) < len(held.beginning) or not room:
            return
        self.write(found, [-1.0] * min(rows, room))
        self.commit(session, held, found, ids[:room])

    def commit(self, session: int, held: Held, found: Session, ids: list[int]) -> None:
        texts = [(*held.ids, *ids[: place + 1]) for place in range(len(ids))]
        self.write(found, [content(held.salt, text) for text in texts])
        self.table.commit(found, ids)
        self.model.commit(session, ids)

    @precondition(lambda self: self.model.sessions)
    @rule(data=st.data())
    def end(self, data: Any) -> None:
        session, _, _ = self.choose(data)
        self.table.release([session])
        self.model.release(session)

    @precondition(lambda self: self.model.sessions)
    @rule(data=st.data(), text=TEXTS)
    def cancel_and_reuse(self, data: Any, text: tuple[int, ...]) -> None:
        """One ends where it stands, and the next takes its pages at once."""
        self.end(data)
        self.arrive(text, "")

    @precondition(lambda self: self.model.sessions)
    @rule(data=st.data())
    def reopen(self, data: Any) -> None:
        """A later life begins with all that the one before had committed."""
        session, held, _ = self.choose(data)
        committed = tuple(held.ids) if len(held.ids) > len(held.beginning) else held.beginning
        self.open(session, held.epoch + 1, committed, held.salt)

    @precondition(lambda self: self.model.sessions)
    @rule(data=st.data())
    def expire_all_but_one(self, data: Any) -> None:
        self.clock.now += 8
        kept, _, _ = self.choose(data)
        self.clock.now += 8
        self.table.expire()
        for session in [each for each in self.model.sessions if each != kept]:
            self.model.release(session)

    @invariant()
    def everything_is_accounted_for(self) -> None:
        self.table.check_integrity()
        assert sorted(each.session_id for each in self.table) == sorted(self.model.sessions)
        assert (self.pool.pages_used, self.pool.pages_cached) == (self.model.used, len(self.model.cached))

    @invariant()
    def what_can_be_found_is_what_was_not_evicted(self) -> None:
        for salt, ids in self.model.holders:
            key = self.keys.begin(salt).push(ids)[-1]
            assert self.pool.table.find(key) is not None, f"{ids} was evicted before its time"
        assert len(self.pool.table._by_key) == len(self.model.holders)

    @invariant()
    def contents_are_of_the_session(self) -> None:
        for found in self.table:
            held = self.model.sessions[found.session_id]
            wanted = [content(held.salt, tuple(held.ids[: place + 1])) for place in range(len(held.ids))]
            keys, values = self.pool.read(0, found.pages, found.length)
            assert keys[:, 0, 0].tolist() == wanted
            assert values[:, 0, 0].tolist() == [-each for each in wanted]
            assert self.pool.features[found.pages.slots[: found.length], 0].tolist() == wanted


PrefixMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPrefixMachine = PrefixMachine.TestCase
