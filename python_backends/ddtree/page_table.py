"""Who holds which page of a pool, and which pages still hold the beginning of some earlier sequence.

A page is in one of four states:

    free      no reference, no key: it may hold anything
    cached    no reference, a key: full of committed tokens, kept until somebody needs pages
    owned     one reference: of the session that fills it, or the only one that still uses it
    shared    several references, and a key: it is full, so nobody writes to it any more

A key stands for all ids up to the page's end, see `prefix_cache`. This module knows no tensors, no ids and
no sessions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass
class Page:
    """One page. Whatever else belongs to a page's end, and not to its slots, has its place here."""

    references: int = 0
    key: bytes | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing is known of its contents and nobody holds it."""
        return self.references == 0 and self.key is None


class PageTable:
    """References and keys of a fixed number of pages."""

    def __init__(self, num_pages: int) -> None:
        """All pages are free."""
        self._pages = [Page() for _ in range(num_pages)]
        self._by_key: dict[bytes, int] = {}
        self._cached: dict[int, None] = {}  # in the order in which they are taken back
        self._used = 0

    @property
    def num_used(self) -> int:
        """Pages that somebody holds, however many do."""
        return self._used

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and whose contents are kept."""
        return len(self._cached)

    def references(self, page: int) -> int:
        """How many hold a page."""
        return self._pages[page].references

    def find(self, key: bytes) -> int | None:
        """The page with this key, held or cached."""
        return self._by_key.get(key)

    def key(self, page: int) -> bytes | None:
        """What a page that can be found is found by."""
        return self._pages[page].key

    def take(self, wanted: int, shared: Sequence[int] = ()) -> tuple[int, ...] | None:
        """Hold `wanted` pages: those of `shared`, in their order, and then pages that nobody holds.

        The others lie side by side where free pages do. When free pages run out, cached ones lose their
        contents, those that were given back longest ago first. None, and nothing is held, when too few are
        left.
        """
        fresh = wanted - len(shared)
        assert fresh >= 0, f"{len(shared)} pages are shared, and only {wanted} wanted"
        revived = sum(not self._pages[page].references for page in shared)
        if fresh > len(self._pages) - self._used - revived:
            return None
        for page in shared:
            self._hold(page)
        taken = self._choose(fresh)
        for page in taken:
            self._hold(page)
        return (*shared, *taken)

    def give_back(self, pages: Sequence[int]) -> None:
        """Hold these no longer; giving them back twice is a bug. Full pages with a key stay cached."""
        for index in reversed(pages):  # what stands first in a sequence is worth most, and goes last
            page = self._pages[index]
            assert page.references, f"page {index} was given back twice"
            page.references -= 1
            if not page.references:
                self._used -= 1
                if page.key is not None:
                    self._cached[index] = None

    def publish(self, index: int, key: bytes) -> None:
        """Let others find a full page that its holder filled; a page that has the key already keeps it."""
        page = self._pages[index]
        assert page.references == 1, f"page {index} is filled by one, {page.references} hold it"
        assert page.key is None, f"page {index} has a key already"
        if key not in self._by_key:
            page.key = key
            self._by_key[key] = index

    def _hold(self, index: int) -> None:
        page = self._pages[index]
        if not page.references:
            self._used += 1
            self._cached.pop(index, None)
        page.references += 1

    def _choose(self, wanted: int) -> list[int]:
        run = self._find_run(wanted)
        if run is not None:
            return run
        chosen = [index for index, page in enumerate(self._pages) if page.is_free][:wanted]
        for index in list(self._cached)[: wanted - len(chosen)]:
            self._forget(index)
            chosen.append(index)
        return sorted(chosen)

    def _find_run(self, wanted: int) -> list[int] | None:
        run = 0
        for index, page in enumerate(self._pages):
            run = run + 1 if page.is_free else 0
            if run == wanted:
                return list(range(index - wanted + 1, index + 1))
        return None

    def _forget(self, index: int) -> None:
        page = self._pages[index]
        assert page.key is not None, f"page {index} is cached without a key"
        del self._by_key[page.key], self._cached[index]
        self._pages[index] = Page()

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Assert that every page is accounted for by what its owners hold, and that the counters agree."""
        owners = list(owners)
        assert all(len(set(held)) == len(held) for held in owners), "a page stands twice in one session"
        held = Counter(page for pages in owners for page in pages)
        for index, page in enumerate(self._pages):
            assert page.references == held[index], (
                f"page {index} has {page.references} references and {held[index]} owners"
            )
            assert page.references < 2 or page.key is not None, f"page {index} is shared without a key"
            is_cached = page.references == 0 and page.key is not None
            assert is_cached == (index in self._cached), f"page {index} is cached in one place only"
            assert page.key is None or self._by_key.get(page.key) == index, f"page {index} cannot be found"
        assert len(self._by_key) == sum(page.key is not None for page in self._pages), "a key has no page"
        assert self._used == len(held), f"{self._used} pages are counted used, {len(held)} are held"
        free = sum(page.is_free for page in self._pages)
        assert free + len(self._cached) + self._used == len(self._pages), "a page is in no state"
