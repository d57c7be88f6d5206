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
from contextlib import suppress
from typing import Generic, TypeVar, cast

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
        return cast(_Output, self._output)  # None where that is what the work gives

    @property
    def is_still(self) -> bool:
        """Whether what it gives stands where it stood before, whenever it is done again."""
        return self._graph is not None


class GraphMaker:
    """Captures work on one device and accounts for the memory that takes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None
        # One for all: memory and the libraries' workspaces belong to the stream that they were made for.
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._broken: list[torch.cuda.CUDAGraph] = []  # the allocator may look at one as long as it lives
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
        assert self._stream is not None, "only a GPU captures"
        # Kernels go to the current device; a capture that fails leaves its stream behind as the current one.
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    work()
                return self._record(work, self._stream)

    def _record(self, work: Callable[[], _Output], stream: torch.cuda.Stream) -> Captured[_Output]:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the device meanwhile: their calls must not end the capture.
            with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
                output = work()
        except BaseException:
            self._leave(graph)
            raise
        return Captured(work, graph, output)

    def _leave(self, graph: torch.cuda.CUDAGraph) -> None:
        """After a capture that failed: PyTorch would keep its pool for it, and refuse it to others."""
        assert self._pool is not None, "only a GPU captures"
        self._broken.append(graph)
        with suppress(RuntimeError):  # it was ended after all
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)  # noqa: SLF001
        self._pool = torch.cuda.graph_pool_handle()

    def report(self) -> str:
        """What the graphs took, in words."""
        return f"{self.captured} graphs in {self.seconds:.1f} s, {self.bytes / _MIB:.0f} MiB"
