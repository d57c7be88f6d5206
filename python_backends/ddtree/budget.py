"""Chooses how many draft nodes a round should verify: the most expected tokens per millisecond.

Verifying a node emits a token with the probability of its path, and every sequence emits one bonus token in
any case, so a round that verifies a best-first set of nodes is expected to emit the number of sequences plus
the sum of the nodes' path probabilities. Dividing by the measured cost of that many rows is the trade-off of
CaDDTree (arXiv 2606.01813); here the argmax is exact instead of a search over a few widths.

This module knows neither trees nor models: it sees probabilities and costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ddtree.errors import ConfigError

_ENOUGH_MS = 60.0
_COMPUTE_ROWS = 64  # with fewer rows a step may still be reading weights, whatever it takes
_NO_PROBS: NDArray[np.float64] = np.empty(0)


@dataclass(frozen=True)
class CostCurve:
    """Measured milliseconds of a round by the number of rows it verifies, roots included."""

    rows: tuple[int, ...]
    ms: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.ms):
            raise ConfigError(
                f"cost curve must have one cost per row count and at least one, got {len(self.rows)} rows "
                f"and {len(self.ms)} costs; measure it again"
            )
        if self.rows[0] < 1 or any(a >= b for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ConfigError(
                f"cost curve rows must be positive and ascending, got {self.rows}; list each row count once"
            )
        if not all(0 < value < float("inf") for value in self.ms):
            raise ConfigError(f"cost curve ms must be positive, got {self.ms}; measure it again")

    def at(self, rows: int) -> float:
        """Give the milliseconds of a round that verifies `rows` rows."""
        return float(self._interpolate(np.array([rows]))[0])

    def table(self, max_rows: int) -> NDArray[np.float32]:
        """Give `[max_rows]` float32: entry r is the cost of r + 1 rows, never falling."""
        return self._interpolate(np.arange(1, max_rows + 1)).astype(np.float32)

    @cached_property
    def _fitted(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return np.asarray(self.rows, dtype=np.float64), _never_falling(self.ms)

    def _interpolate(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        known, ms = self._fitted
        inside: NDArray[np.float64] = np.interp(rows, known, ms)
        if len(known) == 1:
            return inside
        # Beyond the last measurement the last slope goes on: a flat end would make large trees look free.
        slope = (ms[-1] - ms[-2]) / (known[-1] - known[-2])
        return np.asarray(inside + np.maximum(rows - known[-1], 0) * slope)


def _never_falling(ms: Sequence[float]) -> NDArray[np.float64]:
    """Fit the nearest non-falling curve (least squares, pool adjacent violators).

    More rows never cost less, so a fall is noise. A running maximum would let one slow measurement hide every
    cost after it, a running minimum from the right one fast measurement every cost before it.
    """
    pools: list[list[float]] = []  # [sum, count] of neighbours that share their mean
    for value in ms:
        pools.append([value, 1.0])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] >= pools[-1][0] / pools[-1][1]:
            total, count = pools.pop()
            pools[-1][0] += total
            pools[-1][1] += count
    return np.concatenate([np.full(int(count), total / count) for total, count in pools])


def measure(
    step: Callable[[int], None], rows: Sequence[int], repeats: int, *, enough_ms: float = _ENOUGH_MS
) -> CostCurve:
    """Time `step(rows)` for each row count: the fastest of `repeats` after one call that is not counted.

    Whatever else the machine does only adds time (other models load while this one measures), so the fastest
    call says best what a step costs. Row counts take turns, so that a slow moment falls on all of them alike.
    Where a step took longer than `enough_ms` from `_COMPUTE_ROWS` on, more rows are left to the last slope:
    a step that long computes, so its cost grows evenly, and loading is not kept.
    """
    samples: dict[int, list[float]] = {}
    for count in rows:
        samples[count] = []
        if _timed_ms(step, count) > enough_ms and count >= _COMPUTE_ROWS:
            break
    for _ in range(repeats):
        for count, times in samples.items():
            times.append(_timed_ms(step, count))
    return CostCurve(tuple(samples), tuple(min(times) for times in samples.values()))


def _timed_ms(step: Callable[[int], None], count: int) -> float:
    start = time.perf_counter()
    step(count)
    return (time.perf_counter() - start) * 1e3


def choose(
    path_probs: NDArray[np.float64],  # [n] candidate nodes of the whole batch, descending
    num_sequences: int,
    round_cost_ms: NDArray[np.float32],  # [R] a round's milliseconds when r + 1 rows are verified
    fixed_probs: NDArray[np.float64] = _NO_PROBS,  # [f] nodes that are verified in any case
) -> int:
    """Say how many of the candidate nodes to verify, 0 up to what the cost table covers.

    A node count is the better the more expected tokens per millisecond it gives; among equals the smallest
    wins. A cost that falls with more rows is taken as noise.
    """
    rates = _rates(path_probs, num_sequences, round_cost_ms, fixed_probs)
    return int(rates.argmax()) if len(rates) else 0


def may_pay(
    path_probs: NDArray[np.float64],  # [n] descending
    num_sequences: int,
    round_cost_ms: NDArray[np.float32],  # [R]
    fixed_probs: NDArray[np.float64] = _NO_PROBS,  # [f]
) -> bool:
    """Say whether more nodes, none more probable than the last one here, could still beat the best count."""
    rates = _rates(path_probs, num_sequences, round_cost_ms, fixed_probs)
    base_rows = num_sequences + len(fixed_probs)
    limit = len(round_cost_ms) - base_rows
    if len(path_probs) >= limit:
        return False
    last = path_probs[-1] if len(path_probs) else 1.0
    hopes = np.concatenate([path_probs, np.full(limit - len(path_probs), last)])
    best_hopes = _rates(hopes, num_sequences, round_cost_ms, fixed_probs)
    return bool(best_hopes[len(path_probs) + 1 :].max() > rates.max())


def _rates(
    path_probs: NDArray[np.float64],
    num_sequences: int,
    round_cost_ms: NDArray[np.float32],
    fixed_probs: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Give expected tokens per millisecond for each node count 0, 1, … that the cost table covers."""
    base_rows = num_sequences + len(fixed_probs)
    costs = np.maximum.accumulate(np.asarray(round_cost_ms, dtype=np.float64))[max(0, base_rows - 1) :]
    tokens = num_sequences + fixed_probs.sum() + np.concatenate([[0.0], np.cumsum(path_probs)])
    count = min(len(costs), len(tokens))
    rates: NDArray[np.float64] = tokens[:count] / costs[:count]
    return rates
