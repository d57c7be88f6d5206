"""A clock that goes when told."""

from __future__ import annotations


class ManualClock:
    """Nanoseconds, as `time.monotonic_ns` counts them."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def __call__(self) -> int:
        """The time."""
        return self.now_ns

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_ns += int(seconds * 1e9)
