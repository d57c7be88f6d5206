"""What every part of the benchmark is told."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.limits import MemoryLimits

Facts = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Where and how much is measured."""

    device: torch.device
    dtype: torch.dtype
    is_tiny: bool  # small sizes, to see that the benchmark itself works
    seconds: float  # about how long one section may measure; loading comes on top
    limits: MemoryLimits
    note: Callable[[str], None]  # says what is measured now
    prompts: Path
    keep: Callable[[Facts], None] = lambda _: None  # writes what a section has so far to the result file
    demo_target: Path | None = None  # None: the demo's, brought if need be
    demo_draft: Path | None = None
    dflash: Path | None = None  # folder with the package; None: brought if need be
    wants_triton: bool = False
    ways: tuple[str, ...] = ()  # of running a round; none: all


class Skipped(Exception):
    """A section cannot run here; the text says why and what it needs."""


def free(device: torch.device) -> None:
    """Give memory of what was dropped back to the device, so that the next thing finds it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def one_line(error: BaseException) -> str:
    """An exception for a result file."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def found(facts: Mapping[str, Any] | None, *path: str) -> Any:
    """What stands at the end of a path of keys; None where a part is missing."""
    value: Any = facts
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
