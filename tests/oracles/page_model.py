"""What a pool of pages with a prefix cache should do, told slowly: a page's name is all ids up to its end."""

from __future__ import annotations

from dataclasses import dataclass, field

Name = tuple[str, tuple[int, ...]]  # salt, and all ids up to the end of a page


@dataclass
class Held:
    """One session: what it has committed, and its pages; those it alone knows have no name."""

    salt: str
    beginning: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    pages: list[Name | None] = field(default_factory=list)
    epoch: int = 0


class PageModel:
    """Sessions over `num_pages` pages of `size` slots."""

    def __init__(self, num_pages: int, size: int) -> None:
        self.num_pages, self.size = num_pages, size
        self.free = num_pages
        self.holders: dict[Name, int] = {}  # every page that can be found
        self.cached: list[Name] = []  # the first is the first to go
        self.sessions: dict[int, Held] = {}

    @property
    def used(self) -> int:
        return self.num_pages - self.free - len(self.cached)

    def _hits(self, held: Held) -> list[Name]:
        """Pages that go on where the session's full ones end; the last id of its beginning is never taken."""
        names: list[Name] = []
        stop = (len(held.ids) // self.size + 1) * self.size
        while stop < len(held.beginning):
            name = (held.salt, held.beginning[:stop])
            if name not in self.holders:
                break
            names.append(name)
            stop += self.size
        return names

    def _hold(self, name: Name) -> None:
        if not self.holders[name]:
            self.cached.remove(name)
        self.holders[name] += 1

    def open(self, session: int, held: Held, slots: int) -> bool:
        self.release(session)
        hits = self._hits(held)
        wanted = -(-slots // self.size)
        fresh = wanted - len(hits)
        if fresh > self.free + len(self.cached) - sum(not self.holders[name] for name in hits):
            return False
        for name in hits:
            self._hold(name)
        for _ in range(fresh):
            if self.free:
                self.free -= 1
            else:
                del self.holders[self.cached.pop(0)]
        held.pages = [*hits, *[None] * fresh]
        held.ids = list(held.beginning[: len(hits) * self.size])
        self.sessions[session] = held
        return True

    def catch_up(self, session: int) -> int:
        held = self.sessions[session]
        before, hits = len(held.ids), self._hits(held)
        first = before // self.size
        for place, name in enumerate(hits, start=first):
            self._hold(name)
            assert held.pages[place] is None
            held.pages[place] = name
            self.free += 1
        if hits:
            held.ids = list(held.beginning[: (first + len(hits)) * self.size])
        return len(held.ids) - before

    def commit(self, session: int, ids: list[int]) -> None:
        held = self.sessions[session]
        for token in ids:
            held.ids.append(token)
            name = (held.salt, tuple(held.ids))
            if len(held.ids) % self.size == 0 and name not in self.holders:
                held.pages[len(held.ids) // self.size - 1] = name
                self.holders[name] = 1

    def release(self, session: int) -> None:
        held = self.sessions.pop(session, None)
        for name in reversed(held.pages if held else []):
            if name is None:
                self.free += 1
                continue
            self.holders[name] -= 1
            if not self.holders[name]:
                self.cached.append(name)
