"""Names for the contents of pages, so that sequences which begin alike can share them.

A page's key is a hash over all ids up to its end, in chain: the key of the page before, where the page
stands, and its own ids. The first link holds the caller's salt, the draft checkpoint (context features depend
on it) and the page size. So equal keys mean equal keys, values and features, and nobody who sends another
salt finds a page. The hash is keyed by a secret of this process: nobody outside can make two texts collide.

This module knows ids and hashes, not pages.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

_KEY_BYTES = 16


@dataclass(frozen=True)
class Prefix:
    """What a session begins with."""

    ids: Sequence[int] = ()  # all that are known when it opens
    salt: str = ""  # pages are shared only under the same salt
    computed: int = 0  # so many of the last ids are never taken from the cache


class KeyChain:
    """The keys of one sequence's pages, made as its ids are committed."""

    def __init__(self, secret: bytes, root: bytes, page_size: int) -> None:
        self._secret = secret
        self._last = root
        self._page_size = page_size
        self._num_pages = 0
        self._rest: list[int] = []  # ids of the page that is not full yet

    def fork(self) -> KeyChain:
        """A chain that goes on after this one's last full page."""
        chain = KeyChain(self._secret, self._last, self._page_size)
        chain._num_pages = self._num_pages
        return chain

    def push(self, ids: Sequence[int]) -> list[bytes]:
        """Take newly committed ids; gives the keys of the pages that became full with them."""
        self._rest += ids
        keys = []
        while len(self._rest) >= self._page_size:
            place, ids = self._num_pages.to_bytes(8, "little"), array("i", self._rest[: self._page_size])
            self._last = _hash(self._secret, self._last, place, ids.tobytes())
            self._num_pages += 1
            del self._rest[: self._page_size]
            keys.append(self._last)
        return keys


class PageKeys:
    """Begins key chains for the pages of one stage."""

    def __init__(self, draft_hash: str, page_size: int) -> None:
        """Choose a secret; `draft_hash` names the draft checkpoint."""
        self._secret = secrets.token_bytes(_KEY_BYTES)
        self._draft_hash = draft_hash
        self.page_size = page_size

    def begin(self, salt: str) -> KeyChain:
        """The chain of a sequence that shares pages under `salt`."""
        size = self.page_size.to_bytes(8, "little")
        root = _hash(self._secret, size, self._draft_hash.encode(), salt.encode())
        return KeyChain(self._secret, root, self.page_size)


def _hash(secret: bytes, *parts: bytes) -> bytes:
    digest = blake2b(key=secret, digest_size=_KEY_BYTES)
    for part in parts:  # each with its length, so that no two lists of parts read alike
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
