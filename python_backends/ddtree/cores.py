"""How much of the host computing takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch

_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")  # of the container: microseconds, and out of how many


def takes_all_cores(device: torch.device) -> bool:
    """Whether computing on `device` leaves no core free; asked on the thread that computes."""
    return device.type == "cpu" and torch.get_num_threads() + 1 > _cores()


def _cores() -> float:
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no such file, or "max": no limit
        return cores
