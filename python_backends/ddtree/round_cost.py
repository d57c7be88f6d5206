"""What rounds cost on this machine and what they give, kept current while serving.

The curve measured at load has the right shape but may be off as a whole: the machine was busy with loading,
or is busier now. Every round corrects it. From the same observations follows whether drafting pays at all:
a round with drafts must emit more tokens per millisecond than a plain one would.

This module sees numbers only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddtree.budget import CostCurve

_MEMORY = 0.1  # least weight of the newest round in the running means; the first rounds weigh more
_SLOWEST, _FASTEST = 8.0, 0.125  # a round further off the curve than this was interrupted by something else
_PAUSE_ROUNDS = 24  # plain rounds before drafting is tried again
_TRIAL_ROUNDS = 6  # drafted rounds before drafting is judged


class RoundCost:
    """Milliseconds of a round by verified rows, and whether drafts pay for themselves."""

    def __init__(self, curve: CostCurve, draft_ms: float) -> None:
        """Start from what the stages measured at load; `draft_ms` is one draft of one sequence."""
        self._curve = curve
        self._rows = curve.rows[-1]
        self._scale = 1.0
        self._draft_ms = draft_ms
        self._rounds = 0
        self._gain = 1.0  # rate of drafted rounds over the rate plain ones would have
        self._drafted_rounds = 0
        self._pause_left = 0

    def table(self) -> NDArray[np.float32]:
        """`[R]`: entry r is the milliseconds of a drafted round that verifies r + 1 rows."""
        return (self._curve.table(self._rows) * np.float32(self._scale) + np.float32(self._draft_ms)).astype(
            np.float32
        )

    def should_draft(self) -> bool:
        """Whether the next round should draft, where that was left open; counts the plain rounds down."""
        if self._pause_left > 0:
            self._pause_left -= 1
            return False
        return True

    def plain_ms(self, sequences: int) -> float:
        """Milliseconds of verifying only the roots of so many sequences: a plain decoding step."""
        return self._curve.at(sequences) * self._scale

    def observe(self, *, sequences: int, rows: int, emitted: int, draft_ms: float, verify_ms: float) -> bool:
        """Note a finished round; `draft_ms` is 0 when nobody drafted. Gives whether a pause begins."""
        ratio = verify_ms / self._curve.at(rows)
        if not _FASTEST < ratio < _SLOWEST:
            return False
        self._rounds += 1
        weight = max(_MEMORY, 1 / (self._rounds + 1))
        self._scale += weight * (ratio - self._scale)
        if draft_ms <= 0:
            return False
        self._draft_ms += weight * (draft_ms - self._draft_ms)
        plain_rate = sequences / (self._curve.at(sequences) * ratio)
        self._gain += _MEMORY * (emitted / (draft_ms + verify_ms) / plain_rate - self._gain)
        self._drafted_rounds += 1
        if self._drafted_rounds >= _TRIAL_ROUNDS and self._gain < 1:
            self._pause_left = _PAUSE_ROUNDS
            self._drafted_rounds = 0
            self._gain = 1.0
            return True
        return False
