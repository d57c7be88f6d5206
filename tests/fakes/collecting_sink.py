"""A sink that keeps what a sequence emitted."""

from __future__ import annotations

from collections.abc import Callable

from ddtree.round_trace import SequenceTrace
from ddtree.sequence import Delta, Stats


class CollectingSink:
    """Keeps deltas; `cancel_after` deltas it says that nobody waits any more."""

    def __init__(
        self,
        cancel_after: int | None = None,
        on_emit: Callable[[], None] | None = None,
        trace: SequenceTrace | None = None,
    ) -> None:
        self.trace = trace
        self.rounds: list[str] = []  # what the trace gave, JSON
        self.deltas: list[Delta] = []
        self.stats: Stats | None = None
        self._cancel_after = cancel_after
        self._on_emit = on_emit

    def emit(self, delta: Delta, stats: Stats) -> None:
        """Keep a delta."""
        assert not (self.deltas and self.deltas[-1].finish_reason), "something came after the last delta"
        self.deltas.append(delta)
        if self.trace is not None:
            self.rounds += self.trace.take(delta)
        self.stats = stats
        if self._on_emit is not None:
            self._on_emit()

    def is_cancelled(self) -> bool:
        """Whether enough was seen."""
        return self._cancel_after is not None and len(self.deltas) >= self._cancel_after

    @property
    def token_ids(self) -> list[int]:
        """All ids emitted."""
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def text(self) -> str:
        """All text emitted."""
        return "".join(delta.text for delta in self.deltas)

    @property
    def finish_reason(self) -> str:
        """Why it ended; empty while it runs."""
        return self.deltas[-1].finish_reason if self.deltas else ""
