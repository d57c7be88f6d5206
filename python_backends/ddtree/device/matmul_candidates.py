"""Which ways to cut a product are worth measuring, worked out from shapes and the size of the device.

A product of few rows takes as long as its weight takes to be read, when enough of it is under way: on an
H200 (132 multiprocessors, 4.8 TB/s, near 800 ns from request to answer) that is some 30 KiB for each of them,
and with what the turns of a loop lose, 40 and more. There are two roads to it: few programs with many blocks
in flight, and, by splitting K, more programs with fewer. Which one wins also depends on how evenly programs
cover the device, and on what the second kernel costs, so both are among the candidates.

This module knows neither kernels nor how they are timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

_MOST = 8  # candidates of a bucket: each costs a compile once and a measurement for each weight
_LEAST_BLOCK = 64  # columns: still one line of memory for each row of a weight
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LEAST_BLOCKS = 4  # of a part of K: a pipeline that is never full reads slowly


@dataclass(frozen=True)
class Config:
    """How a product is cut into programs.

    Raises:
        ValueError: a field breaks its rule.
    """

    kind: Literal["dot", "gemv"]  # with tensor cores, or without and for one row only
    block_n: int  # weight rows of a program
    block_k: int  # columns of a block
    split_k: int  # parts of K, each a program of its own; 1 for `gemv`
    warps: int
    stages: int  # blocks under way

    def __post_init__(self) -> None:
        if self.kind not in ("dot", "gemv"):
            raise ValueError(f"kind must be 'dot' or 'gemv', not {self.kind!r}")
        least = 16 if self.kind == "dot" else 1
        for name, low, high in (("block_n", least, 256), ("block_k", 16, 8192), ("warps", 1, 16)):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high or value & (value - 1):
                raise ValueError(f"{name} must be a power of two from {low} to {high}, not {value!r}")
        for name, high in (("split_k", 32 if self.kind == "dot" else 1), ("stages", 16)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= high:
                raise ValueError(
                    f"{name} of {self.kind!r} must be a whole number from 1 to {high}, not {value!r}"
                )


@dataclass(frozen=True)
class ProductKind:
    """What weights must have in common to share a choice."""

    weight_rows: int  # both halves when gated
    size: int  # K, columns of the weight
    dtype: torch.dtype
    gated: bool = False

    @property
    def name(self) -> str:
        """As it stands in the file of choices: `6144x4096 bfloat16`."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.weight_rows}x{self.size} {dtype}{' gated' if self.gated else ''}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight."""
        return self.weight_rows * self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Row counts that share a choice."""

    most: int
    timed: int  # rows that it is measured with: those that steps of a full tree have


# 65 rows are a tree of 64 nodes and its root. From 128 rows on the library was faster on an H200 for 49 of 51
# weights and row counts of Qwen3.6-27B's and SmolLM2-135M's sizes, and else slower by 8 % at most.
BUCKETS = (Bucket(1, 1), Bucket(16, 16), Bucket(32, 32), Bucket(64, 64), Bucket(80, 65))


def bucket_of(rows: int) -> Bucket | None:
    """The bucket of a row count; None when there are none, or so many that arithmetic bounds the product."""
    if rows < 1:
        return None
    return next((bucket for bucket in BUCKETS if rows <= bucket.most), None)


def candidates(kind: ProductKind, bucket: Bucket, processors: int) -> tuple[Config, ...]:
    """At most eight configs, the most promising first; `processors` are the device's multiprocessors."""
    found: list[Config] = []
    if kind.dtype not in _DTYPES:
        return ()
    proposed = list(_row_forms(kind)) if bucket.most == 1 else []
    if kind.dtype.itemsize == 2:  # float32 without rounded factors gains nothing from tensor cores
        proposed += _tile_forms(kind, bucket, processors)
    for config in proposed:
        if config not in found and config.block_k <= max(kind.size, _LEAST_BLOCK):
            found.append(config)
    return tuple(found[:_MOST])


def _row_forms(kind: ProductKind) -> Iterator[Config]:
    """One row. Loads go to registers with one stage, through shared memory with more."""
    wide = 1024 if kind.size >= 1024 else 512
    yield Config("gemv", 4, wide, 1, 4, 1)
    yield Config("gemv", 4, wide, 1, 4, 3)
    yield Config("gemv", 2, 2 * wide, 1, 4, 1)
    yield Config("gemv", 8, wide // 2, 1, 4, 3)


def _tile_forms(kind: ProductKind, bucket: Bucket, processors: int) -> Iterator[Config]:
    # Tiles of fewer than 64 rows go without Hopper's widest instruction: only for more programs.
    is_small = kind.weight_rows < 64 * processors
    deep = 128 if kind.size % 128 == 0 else 64

    def split(block_n: int, block_k: int, programs: int, warps: int, stages: int) -> Config:
        """So many parts that every processor gets up to `programs` programs at a time."""
        tiles = -(-kind.weight_rows // block_n)
        most = max(1, kind.size // (block_k * _LEAST_BLOCKS))
        # Rounded down: one program too many for the device at a time costs a whole turn more.
        parts = min(max(1, programs * processors // tiles), most, 16)
        return Config("dot", block_n, block_k, parts, warps, stages)

    if bucket.most <= 32:
        yield Config("dot", 64, deep, 1, 4, 6)  # 80 KiB in flight, a program for each processor
        yield split(64, deep, 2, 4, 4)
        yield split(64, 64, 3, 4, 6)
        yield Config("dot", 128, 64, 1, 4, 6)
        yield split(128, deep, 1, 8, 4)
        if is_small:
            yield Config("dot", 32, deep, 1, 4, 6)
            yield Config("dot", 16, deep, 1, 4, 6)
    else:
        yield Config("dot", 64, 64, 1, 4, 8)
        yield split(64, 64, 2, 4, 6)
        # Every program reads the step's rows as well, from L2: the taller its tile, the less that adds.
        yield Config("dot", 128, 64, 1, 8, 6)
        yield split(128, 64, 1, 8, 6)
        yield split(128, 64, 2, 8, 4)
        yield Config("dot", 256, 64, 1, 8, 4)
        yield split(256, 64, 1, 8, 4)
        if is_small:
            yield Config("dot", 32, 64, 1, 4, 5)
