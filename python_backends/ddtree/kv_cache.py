"""A fixed pool of pages that holds the committed keys, values and context features of every session.

The pool is allocated once; a session reserves all slots it may ever need when it opens, so a running
sequence can never find the pool full. Slots of one session, as half-open intervals:

    [0, shared)                  committed by an earlier session: whole pages, read by all and written by none
    [shared, length)             committed by this session; its full pages may be shared from now on
    [length, length + rows)      staged by the running step: root and draft nodes, in node order
    [length + rows, capacity)    reserved, holding nothing of meaning

A step stages a tree and then commits a path: the rows of the accepted path become the slots
`[length, length + path)`. Nothing outside this module assumes that pages lie side by side: a run of pages is
read as a view, scattered pages are gathered.

Who holds which page is the page table's business. This module knows nothing of sessions' ids, models or
attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ddtree.page_table import PageTable

if TYPE_CHECKING:
    from ddtree.recurrent.state_pool import StatePool
    from ddtree.recurrent.step import Mark


@dataclass(frozen=True)
class CacheShape:
    """What one KV slot holds."""

    layers: int
    kv_heads: int
    head_dim: int
    feature_size: int = 0  # width of the context feature kept beside each slot; 0: none
    dtype: torch.dtype = torch.bfloat16

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of keys, values and feature of one token."""
        values = 2 * self.layers * self.kv_heads * self.head_dim + self.feature_size
        return values * self.dtype.itemsize


@dataclass(frozen=True)
class Pages:
    """The pages of one session, in the order of its slots."""

    indices: tuple[int, ...]
    slots: torch.Tensor  # [capacity] int64, pool slot of each of the session's slots
    first_slot: int | None  # pool slot of slot 0 when the pages lie side by side

    @classmethod
    def none(cls) -> Pages:
        """No pages."""
        return cls((), torch.zeros(0, dtype=torch.int64), None)

    @property
    def capacity(self) -> int:
        """Slots the session may use."""
        return int(self.slots.shape[0])


class KvPool:
    """Pages of KV slots. Not thread-safe: one stage owns it."""

    can_share = True  # whether a page may belong to several sessions
    states: StatePool | None = None  # of recurrent layers, where the target has any: see `hybrid_cache`

    @property
    def most_rows(self) -> int | None:
        """Rows that one step may stage; None: any."""
        return None if self.states is None else self.states.size.rows

    def __init__(self, shape: CacheShape, *, budget_bytes: int, page_size: int, device: torch.device) -> None:
        """Allocate as many whole pages as fit into `budget_bytes` (at least one)."""
        self.shape = shape
        self.page_size = page_size
        self.num_pages = max(1, budget_bytes // (shape.bytes_per_slot * page_size))
        slots = self.num_pages * page_size
        # zeros, not empty: a masked slot still meets the softmax's weighted sum, and 0 x NaN is NaN
        self.keys_values = torch.zeros(
            (shape.layers, 2, slots, shape.kv_heads, shape.head_dim), dtype=shape.dtype, device=device
        )
        self.features = torch.zeros((slots, shape.feature_size), dtype=shape.dtype, device=device)
        self.table = PageTable(self.num_pages)

    @property
    def pages_used(self) -> int:
        """Pages held by sessions; one that several share counts once."""
        return self.table.num_used

    @property
    def pages_cached(self) -> int:
        """Pages that no session holds and whose contents are kept for one that begins alike."""
        return self.table.num_cached

    @property
    def num_snapshots(self) -> int:
        """Recurrent states kept for sequences that begin alike; attention alone needs none."""
        return 0

    @property
    def total_slots(self) -> int:
        """Slots of the whole pool."""
        return self.num_pages * self.page_size

    def reserve(self, slots: int) -> Pages | None:
        """Hold pages for `slots` KV slots that nobody else holds; None when too few are left."""
        return self.reserve_after((), slots)

    def reserve_after(self, shared: Sequence[int], slots: int) -> Pages | None:
        """The same, where the first pages are `shared`: full ones that others may hold too."""
        indices = self.table.take(-(-slots // self.page_size), shared)
        return None if indices is None else self._pages(indices)

    def replace(self, pages: Pages, first: int, shared: Sequence[int]) -> Pages:
        """Put full pages that others may hold too in the places from `first` on; give back those there."""
        held = self.table.take(len(shared), shared)
        assert held is not None, "holding a page that is there needs no other"
        stop = first + len(shared)
        self.table.give_back(pages.indices[first:stop])
        return self._pages((*pages.indices[:first], *shared, *pages.indices[stop:]))

    def _pages(self, indices: tuple[int, ...]) -> Pages:
        starts = torch.tensor(indices, dtype=torch.int64, device=self.features.device) * self.page_size
        offsets = torch.arange(self.page_size, device=starts.device)
        all_slots = (starts[:, None] + offsets).reshape(-1)
        is_run = all(page == indices[0] + place for place, page in enumerate(indices))
        return Pages(indices, all_slots, indices[0] * self.page_size if is_run and indices else None)

    def release(self, pages: Pages) -> None:
        """Give pages back; giving them back twice is a bug."""
        self.table.give_back(pages.indices)

    def read(self, layer: int, pages: Pages, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of slots `[0, stop)`, each `[stop, kv_heads, head_dim]`; a view when possible."""
        keys, values = self.keys_values[layer]
        if pages.first_slot is not None:
            span = slice(pages.first_slot, pages.first_slot + stop)
            return keys[span], values[span]
        slots = pages.slots[:stop]
        return keys.index_select(0, slots), values.index_select(0, slots)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store rows `[n, kv_heads, head_dim]` of one layer at pool slots `[n]`."""
        self.keys_values[layer, 0].index_copy_(0, slots, keys)
        self.keys_values[layer, 1].index_copy_(0, slots, values)

    def write_layers(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store rows `[layers, n, kv_heads, head_dim]` of all layers at pool slots `[n]`."""
        self.keys_values[:, 0].index_copy_(1, slots, keys)
        self.keys_values[:, 1].index_copy_(1, slots, values)

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy whole slots, all layers at once; all are read before any is written, so they may overlap."""
        rows = self.keys_values.index_select(2, source)
        self.keys_values.index_copy_(2, destination, rows)

    def state_of(self, pages: Pages) -> int | None:
        """The recurrent state that belongs to a session's pages; attention alone needs none."""
        del pages
        return None

    def usable(self, shared: Sequence[int]) -> Sequence[int]:
        """The part of full pages, found one after another, after which a session can go on."""
        return shared

    def mark(self, pages: Pages, start: int, count: int) -> Mark | None:
        """Before a session reads `count` rows: what to note where a page ends among them, if pages do not."""
        del pages, start, count
        return None

    def keep(self, key: bytes, pages: Pages, length: int) -> None:
        """Remember a session at the end of the page with this key, the last full one of `length` slots."""

    def check_integrity(self, owners: Iterable[Pages]) -> None:
        """Assert that every page is accounted for by its owners, see `PageTable.check_integrity`."""
        self.table.check_integrity(pages.indices for pages in owners)
