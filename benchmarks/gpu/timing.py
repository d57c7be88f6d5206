"""Times a call that may run on a GPU: by the GPU's own clock, or by the host's with a wait at the end.

Many calls are started one after another before any is waited for, so what a GPU does is timed without the
host's pauses between launches, as long as the call itself does not look at the result. Knows no model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

_WARM_UPS = 3
_LEAST_RUNS, _MOST_RUNS = 5, 200


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call over several runs."""

    ms: float  # median
    p10: float
    p90: float
    runs: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Median and deciles of milliseconds, at least one."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(
            statistics.median(ordered), ordered[round(last * 0.1)], ordered[round(last * 0.9)], len(ordered)
        )

    def divided(self, by: int) -> Timing:
        """The same per part, where a run is `by` equal parts."""
        return Timing(self.ms / by, self.p10 / by, self.p90 / by, self.runs)

    def to_json(self) -> dict[str, Any]:
        """For the result file."""
        return asdict(self)


def synchronise(device: torch.device) -> None:
    """Wait until everything that was started on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_ms(call: Callable[[], object], device: torch.device, *, seconds: float = 1.0) -> Timing:
    """Milliseconds of a call by the GPU's events; by the host's clock on a CPU.

    A call that looks at its own result on the host is timed with its launches, as it is used.

    Args:
        call: what is timed; must be replayable.
        device: where it runs.
        seconds: about how long all runs may take.
    """
    if device.type != "cuda":
        return wall_ms(call, device, seconds=seconds)
    runs = _runs(call, device, seconds)
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)
    ]
    for start, stop in marks:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize(device)
    return Timing.of([float(start.elapsed_time(stop)) for start, stop in marks])


def wall_ms(call: Callable[[], object], device: torch.device, *, seconds: float = 1.0) -> Timing:
    """Milliseconds from before a call until the device has done all of it, the host's work included."""
    return Timing.of([_once(call, device) for _ in range(_runs(call, device, seconds))])


def time_parts(
    call: Callable[[], Mapping[str, float]], device: torch.device, *, seconds: float = 1.0
) -> tuple[Timing, dict[str, Timing]]:
    """A call as a whole by the host's clock, and its parts by what it says of them itself.

    Args:
        call: gives milliseconds by part; the same parts each time.
        device: where it runs.
        seconds: about how long all runs may take.
    """
    whole: list[float] = []
    parts: dict[str, list[float]] = {}
    for _ in range(_runs(call, device, seconds)):
        started = time.perf_counter()
        said = call()
        synchronise(device)
        whole.append((time.perf_counter() - started) * 1e3)
        for name, ms in said.items():
            parts.setdefault(name, []).append(ms)
    return Timing.of(whole), {name: Timing.of(samples) for name, samples in parts.items()}


def captured(call: Callable[[], object], device: torch.device, times: int) -> Callable[[], object]:
    """`times` calls as one graph to be replayed; on a CPU a loop.

    Raises:
        RuntimeError: the call cannot be captured: it waits for the device or uses what a graph must not.
    """
    if device.type != "cuda":

        def repeat() -> None:
            for _ in range(times):
                call()

        return repeat
    call()  # compiles and allocates, which a capture must not
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph.replay


def _runs(call: Callable[[], object], device: torch.device, seconds: float) -> int:
    """Warm up, and say how many runs fit."""
    for _ in range(_WARM_UPS - 1):
        call()
    synchronise(device)
    return max(_LEAST_RUNS, min(_MOST_RUNS, int(seconds * 1e3 / max(1e-3, _once(call, device)))))


def _once(call: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    call()
    synchronise(device)
    return (time.perf_counter() - started) * 1e3
