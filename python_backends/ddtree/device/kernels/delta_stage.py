"""The tree form of Gated DeltaNet as kernels in the Triton language: what every node gives and would leave.

    prepare   per head and pair of blocks of rows: who adds how much to whom      all at once
              per head and block: rows through the state as it stands
              per head: the root, and how much of its update the others take
    stage     per head and slice of value columns: block after block              one after another
    single    instead of both, where every sequence has one row

The root, a sequence's first row, stands for itself before all blocks. Trees are a root and so many nodes that
blocks are full: with the root in the first one 65 rows would be five blocks, the last of a single row.

A block is solved by substitution, never by squaring: a tree that repeats tokens would make powers of its
system so large that digits are lost. All of the system that does not depend on the value columns is made
ready in `prepare`, in as many programs as there are pairs of blocks, the inverse of each block's own part
included; left for `stage` are a few small products per block, which have to wait for each other.

What `prepare` leaves lies in scratch memory as large for every sequence as for the widest. Where that would
be too much, some sequences run after the others, in the same memory.

Grids depend on shapes alone. This module knows tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ddtree.device.kernels.delta_blocks import pair, root, root_shares, through_state
from ddtree.device.kernels.product import product

_LEAST_DOT = 16  # smallest side of Triton's matrix product
_HELD = 2048  # values that one of the small programs around the root has at a time


@triton.jit
def _clear(outputs, start, node, count, room, column, heads, head, value_dim):
    """Write zeros to the padding behind a sequence's own rows: nobody reads them, but all must be finite."""
    is_padding = ((node >= count) & (node < room))[:, None] & (column < value_dim)[None, :]
    at = (((start + node) * heads + head) * value_dim)[:, None] + column[None, :]
    tl.store(outputs + at, 0.0, mask=is_padding)


@triton.jit
def _tiles_of(pairs, place, heads, head, blocks, block, BLOCK: tl.constexpr):
    """Where a block's tiles begin: two for each block up to it, and nothing for later ones."""
    before = (place * heads + head).to(tl.int64) * (blocks * (blocks + 1) // 2) + block * (block + 1) // 2
    return pairs + before * 2 * BLOCK * BLOCK


@triton.jit
def _shares_of(shares, place, heads, head, blocks, block, BLOCK: tl.constexpr):
    """Where a block's shares of the root begin."""
    return shares + ((place * heads + head).to(tl.int64) * blocks + block) * 2 * BLOCK


@triton.jit(do_not_specialize=["passed"])
def _prepare_kernel(
    queries, keys, values, betas, decays, sees, matrices, states, starts, counts, pairs, shares, updates,
    outputs, passed, heads, groups, key_dim, value_dim, widest, blocks, slices, root_slices,
    KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
    ROOT: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    place, head, task = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = passed + place
    start, count = tl.load(starts + sequence), tl.load(counts + sequence)
    key_row = heads // groups * key_dim
    keys, queries = keys + head // groups * key_dim, queries + head // groups * key_dim
    sees += sequence * widest * widest
    num_pairs, num_through = blocks * (blocks + 1) // 2, blocks * slices
    if task < num_pairs:
        # A triangle's lines folded to a rectangle: the longest with the shortest, and so on.
        width = blocks // 2 * 2 + 1
        line, other = task // width, task % width
        longer = blocks - line
        block = tl.where(other < longer, longer, width - longer) - 1
        other = tl.where(other < longer, other, other - longer)
        if 1 + block * BLOCK < count:
            tiles = _tiles_of(pairs, place, heads, head, blocks, block, BLOCK)
            pair(
                queries, keys, betas, decays, sees, tiles + other * 2 * BLOCK * BLOCK, start, count,
                1 + block * BLOCK, 1 + other * BLOCK, heads, head, key_row, key_dim, widest, KEY, BLOCK, PART,
            )  # fmt: skip
    elif task < num_pairs + num_through:
        block, slice_ = (task - num_pairs) // slices, (task - num_pairs) % slices
        if 1 + block * BLOCK < count:
            own = matrices + (tl.load(states + sequence) * heads + head) * key_dim * value_dim
            through_state(
                queries, keys, values, betas, decays, own, updates, outputs, start, count, 1 + block * BLOCK,
                slice_ * VALUE + tl.arange(0, VALUE), heads, head, key_row, key_dim, value_dim,
                KEY, VALUE, BLOCK, PART,
            )  # fmt: skip
    elif task < num_pairs + num_through + root_slices:
        if count > 0:
            own = matrices + (tl.load(states + sequence) * heads + head) * key_dim * value_dim
            column = (task - num_pairs - num_through) * ROOT + tl.arange(0, ROOT)
            root(
                queries, keys, values, betas, decays, own, updates, outputs, start, column, heads, head,
                key_row, key_dim, value_dim, KEY,
            )  # fmt: skip
    else:
        first = (task - num_pairs - num_through - root_slices) * SHARES
        if 1 + first // BLOCK * BLOCK < count:
            own_shares = _shares_of(shares, place, heads, head, blocks, first // BLOCK, BLOCK)
            root_shares(
                queries, keys, betas, decays, sees, own_shares + first % BLOCK * 2, start, count, 1 + first,
                heads, head, key_row, key_dim, widest, KEY, SHARES,
            )  # fmt: skip


@triton.jit(do_not_specialize=["passed"])
def _stage_kernel(
    starts, counts, pairs, shares, updates, outputs, passed, heads, value_dim, blocks, room,
    VALUE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place, head, slice_ = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, count = tl.load(starts + passed + place), tl.load(counts + passed + place)
    lane, column = tl.arange(0, BLOCK), slice_ * VALUE + tl.arange(0, VALUE)
    is_column = column < value_dim
    at_tile = lane[:, None] * BLOCK + lane[None, :]
    at_own = 2 * at_tile[:, :, None] + tl.arange(0, 2)[None, None, :]
    at_root = (start * heads + head) * value_dim + column
    root_update = tl.load(updates + at_root, mask=is_column & (count > 0), other=0.0)[None, :]
    for first in range(1, count, BLOCK):
        row, block = start + first + lane, first // BLOCK
        at_value = ((row * heads + head) * value_dim)[:, None] + column[None, :]
        mask = (first + lane < count)[:, None] & is_column[None, :]
        alone = tl.load(updates + at_value, mask=mask, other=0.0)
        asked = tl.load(outputs + at_value, mask=mask, other=0.0)
        at_share = _shares_of(shares, place, heads, head, blocks, block, BLOCK) + 2 * lane
        share, root_asked = tl.load(at_share), tl.load(at_share + 1)
        line = _tiles_of(pairs, place, heads, head, blocks, block, BLOCK)
        own = tl.load(line + block * 2 * BLOCK * BLOCK + at_own)
        update = tl.zeros((BLOCK, VALUE), tl.float32)
        output = tl.zeros((BLOCK, VALUE), tl.float32)
        for before in range(0, block * BLOCK, BLOCK):
            tile = line + before // BLOCK * 2 * BLOCK * BLOCK + at_tile
            at_other = (((start + 1 + before + lane) * heads + head) * value_dim)[:, None] + column[None, :]
            other_update = tl.load(updates + at_other, mask=is_column[None, :], other=0.0)
            update = product(tl.load(tile), other_update, update)
            output = product(tl.load(tile + BLOCK * BLOCK), other_update, output)
        inverse, answers = tl.split(own)
        alone += share[:, None] * root_update
        asked += root_asked[:, None] * root_update
        update = product(inverse, alone + update, tl.zeros((BLOCK, VALUE), tl.float32))
        output = asked + product(answers, update, output)
        tl.store(updates + at_value, update, mask=mask)
        tl.store(outputs + at_value, output, mask=mask)
        tl.debug_barrier()  # the next block reads these updates, through other threads
    for first in range(count // BLOCK * BLOCK, room, BLOCK):
        _clear(outputs, start, first + lane, count, room, column, heads, head, value_dim)


@triton.jit
def _single_kernel(
    queries, keys, values, betas, decays, matrices, states, starts, counts, updates, outputs,
    heads, groups, key_dim, value_dim, room, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    sequence, head, slice_ = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, count = tl.load(starts + sequence), tl.load(counts + sequence)
    column, key_row = slice_ * VALUE + tl.arange(0, VALUE), heads // groups * key_dim
    if count > 0:
        own = matrices + (tl.load(states + sequence) * heads + head) * key_dim * value_dim
        first_key = head // groups * key_dim
        root(
            queries + first_key, keys + first_key, values, betas, decays, own, updates, outputs, row, column,
            heads, head, key_row, key_dim, value_dim, KEY,
        )  # fmt: skip
    else:
        at = (row * heads + head) * value_dim + column
        tl.store(outputs + at, 0.0, mask=(column < value_dim) & (room > 0))


@dataclass(frozen=True)
class StageKernels:
    """Launches them. Tensors are contiguous and on one device; shapes are those of `step`."""

    block: int = 16  # rows whose system is solved at a time
    value_slice: int = 32  # value columns of a program
    key_part: int = 16  # key columns that a product takes at a time
    prepare_warps: int = 1  # more would each take the same rows apart
    stage_warps: int = 2
    scratch_bytes: int = 64 << 20  # that sequences may take at a time; one alone takes what it takes

    def stage(
        self,
        queries: torch.Tensor,  # [n, Hk, dk] float32
        keys: torch.Tensor,  # [n, Hk, dk] float32
        values: torch.Tensor,  # [n, Hv, dv]
        betas: torch.Tensor,  # [n, Hv]
        decays: torch.Tensor,  # [n, Hv] float32, summed along the path
        sees: torch.Tensor,  # [S, N, N] bool
        matrices: torch.Tensor,  # [states, Hv, dk, dv] float32, of one layer
        states: torch.Tensor,  # [S] int64
        starts: torch.Tensor,  # [S] int64
        counts: torch.Tensor,  # [S] int64
        updates: torch.Tensor,  # [n or more, Hv, dv] float32, written
        room: int = 0,  # rows that every sequence has, padding included; 0: they have no padding
    ) -> torch.Tensor:
        """Work out all nodes of all trees, `[n, Hv, dv]` float32, and write their updates.

        Padding gets zeros. While it runs it takes `at_a_time` sequences' memory, each as much as the widest:
        two float32 for every head and pair of rows, later rows of other blocks excepted.
        """
        heads, value_dim = values.shape[1:]
        groups, key_dim, widest = heads // keys.shape[1], keys.shape[2], sees.shape[1]
        outputs = torch.empty(values.shape, dtype=torch.float32, device=values.device)
        key_width, slices = width_of(key_dim), triton.cdiv(value_dim, self.value_slice)
        if widest == 1:
            _single_kernel[(len(states), heads, slices)](
                queries, keys, values, betas, decays, matrices, states, starts, counts, updates, outputs,
                heads, groups, key_dim, value_dim, room, KEY=key_width, VALUE=self.value_slice,
            )  # fmt: skip
            return outputs
        blocks, most = triton.cdiv(widest - 1, self.block), self.at_a_time(len(states), heads, widest)
        root_slice = min(max(1, _HELD // key_width), triton.next_power_of_2(value_dim))
        share_rows = min(max(1, _HELD // 2 // key_width), self.block)
        num_pairs, root_slices = blocks * (blocks + 1) // 2, triton.cdiv(value_dim, root_slice)
        tasks = num_pairs + blocks * slices + root_slices + blocks * self.block // share_rows
        pairs = outputs.new_empty((most, heads, num_pairs, 2, self.block, self.block))
        shares = outputs.new_empty((most, heads, blocks, self.block, 2))
        # Sequences are counted on by a number, not by slices: their addresses would compile kernels again.
        for passed in range(0, len(states), most):
            count = min(most, len(states) - passed)
            _prepare_kernel[(count, heads, tasks)](
                queries, keys, values, betas, decays, sees.view(torch.uint8), matrices, states, starts,
                counts, pairs, shares, updates, outputs, passed, heads, groups, key_dim, value_dim, widest,
                blocks, slices, root_slices, KEY=key_width, VALUE=self.value_slice, BLOCK=self.block,
                PART=min(self.key_part, key_width), ROOT=root_slice, SHARES=share_rows,
                num_warps=self.prepare_warps,
            )  # fmt: skip
            _stage_kernel[(count, heads, slices)](
                starts, counts, pairs, shares, updates, outputs, passed, heads, value_dim, blocks, room,
                VALUE=self.value_slice, BLOCK=self.block, num_warps=self.stage_warps,
            )  # fmt: skip
        return outputs

    def at_a_time(self, sequences: int, heads: int, widest: int) -> int:
        """How many sequences run side by side, so that they stay within `scratch_bytes`; 1 at least."""
        blocks = max(1, triton.cdiv(widest - 1, self.block))
        each = 4 * heads * blocks * ((blocks + 1) * self.block**2 + 2 * self.block)
        launches = triton.cdiv(sequences, max(1, self.scratch_bytes // each))
        return int(triton.cdiv(sequences, launches))


def width_of(size: int) -> int:
    """A side of a matrix product that holds `size`."""
    return max(_LEAST_DOT, int(triton.next_power_of_2(size)))
