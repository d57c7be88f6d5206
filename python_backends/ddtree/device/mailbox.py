"""Named tensors that travel between host and device together: many small ones as one copy.

    host    │ lengths ┊ roots ┊ page_table …│   numpy views of one pinned buffer
                      one copy
    device  │ lengths ┊ roots ┊ page_table …│   tensors over one buffer, at addresses that never change

A copy of some bytes costs what a copy of a hundred kilobytes costs, so a step sends and fetches once. This
module knows names, shapes and types, not what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 16  # bytes: kernels may read a section with wide loads


@dataclass(frozen=True)
class Section:
    """One tensor of a mailbox."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int32

    @property
    def bytes(self) -> int:
        """Bytes it takes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Mailbox:
    """Sections on both sides; begins with zeros. One sender or fetcher at a time."""

    def __init__(self, sections: Mapping[str, Section], device: torch.device) -> None:
        size = sum(-(-section.bytes // _ALIGNMENT) * _ALIGNMENT for section in sections.values())
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None
        self.host: dict[str, NDArray[Any]] = {}
        self.device: dict[str, torch.Tensor] = {}
        start = 0
        for name, section in sections.items():
            span = slice(start, start + section.bytes)
            self.host[name] = self._host[span].view(section.dtype).view(section.shape).numpy()
            self.device[name] = self._device[span].view(section.dtype).view(section.shape)
            start += -(-section.bytes // _ALIGNMENT) * _ALIGNMENT

    def send(self) -> None:
        """Copy the host's side to the device, behind what is enqueued there.

        The host's side must not change before a later `fetch` of the same step came back: the copy may still
        be reading it.
        """
        self._device.copy_(self._host, non_blocking=True)

    def fetch(self) -> None:
        """Copy the device's side to the host, and wait until it is there."""
        self._host.copy_(self._device, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
            self._arrived.synchronize()
