"""How many of the host's cores computing takes."""

from __future__ import annotations

import os

import torch


def takes_all_cores(device: torch.device) -> bool:
    """Whether computing on `device` leaves no core free; asked on the thread that computes."""
    return device.type == "cpu" and torch.get_num_threads() >= len(os.sched_getaffinity(0))
