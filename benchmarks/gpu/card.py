"""What a reader must know of the machine and its GPU; settings are only read, never changed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import datetime, timezone
from typing import Any

import torch

from benchmarks.machine import cores

_PACKAGES = ("torch", "triton", "transformers", "numpy", "dflash")
_QUERY = ("driver_version", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "memory.used")
_TIMEOUT_S = 10.0


def describe_card(device: torch.device) -> dict[str, Any]:
    """Card, versions, and the host beside it."""
    facts: dict[str, Any] = {
        "card": platform.processor() or platform.machine(),
        "host_cores": cores(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "load_average": round(os.getloadavg()[0], 2),
        "date": datetime.now(tz=timezone.utc).isoformat(timespec="seconds"),
    }
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        facts |= {
            "card": found.name,
            "capability": f"{found.major}.{found.minor}",
            "memory_gib": round(found.total_memory / 2**30, 1),
            "multiprocessors": found.multi_processor_count,
            "driver": (read_state(device) or {}).get("driver_version"),
        }
    return facts


def read_state(device: torch.device) -> dict[str, str] | None:
    """Clocks, power and temperature at this moment, with their units; None where nobody tells."""
    if device.type != "cuda":
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    index = device.index or 0
    if index >= len(lines):
        return None
    return dict(zip(_QUERY, (value.strip() for value in lines[index].split(",")), strict=False))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
