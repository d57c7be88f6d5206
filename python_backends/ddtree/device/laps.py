"""Times the parts of a round on the device, without making the host wait for any of them."""

from __future__ import annotations

import time

import torch


class Laps:
    """Marks between parts of enqueued work; read when all of it is done."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._names: list[str] = []
        self._events: list[torch.cuda.Event] = []
        self._seconds: list[float] = []

    def start(self) -> None:
        """Begin anew."""
        self._names = []
        self._seconds = []
        self._mark()

    def lap(self, name: str) -> None:
        """Say that what was enqueued since the mark before belongs to `name`."""
        self._names.append(name)
        self._mark()

    def _mark(self) -> None:
        if not self._is_cuda:
            self._seconds.append(time.perf_counter())
            return
        if len(self._events) <= len(self._names):
            self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[len(self._names)].record()

    def ms(self) -> dict[str, float]:
        """Milliseconds by name, summed; only after the last mark has passed."""
        spent: dict[str, float] = {}
        for index, name in enumerate(self._names):
            if self._is_cuda:
                lap = self._events[index].elapsed_time(self._events[index + 1])
            else:
                lap = (self._seconds[index + 1] - self._seconds[index]) * 1e3
            spent[name] = spent.get(name, 0.0) + lap
        return spent
