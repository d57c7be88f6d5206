"""What rounds cost on this machine, kept current while serving.

The curves measured at load have the right shape but may be off as a whole (the machine was busy with loading,
or is busier now), and they know one sequence only: what every further sequence adds to a step is learnt here.

This module sees numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddtree.budget import CostCurve

_MEMORY = 0.93  # weight of a round against the one after it
_SLOWEST = 3.0  # times what was expected: a round that took longer was interrupted, and counts as this
_MOST_EXTRA = 0.6  # of a cost, most that is put down to what the shape lacks
_PLAIN_WEIGHT = 0.3  # of a plain step in what is kept of plain steps
_STIFFNESS = 0.5  # how much spread, relative to the mean, must be seen before a slope is believed


class _KeptCost:
    """Milliseconds as `shape * a + extra * b`: `a` is the machine's speed, `b` is what the shape lacks."""

    def __init__(self) -> None:
        self._count = 1.0  # the measurement at load counts as one observation
        self._mean_x = 0.0
        self._mean_y = 1.0
        self._spread = 0.0
        self._slope_sum = 0.0
        self._is_new = True

    def at(self, shape: float, extra: float) -> float:
        """What it costs."""
        return shape * self._ratio(extra / shape)

    def over(self, shapes: NDArray[np.float64], extra: float) -> NDArray[np.float64]:
        """What each of several shapes costs, ascending: the cost is linear in the shape."""
        low, high = self.at(float(shapes[0]), extra), self.at(float(shapes[-1]), extra)
        span = shapes[-1] - shapes[0]
        scale = (high - low) / span if span > 0 else 0.0
        return np.asarray(low + scale * (shapes - shapes[0]), dtype=np.float64)

    def observe(self, shape: float, extra: float, ms: float) -> None:
        """Note what it cost."""
        x = extra / shape
        if self._is_new:
            self._mean_x, self._is_new = x, False
        y = min(ms / shape, _SLOWEST * self._ratio(x))
        self._count = self._count * _MEMORY + 1
        off_x, off_y = x - self._mean_x, y - self._mean_y
        self._mean_x += off_x / self._count
        self._mean_y += off_y / self._count
        self._spread = self._spread * _MEMORY + off_x * (x - self._mean_x)
        self._slope_sum = self._slope_sum * _MEMORY + off_x * (y - self._mean_y)

    def _ratio(self, x: float) -> float:
        if self._mean_x <= 0:
            return self._mean_y
        slope = self._slope_sum / (self._spread + _STIFFNESS * self._mean_x**2)
        slope = min(max(0.0, slope), _MOST_EXTRA * self._mean_y / self._mean_x)
        return self._mean_y + slope * (x - self._mean_x)


@dataclass(frozen=True)
class FinishedRound:
    """What a round did and took."""

    sequences: int
    drafting: int  # sequences that had candidates
    nodes: int  # draft nodes verified
    draft_ms: float
    build_ms: float
    verify_ms: float


class RoundCost:
    """Milliseconds of a round by its sequences, those of them that draft, and verified rows."""

    def __init__(self, curve: CostCurve, draft_ms: float, block_size: int) -> None:
        """Start from what the stages measured at load.

        Args:
            curve: verifying so many rows of one sequence.
            draft_ms: one draft of one sequence.
            block_size: rows a draft of one sequence computes.
        """
        self._curve = curve
        self._draft_ms = draft_ms
        self._block_size = block_size
        self._verify = _KeptCost()
        self._draft = _KeptCost()
        self._build = _KeptCost()
        self._plain_bias = 1.0  # what plain steps take, over what drafted rounds make expect; 1 at most

    def verify_ms(self, sequences: int, rows: int) -> float:
        """Verifying so many rows, the roots included, of so many sequences."""
        bias = self._bias(sequences, np.array([rows]))
        return float(self._verify.at(self._curve.at(rows), sequences) * bias[0])

    def draft_table(self, drafting: int) -> NDArray[np.float64]:
        """`[drafting + 1]`: drafting for 0, 1, … sequences, and what building trees costs at least."""
        if not drafting:
            return np.zeros(1)
        shapes = self._draft_shapes(drafting)
        return np.concatenate([[0.0], self._draft.over(shapes, 1) + self._build.at(1.0, 0)])

    def plain_ms(self, sequences: int) -> float:
        """Verifying only the roots of so many sequences: a plain decoding step."""
        return self.verify_ms(sequences, sequences)

    def table(self, sequences: int, drafting: int, nodes: int) -> NDArray[np.float32]:
        """`[sequences + nodes]`: entry r is a round that verifies r + 1 rows."""
        shapes = self._curve.table(sequences + nodes).astype(np.float64)
        build_ms = self._build.at(1.0, 1) - self._build.at(1.0, 0)  # of a node
        ms = self._verify.over(shapes, sequences) * self._bias(sequences, np.arange(1, len(shapes) + 1))
        ms += self.draft_table(drafting)[-1]
        ms += build_ms * np.maximum(0, np.arange(1 - sequences, nodes + 1))
        return np.asarray(ms, dtype=np.float32)

    def observe(self, round_: FinishedRound) -> None:
        """Note what a round took."""
        rows = round_.sequences + round_.nodes
        if not round_.nodes:
            expected = self._verify.at(self._curve.at(rows), round_.sequences)
            off = min(1.0, round_.verify_ms / expected)  # slower ones are interrupted, or the machine is
            self._plain_bias += _PLAIN_WEIGHT * (off - self._plain_bias)
        self._verify.observe(self._curve.at(rows), round_.sequences, round_.verify_ms)
        if round_.drafting:
            self._draft.observe(float(self._draft_shapes(round_.drafting)[-1]), 1, round_.draft_ms)
            self._build.observe(1.0, round_.nodes, round_.build_ms)

    def _bias(self, sequences: int, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Plain steps were seen themselves; the more nodes a round has, the less they say of it."""
        fade = np.clip(1 - (rows - sequences) / (sequences + 8), 0.0, 1.0)
        return np.asarray(1 + (self._plain_bias - 1) * fade, dtype=np.float64)

    def _draft_shapes(self, drafting: int) -> NDArray[np.float64]:
        """A drafter's cost grows with rows as the target's does: both read their weights, then compute."""
        rows = self._block_size * np.arange(1, drafting + 1)
        ms = self._curve.table(int(rows[-1]))[rows - 1].astype(np.float64)
        return np.asarray(self._draft_ms * ms / ms[0], dtype=np.float64)
