"""The parts of a round at one shape, and the round as a whole, by every way there is.

`verify` is timed by the device's events, `round` by the host's clock from its call until the tokens are here;
in between a way says itself what its parts took on the device. What a round takes beyond those is the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.gpu.placement import Placement
from benchmarks.gpu.seam import WAYS, Way
from benchmarks.gpu.setting import Facts, Setting, free, one_line
from benchmarks.gpu.shapes import PairShape, RandomPair, make_pair
from benchmarks.gpu.timing import time_ms, time_parts

VERIFIED_ROWS = (17, 33, 65, 129, 257)
ROUND_NODES = 64
SHORT, LONG = "1k", "16k"
_MOST_SECONDS = 1.5  # for one number


@dataclass(frozen=True)
class Rows:
    """What is measured of a shape."""

    contexts: Mapping[str, int] = field(default_factory=lambda: {SHORT: 1024, LONG: 16384})
    verified: Sequence[int] = VERIFIED_ROWS
    has_rounds: bool = True

    @property
    def count(self) -> int:
        """Measurements of one context and way."""
        return 1 + len(self.verified) + self.has_rounds


def measure_stages(shape: PairShape, rows: Rows, setting: Setting) -> Facts:
    """Measure every row of a shape; a way that fails says why and does not end the others."""
    setting.note(f"{shape.name}: making the weights")
    pair = make_pair(shape, setting.device, setting.dtype)
    ways = {
        name: way
        for name, way in WAYS.items()
        if (setting.device.type == "cuda" or not way.needs_gpu) and name in (setting.ways or WAYS)
    }
    seconds = min(_MOST_SECONDS, setting.seconds / (len(rows.contexts) * len(ways) * rows.count))
    contexts: dict[str, Facts] = {
        label: {"tokens": context, "limit_ms": _limits(pair, context, setting), "ways": {}}
        for label, context in rows.contexts.items()
    }
    facts: Facts = {
        "shape": shape.name,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "plain_bytes": pair.plain_bytes,
        "draft_bytes": pair.draft_bytes,
        "state_bytes_per_sequence": pair.state_bytes,
        "contexts": contexts,
    }
    tokens: dict[str, list[int]] = {}
    for name, way in ways.items():
        refused = _prepared(way, pair)
        for label, context in rows.contexts.items():
            setting.note(f"{shape.name}, {name}, context {context}")
            measured = refused or _tried(way, pair, Placement(context, most_nodes=max(rows.verified) - 1),
                                         rows, setting, seconds)  # fmt: skip
            contexts[label]["ways"][name] = measured
            _compare(measured, tokens, label)
            setting.keep(facts)  # a section takes minutes, most of them compiling
            free(setting.device)
    return facts


def _compare(measured: Facts, first: dict[str, list[int]], label: str) -> None:
    """Say which share of a tree's rows has the token that the first way chose there.

    In bfloat16 some differ: random weights make many near-ties. With a wrong kernel most do.
    """
    tokens = measured.pop("tokens", None)
    if tokens is not None:
        known = first.setdefault(label, tokens)
        same = sum(one == other for one, other in zip(tokens, known, strict=True))
        measured["same_tokens"] = same / len(tokens)


def _prepared(way: Way, pair: RandomPair) -> Facts | None:
    """Prepare a way; gives what to say of it if that fails."""
    try:
        if way.prepare is not None:
            way.prepare(pair)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this way's own
        return {"error": one_line(error)}
    return None


def _tried(
    way: Way, pair: RandomPair, place: Placement, rows: Rows, setting: Setting, seconds: float
) -> Facts:
    try:
        return measure_way(way, pair, place, rows, setting.device, seconds)
    except Exception as error:  # noqa: BLE001 - the same
        return {"error": one_line(error)}


def measure_way(
    way: Way, pair: RandomPair, place: Placement, rows: Rows, device: torch.device, seconds: float
) -> Facts:
    """Every row of one way at one place, about `seconds` each."""
    before = _reserved(device)
    bench = way.open(pair, place)
    opened = _reserved(device)

    def verify(nodes: int) -> Callable[[], object]:
        return lambda: bench.verify(nodes)

    tokens = bench.verify(max(rows.verified) - 1).flatten().tolist()
    whole, parts = time_parts(bench.plain, device, seconds=seconds)
    facts: Facts = {
        "title": way.title,
        "tokens": tokens,
        "memory_mib": (opened - before) / 2**20,  # of cache and graphs
        "plain": parts["verify"].to_json(),
        "plain_with_host": whole.to_json(),
        "verify": {
            str(count): time_ms(verify(count - 1), device, seconds=seconds).to_json()
            for count in rows.verified
        },
    }
    if rows.has_rounds:
        whole, parts = time_parts(lambda: bench.round(ROUND_NODES), device, seconds=seconds)
        facts["round"] = whole.to_json()
        facts["draft"], facts["build"] = parts["draft"].to_json(), parts["build"].to_json()
        verified = float(facts["verify"][str(ROUND_NODES + 1)]["ms"])
        facts["parts"] = {
            "draft": parts["draft"].ms,
            "build": parts["build"].ms,
            "verify": verified,
            "settle": parts["verify"].ms - verified,
            # Below zero where parts overlap.
            "host": whole.ms - sum(part.ms for part in parts.values()),
        }
    return facts


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
