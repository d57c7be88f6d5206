"""When a caller who was refused may find a place: an estimate from how fast the running sequences go.

Knows how far sequences are, nothing of queues or stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddtree.live import Live

_LEAST_S, _MOST_S = 1, 300


def retry_hint(running: Iterable[Live], now_ns: int) -> str:
    """Word when the first running sequence will have ended at its pace so far, stop tokens not counted on."""
    seconds = [
        _pace_s(live, now_ns) * live.sequence.remaining_tokens for live in running if live.sequence.output_ids
    ]
    return f"retry in {min(_MOST_S, max(_LEAST_S, math.ceil(min(seconds, default=_LEAST_S))))} s"


def _pace_s(live: Live, now_ns: int) -> float:
    """Seconds per token since the first one."""
    stats = live.sequence.stats
    return (now_ns - stats.first_token_ns) / 1e9 / max(1, stats.emitted_tokens - 1)
