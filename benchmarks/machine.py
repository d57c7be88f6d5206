"""What a reader must know of the machine to compare a result with another one."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "numpy", "nvidia-pytriton", "tritonclient")
_OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND")


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0))


def describe_machine() -> dict[str, Any]:
    """CPU, memory, versions, and how busy the machine was when the benchmark began."""
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        # Above a few tenths somebody else was computing: such a result says little.
        "load_average_at_start": round(os.getloadavg()[0], 2),
        # Decides how long threads that wait for one another burn a core: it can halve or double every number.
        "openmp": {name: os.environ[name] for name in _OPENMP if name in os.environ},
        "date": datetime.now(tz=timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or "unknown"
