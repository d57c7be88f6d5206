"""A session's cache where the target has recurrent layers beside attention: pages and a state, as one.

Attention layers own pages, recurrent layers a state of fixed size; a session holds both or neither. Pages say
what any prefix of them held, a state only what it holds now. So a prefix is shared up to the last page whose
end a *snapshot* remembers: a copy of the state (convolution tail included) as it was there. Snapshots lie in
states that no session holds and make room, the one used longest ago first, when a session needs its state:

    free        nothing of meaning
    snapshot    the state at the end of a page, under the page's key
    mark        becoming one: written while its session reads past the end of a page
    owned       of one session

A page's key stands for all ids up to its end, so a snapshot stays right even when its page is gone for a
while. This module knows nothing of sessions' ids, trees or models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ddtree.kv_cache import CacheShape, KvPool, Pages
from ddtree.recurrent.state_pool import StatePool
from ddtree.recurrent.step import Mark


@dataclass(frozen=True)
class HybridPages(Pages):
    """The pages of one session, and the state that belongs to them."""

    state_index: int


class HybridPool(KvPool):
    """Pages and states. Not thread-safe: one stage owns it."""

    def __init__(
        self,
        shape: CacheShape,
        states: StatePool,
        *,
        budget_bytes: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        """Allocate the pages beside states that are allocated already."""
        super().__init__(shape, budget_bytes=budget_bytes, page_size=page_size, device=device)
        self.states: StatePool = states
        self._snapshots: dict[bytes, int] = {}  # by page key, the one used longest ago first
        self._marks: dict[int, int] = {}  # by the session's state

    @property
    def num_snapshots(self) -> int:
        """States kept for sequences that begin alike."""
        return len(self._snapshots)

    def state_of(self, pages: Pages) -> int:
        """The state of a session."""
        assert isinstance(pages, HybridPages), "these pages came from another pool"
        return pages.state_index

    def reserve_after(self, shared: Sequence[int], slots: int) -> HybridPages | None:
        """Hold pages and a state, which is that at the end of `shared`; None when pages or states lack."""
        state = self._state_after(shared)
        if state is None:
            return None
        pages = super().reserve_after(shared, slots)
        if pages is None:
            self.states.release(state)
            return None
        return HybridPages(pages.indices, pages.slots, pages.first_slot, state)

    def replace(self, pages: Pages, first: int, shared: Sequence[int]) -> HybridPages:
        """Put shared pages in their places, and the state to the end of them."""
        state = self.state_of(pages)
        self.states.copy(self._snapshots[self._touch(shared)], state)
        replaced = super().replace(pages, first, shared)
        return HybridPages(replaced.indices, replaced.slots, replaced.first_slot, state)

    def release(self, pages: Pages) -> None:
        """Give pages and state back."""
        super().release(pages)
        self._drop_mark(self.state_of(pages))
        self.states.release(self.state_of(pages))

    def usable(self, shared: Sequence[int]) -> Sequence[int]:
        """The part of full pages, found one after another, after which a state is remembered."""
        for count in range(len(shared), 0, -1):
            if self.table.key(shared[count - 1]) in self._snapshots:
                return shared[:count]
        return ()

    def mark(self, pages: Pages, start: int, count: int) -> Mark | None:
        """Where the state at the last end of a page among these rows is to be written.

        None where no page ends before the last row, or sessions hold all states.
        """
        own, end = self.state_of(pages), (start + count) // self.page_size * self.page_size
        self._drop_mark(own)
        if not start < end < start + count:
            return None
        state = self._take_state()
        if state is None:
            return None
        self._marks[own] = state
        return Mark(end - start, state)

    def keep(self, key: bytes, pages: Pages, length: int) -> None:
        """Remember the state at the end of the page with this key, the last full one of a session.

        It was marked as the session read past it, or is the session's own if that ends there. It takes a
        state that nobody holds or that of the oldest snapshot; when sessions hold all it is not remembered.
        """
        own = self.state_of(pages)
        if key in self._snapshots:
            self._snapshots[key] = self._snapshots.pop(key)
        elif own in self._marks:
            self._snapshots[key] = self._marks.pop(own)
        elif length % self.page_size == 0 and (state := self._take_state()) is not None:
            self.states.copy(own, state)
            self._snapshots[key] = state
        self._drop_mark(own)

    def _drop_mark(self, own: int) -> None:
        if (state := self._marks.pop(own, None)) is not None:
            self.states.release(state)

    def _state_after(self, shared: Sequence[int]) -> int | None:
        """A state for a new session, as it was at the end of `shared`; empty without pages."""
        if not shared:
            return self._take_state()
        key = self._touch(shared)
        if len(self._snapshots) == 1 and len(self.states) == self.states.size.states:
            return self._snapshots.pop(key)  # nothing else is left to take: the session goes on in it
        state = self._take_state()
        if state is not None:
            self.states.copy(self._snapshots[key], state)
        return state

    def _touch(self, shared: Sequence[int]) -> bytes:
        """Use the snapshot at the end of `shared`, so that it is the last to make room; gives its key."""
        key = self.table.key(shared[-1])
        assert key is not None, "a shared page has a key"
        self._snapshots[key] = self._snapshots.pop(key)
        return key

    def _take_state(self) -> int | None:
        """An empty state: a free one or that of the oldest snapshot; None when sessions hold all."""
        if (state := self.states.reserve()) is not None or not self._snapshots:
            return state
        self.states.release(self._snapshots.pop(next(iter(self._snapshots))))
        return self.states.reserve()

    def check_integrity(self, owners: Iterable[Pages]) -> None:
        """Assert that pages and states are accounted for by their owners and the snapshots."""
        owners = list(owners)
        super().check_integrity(owners)
        kept = (*self._snapshots.values(), *self._marks.values())
        self.states.check_integrity([*map(self.state_of, owners), *kept])
