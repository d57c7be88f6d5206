"""How fast this device's memory is, measured in the same run as what is compared with it.

Reading and copying in a few ways, each as a captured graph, so that launches do not count; the fastest way
of each is the limit. A step that reads so many bytes cannot be faster than they take at that speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.gpu.timing import Timing, captured, time_ms

_BYTES = {"cuda": 4 << 30, "cpu": 1 << 20}  # several times the GPU's cache
_TIMES = 4  # calls of one graph


@dataclass(frozen=True)
class MemoryLimits:
    """Gigabytes (10^9 bytes) a second."""

    read_gb_s: float
    copy_gb_s: float  # bytes read plus bytes written
    buffer_bytes: int
    ways: dict[str, dict[str, Any]]  # each way's speed and the spread of its times

    def read_ms(self, count: int) -> float:
        """Milliseconds to read so many bytes once."""
        return count / self.read_gb_s / 1e6

    def to_json(self) -> dict[str, Any]:
        """For the result file."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> MemoryLimits:
        """Read what `to_json` gave."""
        return cls(**{name: value[name] for name in cls.__dataclass_fields__})


def measure_limits(device: torch.device, *, seconds: float) -> MemoryLimits:
    """Read and copy a large buffer in several ways."""
    size = _BYTES["cuda" if device.type == "cuda" else "cpu"]
    source = torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    ways: dict[str, Callable[[], object]] = {
        "read: torch.sum": lambda: torch.sum(source.view(torch.float32).view(-1, 4096), dim=-1),
        "read: torch.amax": lambda: torch.amax(source.view(-1, 4096), dim=-1),
        "copy: torch.copy_": lambda: target.copy_(source),
    }
    if device.type == "cuda":
        ways["read: kernel"] = _kernel(source)
    found: dict[str, dict[str, Any]] = {}
    for name, call in ways.items():
        replay = captured(call, device, _TIMES)
        timing: Timing = time_ms(replay, device, seconds=seconds / len(ways)).divided(_TIMES)
        moved = size * (2 if name.startswith("copy") else 1)
        found[name] = {"gb_s": moved / timing.ms / 1e6, **timing.to_json()}

    def best(kind: str) -> float:
        return max(float(facts["gb_s"]) for name, facts in found.items() if name.startswith(kind))

    return MemoryLimits(best("read"), best("copy"), size, found)


def _kernel(source: torch.Tensor) -> Callable[[], object]:
    # Triton comes with PyTorch's builds for GPUs only.
    from benchmarks.gpu.read_kernel import programs_for, sum_all

    sums = torch.zeros(programs_for(source.device), dtype=torch.int32, device=source.device)
    return lambda: sum_all(source, sums)
