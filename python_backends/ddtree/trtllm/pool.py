"""The verifier's pages when the engine holds the keys and values: our accounting, their cache.

A session's pages are counted here and its blocks are reserved in the engine, both when it opens, with room
for the padding rows of the widest tree it may meet in a batch. The context features stay here. A commit
arrives as copies of whole slots, as in any pool, and goes to the engine as accepted paths of requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ddtree.kv_cache import CacheShape, KvPool, Pages
from ddtree.trtllm.adapter import EngineStep, TreeEngine


@dataclass(eq=False)
class EngineRequest:
    """One session in the engine."""

    handle: Any  # what `TreeEngine.open` gave
    prompt: int = 0  # tokens that came in context steps


@dataclass(frozen=True)
class EnginePages(Pages):
    """Pages of a session whose blocks are the engine's."""

    request: EngineRequest


class EnginePool(KvPool):
    """Pages over an engine's blocks. Not thread-safe: one stage owns it."""

    can_share = False  # a block belongs to one request of the engine

    def __init__(
        self, engine: TreeEngine, *, feature_size: int, pages: int, page_size: int, padding: int
    ) -> None:
        """Take an engine whose cache is open.

        Args:
            engine: the engine.
            feature_size: width of the feature kept beside each slot.
            pages: blocks of the engine that sessions may hold.
            page_size: tokens of a block.
            padding: most rows by which a session's tree may be padded.
        """
        shape = CacheShape(0, 0, 0, feature_size, engine.sizes.dtype)
        budget = pages * page_size * shape.bytes_per_slot
        super().__init__(shape, budget_bytes=budget, page_size=page_size, device=engine.sizes.device)
        assert self.num_pages == pages, f"{self.num_pages} pages for {pages} blocks"
        self._engine = engine
        self._padding = padding
        self._place = torch.zeros(pages * page_size, dtype=torch.int64)  # of each slot in its session
        self._owner: dict[int, EngineRequest] = {}  # by page
        self._next_id = 0
        self.staged: list[EngineStep] = []  # what the last forward ran

    @property
    def total_slots(self) -> int:
        """Slots for tokens: one session's padding is no room."""
        return super().total_slots - self._padding

    def reserve(self, slots: int) -> EnginePages | None:
        """Take pages and the engine's blocks for `slots` slots and padding; None when too few are free."""
        pages = super().reserve(slots + self._padding)
        if pages is None:
            return None
        self._next_id += 1
        handle = self._engine.open(self._next_id, pages.capacity)
        if handle is None:
            super().release(pages)
            return None
        owned = EnginePages(pages.indices, pages.slots, pages.first_slot, EngineRequest(handle))
        self._place[owned.slots.cpu()] = torch.arange(owned.capacity)
        self._owner |= dict.fromkeys(owned.indices, owned.request)
        return owned

    def release(self, pages: Pages) -> None:
        """Give pages and blocks back; giving them back twice is a bug."""
        super().release(pages)
        request = {id(owner): owner for owner in map(self._owner.pop, pages.indices)}
        assert len(request) == 1, "pages of several sessions were given back as one's"
        self._engine.close(request.popitem()[1].handle)

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Let the engine bring the accepted paths of the last forward to the front.

        Rows come session by session, each with its root first, which stays where it is.
        """
        paths: dict[int, list[int]] = {}
        bases: dict[int, int] = {}
        rows = zip(self._place[source.cpu()].tolist(), destination.tolist(), strict=True)
        for place, slot in rows:
            handle = id(self._owner[slot // self.page_size].handle)
            base = bases.setdefault(handle, place)
            paths.setdefault(handle, []).append(place - base)
        for step in self.staged:
            if step.batch.counts[0] > 1:
                # A request that is not asked for keeps its root alone.
                self._engine.relocate(step, [paths.get(id(request), [0]) for request in step.batch.requests])
