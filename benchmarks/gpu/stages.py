"""The parts of a round at one shape, each by itself and the round as a whole, by every way there is.

`plain`, `verify`, `draft`, `build` and `settle` are timed on the device's clock, `round` by the host's from
its call until the tokens are there. What a round takes beyond the sum of its parts is the host's share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.gpu.placement import Placement
from benchmarks.gpu.seam import WAYS, Way
from benchmarks.gpu.setting import Facts, Setting, free, one_line
from benchmarks.gpu.shapes import PairShape, RandomPair, make_pair
from benchmarks.gpu.timing import time_ms, wall_ms

VERIFIED_ROWS = (17, 33, 65, 129, 257)
ROUND_NODES = 64
SHORT, LONG = "1k", "16k"
_MOST_SECONDS = 1.5  # for one number


@dataclass(frozen=True)
class Rows:
    """What is measured of a shape."""

    contexts: Mapping[str, int] = field(default_factory=lambda: {SHORT: 1024, LONG: 16384})
    verified: Sequence[int] = VERIFIED_ROWS
    is_whole: bool = True  # draft, build, settle and round too

    @property
    def count(self) -> int:
        """Numbers of one context and way."""
        return 1 + len(self.verified) + (4 if self.is_whole else 0)


def measure_stages(shape: PairShape, rows: Rows, setting: Setting) -> Facts:
    """Measure every row of a shape; a way that fails says why and does not end the others."""
    pair = make_pair(shape, setting.device, setting.dtype)
    seconds = min(_MOST_SECONDS, setting.seconds / (len(rows.contexts) * len(WAYS) * rows.count))
    facts: Facts = {
        "shape": shape.name,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "plain_bytes": pair.plain_bytes,
        "draft_bytes": pair.draft_bytes,
        "state_bytes_per_sequence": pair.state_bytes,
        "contexts": {},
    }
    for label, context in rows.contexts.items():
        at: Facts = {"tokens": context, "limit_ms": _limits(pair, context, setting), "ways": {}}
        facts["contexts"][label] = at
        for name, way in WAYS.items():
            setting.note(f"{shape.name}, context {context}, {name}")
            try:
                at["ways"][name] = _measure_way(way, pair, Placement(context), rows, setting, seconds)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this way's own
                at["ways"][name] = {"error": one_line(error)}
            free(setting.device)
    return facts


def _measure_way(
    way: Way, pair: RandomPair, place: Placement, rows: Rows, setting: Setting, seconds: float
) -> Facts:
    device = setting.device
    before = _reserved(device)
    bench = way.open(pair, place)

    def timed(call: Callable[[], object]) -> Facts:
        return time_ms(call, device, seconds=seconds).to_json()

    def verify(nodes: int) -> Callable[[], object]:
        return lambda: bench.verify(nodes)

    facts: Facts = {"title": way.title, "plain": timed(bench.plain)}
    facts["verify"] = {str(count): timed(verify(count - 1)) for count in rows.verified}
    if rows.is_whole:
        facts["draft"] = timed(bench.draft)
        facts["build"] = timed(lambda: bench.build(ROUND_NODES))
        bench.verify(ROUND_NODES)
        facts["settle"] = timed(lambda: bench.settle(ROUND_NODES))
        facts["round"] = wall_ms(lambda: bench.round(ROUND_NODES), device, seconds=seconds).to_json()
        facts["parts"] = _parts(facts)
    facts["memory_mib"] = (_reserved(device) - before) / 2**20
    return facts


def _parts(facts: Facts) -> dict[str, float]:
    """Where a round's milliseconds go."""
    parts = {name: float(facts[name]["ms"]) for name in ("draft", "build", "settle")}
    parts["verify"] = float(facts["verify"][str(ROUND_NODES + 1)]["ms"])
    # Below zero where parts overlap in a round.
    return {**parts, "host": float(facts["round"]["ms"]) - sum(parts.values())}


def _limits(pair: RandomPair, context: int, setting: Setting) -> Facts:
    """What reading the weights, the cache and the states once takes at the speed that was measured."""
    draft = pair.shape.draft
    cached = 2 * draft.num_kv_heads * draft.head_dim * pair.target.dtype.itemsize
    draft_cached = sum(cached * min(context, layer.window or context) for layer in draft.layers)
    verify = pair.plain_bytes + pair.kv_bytes_per_token * context + pair.state_bytes
    return {
        "plain": setting.limits.read_ms(verify),
        "verify": setting.limits.read_ms(verify),
        "draft": setting.limits.read_ms(pair.draft_bytes + draft_cached),
    }


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
