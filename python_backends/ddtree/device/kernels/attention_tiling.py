"""How a launch of tree attention is cut into programs; the one place to turn when it is tuned.

Decided by shapes alone, never by lengths or trees, so that a captured graph keeps it. This module needs no
GPU and knows nothing of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product

_LEAST_DOT = 16  # smallest side of Triton's matrix product
_WIDE_DOT = 64  # query rows for which Hopper has an instruction of its own
_LONGEST_JOIN = 64  # splits that one program joins without running out of registers
_WARP_JOINS = 16 * 128  # numbers that one warp joins, 64 a thread, and waits for no other
_EASY_JOIN = 64 * 128  # and four; eight join more

# In units of what a program of 64 query rows takes for a block of keys (measured: 1.2 us, two side by side).
_WAVE = 1.0  # start and end of a wave of programs
_PARTS = 3.0  # writing what a wave's programs found and reading it again, were all rows real
_HARD_JOIN = 1.0  # what a join of eight warps takes longer

_LONG = 4096  # slots from which on teams are faster
_MOST_SPLITS = 16  # splits that are tried
TEAM = 2  # groups of a program, 64 query rows each
# In units of what a full program takes for a block of keys.
_LONE_GROUP = 0.7  # a program with rows for one group only
_TEAM_WAVE = 2.5  # start and end of a program
_TEAM_PARTS = 0.0003  # writing a row of a KV head's part and reading it again


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
class TeamTiling:
    """How a launch of `attention_hopper` is cut."""

    many: int  # splits of a tile
    last: int  # and of the last one, which has fewer rows
    keys: int = 128  # of a block, at most two pages
    stages: int = 2  # blocks on their way from memory at a time


@dataclass(frozen=True)
class _Card:
    """An H200, as far as it matters here."""

    processors: int = 132
    waves: int = 2  # programs that a multiprocessor should hold at a time
    shared_bytes: int = 224 * 1024  # of a multiprocessor, what its programs keep for themselves set aside


def padded(size: int) -> int:
    """The width that a matrix product takes for `size` columns."""
    return max(_LEAST_DOT, 1 << (size - 1).bit_length())


@cache  # every layer of every step asks
def tiling_for(shape: AttentionShape, wish: Tiling | None = None) -> Tiling:
    """What is launched for a shape; the fields of `wish` that are not 0 are kept."""
    wish, card = wish or Tiling(), _Card()
    exact = shape.item_bytes >= 4  # no tensor cores: operands stand in registers, so small blocks
    rows = wish.rows or (_LEAST_DOT if exact else _query_rows(shape.folded))
    width = padded(shape.head_dim)
    narrow = rows < _WIDE_DOT and not exact  # waits for memory, not for products: small blocks, few warps
    keys = wish.keys or (16 if exact else 32 if narrow or width > 128 else 64)
    warps = wish.warps or (8 if rows * width >= 128 * 128 else 2 if narrow and width <= 128 else 4)
    # The registers of eight warps leave no room for another eight.
    at_a_time = 1 if warps >= 8 else card.waves
    fits = card.shared_bytes // at_a_time - rows * width * shape.item_bytes
    stages = fits // (2 * keys * width * shape.item_bytes)
    splits = wish.splits or _splits(shape, replace(wish, rows=rows, keys=keys), at_a_time)
    return Tiling(
        rows=rows,
        keys=keys,
        splits=splits,
        warps=warps,
        stages=wish.stages or max(1, min(4 if narrow and width <= 128 else 3, stages)),
        join_warps=wish.join_warps or join_warps_for(splits, shape.head_dim),
    )


@cache
def teams_for(shape: AttentionShape) -> TeamTiling | None:
    """How `attention_hopper` is launched for a shape; None: few rows or few slots are faster without."""
    if shape.folded <= _WIDE_DOT or shape.slots < _LONG:
        return None
    cut, groups = TeamTiling(1, 1), -(-shape.folded // _WIDE_DOT)
    tiles = -(-groups // TEAM)
    blocks, work = shape.slots / cut.keys, shape.places * shape.kv_heads
    pace = _LONE_GROUP if groups % TEAM else 1.0
    most = min(_MOST_SPLITS, int(blocks))

    def cost(many: int, last: int) -> float:
        full, few = blocks / many + _TEAM_WAVE, pace * blocks / last + _TEAM_WAVE
        programs = work * (many * (tiles - 1) + last)
        longest = max(full, few) if tiles > 1 else few
        mean = work * (many * (tiles - 1) * full + last * few) / programs
        waves = -(-programs // _Card().processors)
        return waves * mean + longest - mean + _TEAM_PARTS * max(many, last) * shape.rows * work

    choices = product(range(1, most + 1) if tiles > 1 else (1,), range(1, most + 1))
    many, last = min(choices, key=lambda pair: cost(*pair))
    return replace(cut, many=many, last=last)


def join_warps_for(splits: int, head_dim: int) -> int:
    """Warps that join a row's splits."""
    numbers = _joined(splits) * padded(head_dim)
    return 1 if numbers <= _WARP_JOINS else 4 if numbers <= _EASY_JOIN else 8


def _query_rows(folded: int) -> int:
    """16 or 32 where all fit; else 64, of which two programs run side by side: 128 take as long for each."""
    return padded(folded) if folded <= _WIDE_DOT // 2 else _WIDE_DOT


def _joined(splits: int) -> int:
    """Splits of a row as a join has room for them."""
    return 1 << (splits - 1).bit_length()


def _splits(shape: AttentionShape, cut: Tiling, at_a_time: int) -> int:
    """Shares of the keys whose programs are done first.

    All programs that run at a time are a wave, and the last few of them take as long as a whole one. Lengths
    are not known here: shares are of what a place has room for, and need not come out even.
    """
    slots, blocks = at_a_time * _Card().processors, -(-shape.slots // cut.keys) + -(-shape.rows // cut.keys)
    work = shape.places * shape.kv_heads * -(-shape.folded // cut.rows)
    width, real = padded(shape.head_dim), min(shape.folded, cut.rows) / _WIDE_DOT

    def cost(splits: int) -> float:
        programs = work * splits
        join = _PARTS * real * programs / slots + _HARD_JOIN * (_joined(splits) * width > _EASY_JOIN)
        return -(-programs // slots) * (blocks / splits + _WAVE) + join

    return min(range(1, min(blocks, _LONGEST_JOIN) + 1), key=cost)
