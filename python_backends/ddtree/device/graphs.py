"""Work on tensors that stay where they are, captured once and played back as one launch.

On CUDA the work becomes a graph: its kernels are launched together, without Python in between, on the same
addresses each time. All graphs of one maker share a memory pool, so what one uses for itself another may use
after it; only what a graph gives out is kept. On a CPU the work is simply done again, so that everything
around graphs is tested there. This module knows nothing of what is captured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

_LOG = logging.getLogger(__name__)
_WARM_UPS = 2  # the first call compiles kernels and makes workspaces, neither of which can be captured
_MIB = 1 << 20

_Output = TypeVar("_Output")


class Captured(Generic[_Output]):
    """Work that can be done again; what it gives stays at the same place on a GPU."""

    def __init__(
        self,
        work: Callable[[], _Output],
        graph: torch.cuda.CUDAGraph | None = None,
        output: _Output | None = None,
    ) -> None:
        self._work = work
        self._graph = graph
        self._output = output

    def __call__(self) -> _Output:
        """Do the work; on a GPU this only enqueues it."""
        if self._graph is None:
            return self._work()
        self._graph.replay()
        assert self._output is not None, "a captured graph keeps its output"
        return self._output


class GraphMaker:
    """Captures work on one device and accounts for the memory that takes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None
        self.captured = 0  # graphs so far
        self.bytes = 0  # of device memory that they hold
        self.seconds = 0.0  # spent on capturing

    @torch.inference_mode()
    def capture(self, work: Callable[[], _Output]) -> Captured[_Output]:
        """Capture work that looks at no value on the host and allocates by shape alone.

        Work that cannot be captured is logged and run launch by launch instead: slower, and as right.
        """
        if not self._is_cuda:
            return Captured(work)
        started, before = time.perf_counter(), torch.cuda.memory_reserved(self._device)
        try:
            captured = self._capture(work)
        except RuntimeError as error:
            _LOG.warning("runs without a graph, more slowly: %s", " ".join(str(error).split())[:400])
            captured = Captured(work)
        else:
            self.captured += 1
        self.bytes += torch.cuda.memory_reserved(self._device) - before
        self.seconds += time.perf_counter() - started
        return captured

    def _capture(self, work: Callable[[], _Output]) -> Captured[_Output]:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may use the device meanwhile: their calls must not end the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = work()
        return Captured(work, graph, output)

    def report(self) -> str:
        """What the graphs took, in words."""
        return f"{self.captured} graphs in {self.seconds:.1f} s, {self.bytes / _MIB:.0f} MiB"
