"""The page pool: a state machine over its verbs, against plain dictionaries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from ddtree.kv_cache import CacheShape, KvPool, Pages

SHAPE = CacheShape(layers=2, kv_heads=1, head_dim=2, dtype=torch.float32)
PAGE = 4
NUM_PAGES = 7


def make_pool() -> KvPool:
    return KvPool(
        SHAPE,
        budget_bytes=SHAPE.bytes_per_slot * PAGE * NUM_PAGES,
        page_size=PAGE,
        device=torch.device("cpu"),
    )


class PoolMachine(RuleBasedStateMachine):
    """Every owner's slots keep exactly what was written to them, whatever the others do."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.written: dict[int, tuple[Pages, dict[int, float]]] = {}
        self.next_value = 1.0

    @rule(target=owners, slots=st.integers(1, PAGE * NUM_PAGES))
    def reserve(self, slots: int) -> int:
        free = NUM_PAGES - self.pool.pages_used
        pages = self.pool.reserve(slots)
        assert (pages is not None) == (-(-slots // PAGE) <= free)
        if pages is None:
            return -1
        assert pages.capacity >= slots
        key = int(self.next_value)
        self.next_value += 1
        self.written[key] = (pages, {})
        return key

    @rule(key=owners, data=st.data())
    def write(self, key: int, data: st.DataObject) -> None:
        if key not in self.written:
            return
        pages, contents = self.written[key]
        slot = data.draw(st.integers(0, pages.capacity - 1))
        self.next_value += 1
        rows = torch.full((1, 1, 2), self.next_value)
        for layer in range(SHAPE.layers):
            self.pool.write(layer, pages.slots[slot : slot + 1], rows + layer, -rows - layer)
        contents[slot] = self.next_value

    @rule(key=owners, data=st.data())
    def move(self, key: int, data: st.DataObject) -> None:
        """Overlapping moves within one owner read everything before they write."""
        if key not in self.written:
            return
        pages, contents = self.written[key]
        count = data.draw(st.integers(1, min(4, pages.capacity)))
        source = data.draw(st.permutations(range(pages.capacity)))[:count]
        start = data.draw(st.integers(0, pages.capacity - count))
        self.pool.move(pages.slots[torch.tensor(source)], pages.slots[start : start + count])
        before = dict(contents)
        for offset, slot in enumerate(source):
            contents[start + offset] = (
                before.get(slot, 0.0) if slot in before else self.read_slot(pages, start + offset)
            )

    def read_slot(self, pages: Pages, slot: int) -> float:
        return float(self.pool.read(0, pages, slot + 1)[0][slot, 0, 0])

    @rule(key=consumes(owners))
    def release(self, key: int) -> None:
        if key in self.written:
            self.pool.release(self.written.pop(key)[0])

    @invariant()
    def contents_hold(self) -> None:
        self.pool.check_integrity(pages for pages, _ in self.written.values())
        for pages, contents in self.written.values():
            for layer in range(SHAPE.layers):
                keys, values = self.pool.read(layer, pages, pages.capacity)
                for slot, value in contents.items():
                    if value:
                        assert keys[slot].tolist() == [[value + layer] * 2]
                        assert values[slot].tolist() == [[-value - layer] * 2]


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_pages_side_by_side_are_a_view_and_scattered_ones_a_gather() -> None:
    pool = make_pool()
    first, middle, last = pool.reserve(PAGE * 2), pool.reserve(PAGE * 2), pool.reserve(PAGE * 3)
    assert first is not None
    assert middle is not None
    assert last is not None
    pool.release(first)
    pool.release(last)
    scattered = pool.reserve(PAGE * 5)
    assert scattered is not None
    assert scattered.first_slot is None
    assert scattered.indices == (0, 1, 4, 5, 6)
    assert middle.first_slot == PAGE * 2
    keys, _ = pool.read(0, middle, 3)
    assert keys.data_ptr() == pool.keys_values[0, 0, PAGE * 2 :].data_ptr()
    values = torch.arange(5.0 * PAGE).view(-1, 1, 1).expand(-1, 1, 2)
    pool.write(1, scattered.slots, values, values)
    assert torch.equal(pool.read(1, scattered, 5 * PAGE)[1], values)


def test_giving_pages_back_twice_is_caught() -> None:
    pool = make_pool()
    pages = pool.reserve(1)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.release(pages)
