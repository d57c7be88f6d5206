"""What a verifier shares of its context features, without a target: a small pool and its owners' rows."""

from __future__ import annotations

import torch

from ddtree.kv_cache import CacheShape, KvPool, Pages
from ddtree.shared_features import SharedFeatures, Span

CPU = torch.device("cpu")
PAGE, NUM_PAGES, WIDTH = 4, 7, 6


def make_pool(
    width: int = WIDTH, dtype: torch.dtype = torch.float32, page_size: int = PAGE, pages: int = NUM_PAGES
) -> KvPool:
    shape = CacheShape(layers=1, kv_heads=1, head_dim=1, feature_size=width, dtype=dtype)
    budget = shape.bytes_per_slot * page_size * pages
    return KvPool(shape, budget_bytes=budget, page_size=page_size, device=CPU)


class Verifier:
    """A pool whose owners fill their slots with numbers that nobody else has."""

    def __init__(self) -> None:
        self.pool = make_pool()
        self.shared = SharedFeatures(self.pool)
        self._next = 1.0

    def fill(self, pages: Pages, start: int, stop: int) -> torch.Tensor:
        """Write rows, and give them."""
        rows = self._next + torch.arange((stop - start) * WIDTH, dtype=torch.float32).view(-1, WIDTH)
        self._next += rows.numel()
        self.pool.features[pages.slots[start:stop]] = rows
        return rows

    def filled(self, slots: int) -> tuple[Pages, torch.Tensor, torch.Tensor]:
        """A new owner, its rows and references to all of them."""
        pages = self.pool.reserve(slots)
        assert pages is not None
        rows = self.fill(pages, 0, slots)
        return pages, rows, self.shared.refer([Span(pages.indices, 0, slots)])
