"""Finds stop strings in text that comes in pieces, and holds back what may be the beginning of one.

The rule does not depend on where the pieces are cut: the stop string that is *complete first* wins; of
those complete at the same character the longest, so that nothing of it is left standing. Knows no tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StopScan:
    """What may be shown after one piece of text."""

    text: str  # certain to come before any stop string
    stop: str | None  # the stop string found


@dataclass
class _Node:
    """A prefix of some stop string (Aho and Corasick, "Efficient string matching", 1975)."""

    depth: int
    children: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node | None = None  # the longest proper suffix that is a prefix too; None at the root
    stop: str | None = None  # the longest stop string that ends here


class StopFinder:
    """Scans one sequence's text; a character costs constant time however many stop strings there are."""

    def __init__(self, stop_strings: Iterable[str]) -> None:
        self._root = _build(stop_strings)
        self._node = self._root
        self._held = ""  # always the text of `_node`

    @property
    def is_looking(self) -> bool:
        """Whether there are stop strings at all."""
        return bool(self._root.children)

    def may_find(self, text: str) -> bool:
        """Whether a stop string has begun, or begins in the piece that comes next; quickly seen."""
        if self._node is not self._root:
            return True
        return self.is_looking and not self._root.children.keys().isdisjoint(text)

    def push(self, text: str) -> StopScan:
        """Take the next piece; what cannot belong to a stop string is given back.

        A piece in which one is found counts as not taken: it may come again in smaller ones, to see which of
        them completes it.
        """
        if not self.may_find(text):
            return StopScan(text, None)
        pending, node = self._held + text, self._node
        for index, character in enumerate(text, start=len(self._held) + 1):
            node = _step(node, character)
            if node.stop is not None:
                return StopScan(pending[: index - len(node.stop)], node.stop)
        certain = len(pending) - node.depth
        self._node, self._held = node, pending[certain:]
        return StopScan(pending[:certain], None)

    def finish(self) -> str:
        """Give out what was held back: no more text comes, so it was no stop string."""
        held, self._held, self._node = self._held, "", self._root
        return held


def _build(stop_strings: Iterable[str]) -> _Node:
    root = _Node(depth=0)
    for stop in stop_strings:
        assert stop, "an empty stop string is everywhere"
        node = root
        for character in stop:
            node = node.children.setdefault(character, _Node(node.depth + 1))
        node.stop = stop
    # Breadth first: a node's fallback is shorter than the node, so it is linked already.
    queue = deque(root.children.values())
    for child in queue:
        child.fallback = root
    while queue:
        node = queue.popleft()
        assert node.fallback is not None, "only the root has no fallback"
        for character, child in node.children.items():
            child.fallback = _step(node.fallback, character)
            child.stop = child.stop or child.fallback.stop
            queue.append(child)
    return root


def _step(node: _Node, character: str) -> _Node:
    while character not in node.children and node.fallback is not None:
        node = node.fallback
    return node.children.get(character, node)
