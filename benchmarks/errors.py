"""What can end a benchmark, as one line a person can act on."""

from __future__ import annotations


class BenchmarkError(Exception):
    """The benchmark cannot go on; the text says why and what to do."""
