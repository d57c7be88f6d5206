"""How long launches take on a CUDA device once the host is out of the way: as a replayed graph.

It does not know what is launched, nor keep anything in or out of caches: that is up to what it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch

_WARM = 2  # replays before those that count: clocks rise, and the host gets ahead of the device
_COUNTED = 5


class GraphTimer:
    """Times a function of launches on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One for all measurements: the library keeps tens of MiB of workspace for every stream it has seen.
        self._stream = torch.cuda.Stream(device)
        # And one pool, which lives as long as a graph of it: else each would leave its own memory behind.
        self._pool = torch.cuda.graph_pool_handle()
        self._last: torch.cuda.CUDAGraph | None = None

    def __call__(self, run: Callable[[], None]) -> float:
        """Microseconds of one call of `run`, the median of a few; called twice, the second time captured."""
        with torch.cuda.device(self._device):
            stream = self._stream
            stream.wait_stream(torch.cuda.current_stream())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                run()
                stream.synchronize()
                # Not `torch.cuda.graph`: it collects garbage first, which takes longer than the measurement.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
                self._last = graph
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(_COUNTED + 1)]
                for _ in range(_WARM):
                    graph.replay()
                marks[0].record()
                for mark in marks[1:]:
                    graph.replay()
                    mark.record()
                stream.synchronize()
            spans = [begin.elapsed_time(end) for begin, end in pairwise(marks)]
            return 1000.0 * float(median(spans))
