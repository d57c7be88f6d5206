"""The session table decides whether a call belongs to the life of the session it holds."""

from __future__ import annotations

import torch

from ddtree.kv_cache import CacheShape, KvPool
from ddtree.sessions import SessionTable
from ddtree.types import Status


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_table(clock: Clock | None = None, ttl_s: float = 60.0) -> SessionTable:
    shape = CacheShape(layers=1, kv_heads=1, head_dim=2, dtype=torch.float32)
    pool = KvPool(shape, budget_bytes=shape.bytes_per_slot * 4 * 8, page_size=4, device=torch.device("cpu"))
    return SessionTable(pool, ttl_s=ttl_s, clock=clock or Clock())


def test_only_the_right_epoch_and_length_find_a_session() -> None:
    table = make_table()
    session = table.open(7, 2, 10)
    assert session is not None
    session.length = 5
    assert table.find(7, 2, 5) is session
    assert table.find(7, 1, 5) is None
    assert table.find(7, 3, 5) is None
    assert table.find(7, 2, 4) is None
    assert table.find(8, 2, 5) is None


def test_a_call_of_an_earlier_life_neither_finds_nor_reopens() -> None:
    table = make_table()
    table.open(7, 2, 10)
    assert table.open_or_find(7, 1, 0, 10) == (None, Status.SESSION_LOST)
    assert len(table) == 1


def test_opening_again_frees_the_earlier_life() -> None:
    table = make_table()
    table.open(7, 0, 32)
    session, status = table.open_or_find(7, 1, 0, 32)
    assert status == Status.OK
    assert session is not None
    assert session.length == 0
    table.check_integrity()


def test_a_full_pool_is_told_and_nothing_is_kept() -> None:
    table = make_table()
    table.open(1, 0, 20)
    assert table.open_or_find(2, 0, 0, 13) == (None, Status.POOL_FULL)
    assert table.usage().sessions == 1
    table.release([1])
    assert table.open_or_find(2, 0, 0, 13)[1] == Status.OK
    table.check_integrity()


def test_sessions_nobody_touches_expire_and_touched_ones_do_not() -> None:
    clock = Clock()
    table = make_table(clock)
    table.open(1, 0, 4)
    table.open(2, 0, 4)
    clock.now += 50
    assert table.find(2, 0, 0) is not None
    clock.now += 20
    assert table.expire() == 1
    assert table.find(1, 0, 0) is None
    assert table.find(2, 0, 0) is not None
    table.check_integrity()


def test_releasing_an_unknown_session_is_no_error() -> None:
    table = make_table()
    table.release([99])
    assert table.usage().pages_used == 0
