"""The tree form of Gated DeltaNet as kernels in the Triton language: what every node gives and would leave.

    prepare   per head and pair of blocks of rows: who adds how much to whom      all at once
              per head and block: rows through the state as it stands
    stage     per head and slice of value columns: block after block              one after another
    single    instead of both, where every sequence has one row

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

from ddtree.device.kernels.product import product

_LEAST_DOT = 16  # smallest side of Triton's matrix product


@triton.jit
def _rows(source, row, stride, lane, key_dim, is_row):
    """Some key columns of rows, `[rows, PART]`."""
    mask = is_row[:, None] & (lane < key_dim)[None, :]
    return tl.load(source + (row * stride)[:, None] + lane[None, :], mask=mask, other=0.0)


@triton.jit
def _solved(system, update, BLOCK: tl.constexpr):
    """Column by column: once a row is final, its share is taken from every row below it."""
    lane = tl.arange(0, BLOCK)
    for solved in range(BLOCK - 1):
        final = tl.sum(tl.where((lane == solved)[:, None], update, 0.0), axis=0)
        share = tl.sum(tl.where((lane == solved)[None, :], system, 0.0), axis=1)
        update -= tl.where((lane > solved)[:, None], share[:, None] * final[None, :], 0.0)
    return update


@triton.jit
def _clear(outputs, start, node, count, room, column, heads, head, value_dim):
    """Write zeros to the padding behind a sequence's own rows: nobody reads them, but all must be finite."""
    is_padding = ((node >= count) & (node < room))[:, None] & (column < value_dim)[None, :]
    at = (((start + node) * heads + head) * value_dim)[:, None] + column[None, :]
    tl.store(outputs + at, 0.0, mask=is_padding)


@triton.jit
def _pair(
    queries, keys, betas, decays, sees, tile, start, count, first, other_first,
    heads, head, key_row, key_dim, widest,
    KEY: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """What rows of one block take from those of another, or of their own: two tiles `[BLOCK, BLOCK]`."""
    lane = tl.arange(0, BLOCK)
    node, other = first + lane, other_first + lane
    is_node, is_other = node < count, other < count
    row, other_row = start + node, start + other
    alike = tl.zeros((BLOCK, BLOCK), tl.float32)
    asked = tl.zeros((BLOCK, BLOCK), tl.float32)
    for part in tl.range(0, KEY, PART):
        in_key = part + tl.arange(0, PART)
        other_key = tl.trans(_rows(keys, other_row, key_row, in_key, key_dim, is_other))
        alike = product(_rows(keys, row, key_row, in_key, key_dim, is_node), other_key, alike)
        asked = product(_rows(queries, row, key_row, in_key, key_dim, is_node), other_key, asked)
    beta = tl.load(betas + row * heads + head, mask=is_node, other=0.0).to(tl.float32)
    decay = tl.load(decays + row * heads + head, mask=is_node, other=0.0)
    other_decay = tl.load(decays + other_row * heads + head, mask=is_other, other=0.0)
    both = is_node[:, None] & is_other[None, :]
    is_seen = tl.load(sees + node[:, None] * widest + other[None, :], mask=both, other=0)
    pair = tl.exp(tl.where(is_seen != 0, decay[:, None] - other_decay[None, :], float("-inf")))
    taken = beta[:, None] * pair * alike
    at = lane[:, None] * BLOCK + lane[None, :]
    if first == other_first:
        # Side by side: `stage` reads both at once.
        tl.store(tile + 2 * at, _solved(taken, tl.where(lane[:, None] == lane[None, :], 1.0, 0.0), BLOCK))
        tl.store(tile + 2 * at + 1, pair * asked)
    else:
        tl.store(tile + at, -taken)
        tl.store(tile + BLOCK * BLOCK + at, pair * asked)


@triton.jit
def _through_state(
    queries, keys, values, betas, decays, own, updates, outputs, start, count, first, column,
    heads, head, key_row, key_dim, value_dim,
    KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A block's updates and outputs as if it stood alone behind the state, `[BLOCK, VALUE]`."""
    node = first + tl.arange(0, BLOCK)
    is_node, row, is_column = node < count, start + node, column < value_dim
    at_value = ((row * heads + head) * value_dim)[:, None] + column[None, :]
    value_mask = is_node[:, None] & is_column[None, :]
    update = tl.zeros((BLOCK, VALUE), tl.float32)
    output = tl.zeros((BLOCK, VALUE), tl.float32)
    # A part of the key columns at a time: whole rows and matrices are more than registers hold.
    for part in tl.range(0, KEY, PART):
        in_key = part + tl.arange(0, PART)
        matrix_mask = (in_key < key_dim)[:, None] & is_column[None, :]
        at = in_key[:, None] * value_dim + column[None, :]
        matrix = tl.load(own + at, mask=matrix_mask, other=0.0)
        update = product(_rows(keys, row, key_row, in_key, key_dim, is_node), matrix, update)
        output = product(_rows(queries, row, key_row, in_key, key_dim, is_node), matrix, output)
    value = tl.load(values + at_value, mask=value_mask, other=0.0).to(tl.float32)
    beta = tl.load(betas + row * heads + head, mask=is_node, other=0.0).to(tl.float32)
    faded = tl.exp(tl.load(decays + row * heads + head, mask=is_node, other=0.0))[:, None]
    tl.store(updates + at_value, beta[:, None] * (value - faded * update), mask=value_mask)
    tl.store(outputs + at_value, faded * output, mask=value_mask)


@triton.jit
def _tiles_of(pairs, place, heads, head, blocks, block, BLOCK: tl.constexpr):
    """Where a block's tiles begin: two for each block up to it, and nothing for later ones."""
    before = (place * heads + head).to(tl.int64) * (blocks * (blocks + 1) // 2) + block * (block + 1) // 2
    return pairs + before * 2 * BLOCK * BLOCK


@triton.jit(do_not_specialize=["passed"])
def _prepare_kernel(
    queries, keys, values, betas, decays, sees, matrices, states, starts, counts, pairs, updates, outputs,
    passed, heads, groups, key_dim, value_dim, widest, blocks, slices,
    KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    place, head, task = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = passed + place
    start, count = tl.load(starts + sequence), tl.load(counts + sequence)
    key_row = heads // groups * key_dim
    keys, queries = keys + head // groups * key_dim, queries + head // groups * key_dim
    tasks = blocks * (blocks + 1) // 2
    if task < tasks:
        # A triangle's lines folded to a rectangle: the longest with the shortest, and so on.
        width = blocks // 2 * 2 + 1
        line, other = task // width, task % width
        longer = blocks - line
        block = tl.where(other < longer, longer, width - longer) - 1
        other = tl.where(other < longer, other, other - longer)
        if block * BLOCK < count:
            tiles = _tiles_of(pairs, place, heads, head, blocks, block, BLOCK)
            _pair(
                queries, keys, betas, decays, sees + sequence * widest * widest,
                tiles + other * 2 * BLOCK * BLOCK, start, count, block * BLOCK, other * BLOCK, heads, head,
                key_row, key_dim, widest, KEY, BLOCK, PART,
            )  # fmt: skip
    else:
        block, slice_ = (task - tasks) // slices, (task - tasks) % slices
        if block * BLOCK < count:
            own = matrices + (tl.load(states + sequence) * heads + head) * key_dim * value_dim
            _through_state(
                queries, keys, values, betas, decays, own, updates, outputs, start, count, block * BLOCK,
                slice_ * VALUE + tl.arange(0, VALUE), heads, head, key_row, key_dim, value_dim,
                KEY, VALUE, BLOCK, PART,
            )  # fmt: skip


@triton.jit(do_not_specialize=["passed"])
def _stage_kernel(
    starts, counts, pairs, updates, outputs, passed, heads, value_dim, blocks, room,
    VALUE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place, head, slice_ = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, count = tl.load(starts + passed + place), tl.load(counts + passed + place)
    lane, column = tl.arange(0, BLOCK), slice_ * VALUE + tl.arange(0, VALUE)
    is_column = column < value_dim
    at_tile = lane[:, None] * BLOCK + lane[None, :]
    at_own = 2 * at_tile[:, :, None] + tl.arange(0, 2)[None, None, :]
    for first in range(0, count, BLOCK):
        row = start + first + lane
        at_value = ((row * heads + head) * value_dim)[:, None] + column[None, :]
        mask = (first + lane < count)[:, None] & is_column[None, :]
        alone = tl.load(updates + at_value, mask=mask, other=0.0)
        asked = tl.load(outputs + at_value, mask=mask, other=0.0)
        line = _tiles_of(pairs, place, heads, head, blocks, first // BLOCK, BLOCK)
        own = tl.load(line + first // BLOCK * 2 * BLOCK * BLOCK + at_own)
        update = tl.zeros((BLOCK, VALUE), tl.float32)
        output = tl.zeros((BLOCK, VALUE), tl.float32)
        for before in range(0, first, BLOCK):
            tile = line + before // BLOCK * 2 * BLOCK * BLOCK + at_tile
            at_other = (((start + before + lane) * heads + head) * value_dim)[:, None] + column[None, :]
            other_update = tl.load(updates + at_other, mask=is_column[None, :], other=0.0)
            update = product(tl.load(tile), other_update, update)
            output = product(tl.load(tile + BLOCK * BLOCK), other_update, output)
        inverse, answers = tl.split(own)
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
    in_key, column = tl.arange(0, KEY), slice_ * VALUE + tl.arange(0, VALUE)
    is_key, is_column = in_key < key_dim, column < value_dim
    own = matrices + (tl.load(states + sequence) * heads + head) * key_dim * value_dim
    at_row = row * heads + head
    at_key = (row * (heads // groups) + head // groups) * key_dim + in_key
    if count > 0:
        mask = is_key[:, None] & is_column[None, :]
        matrix = tl.load(own + in_key[:, None] * value_dim + column[None, :], mask=mask, other=0.0)
        key = tl.load(keys + at_key, mask=is_key, other=0.0)
        query = tl.load(queries + at_key, mask=is_key, other=0.0)
        value = tl.load(values + at_row * value_dim + column, mask=is_column, other=0.0).to(tl.float32)
        faded, beta = tl.exp(tl.load(decays + at_row)), tl.load(betas + at_row).to(tl.float32)
        update = beta * (value - faded * tl.sum(key[:, None] * matrix, axis=0))
        output = faded * tl.sum(query[:, None] * matrix, axis=0) + tl.sum(query * key, axis=0) * update
        tl.store(updates + at_row * value_dim + column, update, mask=is_column)
        tl.store(outputs + at_row * value_dim + column, output, mask=is_column)
    else:
        tl.store(outputs + at_row * value_dim + column, 0.0, mask=is_column & (room > 0))


@dataclass(frozen=True)
class StageKernels:
    """Launches them. Tensors are contiguous and on one device; shapes are those of `step`."""

    block: int = 16  # rows whose system is solved at a time
    value_slice: int = 32  # value columns of a program
    key_part: int = 16  # key columns that a product takes at a time
    prepare_warps: int = 1  # more would each take the same rows apart
    stage_warps: int = 4
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
        blocks, most = triton.cdiv(widest, self.block), self.at_a_time(len(states), heads, widest)
        tiles = (most, heads, blocks * (blocks + 1) // 2, 2, self.block, self.block)
        pairs = torch.empty(tiles, dtype=torch.float32, device=values.device)
        # Sequences are counted on by a number, not by slices: their addresses would compile kernels again.
        for passed in range(0, len(states), most):
            count = min(most, len(states) - passed)
            _prepare_kernel[(count, heads, blocks * (blocks + 1) // 2 + blocks * slices)](
                queries, keys, values, betas, decays, sees.view(torch.uint8), matrices, states, starts,
                counts, pairs, updates, outputs, passed, heads, groups, key_dim, value_dim, widest, blocks,
                slices, KEY=key_width, VALUE=self.value_slice, BLOCK=self.block,
                PART=min(self.key_part, key_width), num_warps=self.prepare_warps,
            )  # fmt: skip
            _stage_kernel[(count, heads, slices)](
                starts, counts, pairs, updates, outputs, passed, heads, value_dim, blocks, room,
                VALUE=self.value_slice, BLOCK=self.block, num_warps=self.stage_warps,
            )  # fmt: skip
        return outputs

    def at_a_time(self, sequences: int, heads: int, widest: int) -> int:
        """How many sequences run side by side, so that they stay within `scratch_bytes`; 1 at least."""
        blocks = triton.cdiv(widest, self.block)
        each = 4 * heads * blocks * (blocks + 1) * self.block**2
        launches = triton.cdiv(sequences, max(1, self.scratch_bytes // each))
        return int(triton.cdiv(sequences, launches))


def width_of(size: int) -> int:
    """A side of a matrix product that holds `size`."""
    return max(_LEAST_DOT, int(triton.next_power_of_2(size)))
