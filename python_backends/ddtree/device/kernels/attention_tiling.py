"""How a launch of tree attention is cut into programs; the one place to turn when it is tuned.

Decided by shapes alone, never by lengths or trees, so that a captured graph keeps it. This module needs no
GPU and knows nothing of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

_LEAST_DOT = 16  # smallest side of Triton's matrix product
_LONGEST_JOIN = 64  # splits that one program joins without running out of registers


@dataclass(frozen=True)
class AttentionShape:
    """All that the choice may depend on."""

    places: int
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    slots: int  # that a place's page table has room for
    item_bytes: int

    @property
    def folded(self) -> int:
        """Query rows of one KV head in one place: rows times the query heads that share it."""
        return self.rows * (self.heads // self.kv_heads)


@dataclass(frozen=True)
class Tiling:
    """How a launch is cut; 0 leaves a choice to `tiling_for`."""

    rows: int = 0  # query rows of a program, a power of two >= 16
    keys: int = 0  # keys of a block, a power of two in 16..128
    splits: int = 0  # shares of the keys, 1..64
    warps: int = 0
    stages: int = 0  # blocks on their way from memory at a time
    join_warps: int = 0


@dataclass(frozen=True)
class _Card:
    """An H200, as far as it matters here."""

    processors: int = 132
    waves: int = 2  # programs that a multiprocessor should hold at a time
    shared_bytes: int = 224 * 1024  # of a multiprocessor, what its programs keep for themselves set aside


def padded(size: int) -> int:
    """The width that a matrix product takes for `size` columns."""
    return max(_LEAST_DOT, 1 << (size - 1).bit_length())


def tiling_for(shape: AttentionShape, wish: Tiling | None = None) -> Tiling:
    """What is launched for a shape; the fields of `wish` that are not 0 are kept."""
    wish, card = wish or Tiling(), _Card()
    exact = shape.item_bytes >= 4  # no tensor cores: operands stand in registers, so small blocks
    rows = wish.rows or (_LEAST_DOT if exact else _query_rows(shape.folded))
    width = padded(shape.head_dim)
    keys = wish.keys or (16 if exact else 64 if width <= 128 else 32)
    work = shape.places * shape.kv_heads * -(-shape.folded // rows)
    blocks = -(-shape.slots // keys) + -(-shape.rows // keys)
    warps = 8 if rows * width >= 128 * 128 else 4
    # The registers of eight warps leave no room for another eight.
    at_a_time = 1 if warps == 8 else card.waves
    # Rounded down: the last few programs of a wave too many would take as long as a whole wave.
    splits = max(1, min(at_a_time * card.processors // work, blocks, _LONGEST_JOIN))
    fits = card.shared_bytes // at_a_time - rows * width * shape.item_bytes
    stages = fits // (2 * keys * width * shape.item_bytes)
    splits = wish.splits or splits
    return Tiling(
        rows=rows,
        keys=keys,
        splits=splits,
        warps=wish.warps or warps,
        stages=wish.stages or max(1, min(3, stages)),
        join_warps=wish.join_warps or (8 if splits * width > 64 * 128 else 4),
    )


def _query_rows(folded: int) -> int:
    """16 or 32 where all fit; else 64 or 128, whichever pads less, and the larger where both pad alike."""
    if folded <= 32:
        return padded(folded)
    return min((128, 64), key=lambda rows: -(-folded // rows) * rows)
