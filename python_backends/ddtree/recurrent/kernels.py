"""The tree form of Gated DeltaNet, its commit and its convolution as kernels in the Triton language.

For a CUDA device; the tests run them in Triton's interpreter. They compute what `gated_delta` and `step` do
with PyTorch, on rows as they stand in the packed step: nothing is padded or copied, states are read where
they are kept, and whatever depends on values (row counts, paths, which state) is read from the device. So a
launch needs no look at the host, allocates by shape alone and can be captured into a graph.

One program owns one head of one sequence and a slice of its value columns, which are independent of each
other. It goes through the rows in blocks: what earlier blocks contribute are matrix products, and within a
block the triangular system is solved row by row. Inverting it by squaring would be faster, but its powers
grow where a tree repeats tokens, and the digits would be lost.

Not imported unless it is used: the CPU build of PyTorch comes without Triton. This module knows tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ddtree.device.kernels.gated_delta import LayerKernels, along_path

_LEAST_DOT = 16  # smallest side of Triton's matrix product


@triton.jit
def _product(left, right, total):
    """Add a product in full float32: tensor cores take three; their default rounds factors to ten bits."""
    return tl.dot(left, right, total, input_precision="tf32x3")


@triton.jit
def _rows(source, row, stride, lane, key_dim, is_row):
    """Some key columns of rows, `[rows, PART]`."""
    mask = is_row[:, None] & (lane < key_dim)[None, :]
    return tl.load(source + (row * stride)[:, None] + lane[None, :], mask=mask, other=0.0)


@triton.jit
def _alike(
    queries, keys, row, other_row, key_row, key_dim, is_node, is_other,
    KEY: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Products of keys and of queries with the keys of other rows, `[BLOCK, BLOCK]` each."""
    alike = tl.zeros((BLOCK, BLOCK), tl.float32)
    asked = tl.zeros((BLOCK, BLOCK), tl.float32)
    for part in tl.range(0, KEY, PART, num_stages=3):
        in_key = part + tl.arange(0, PART)
        other_key = tl.trans(_rows(keys, other_row, key_row, in_key, key_dim, is_other))
        alike = _product(_rows(keys, row, key_row, in_key, key_dim, is_node), other_key, alike)
        asked = _product(_rows(queries, row, key_row, in_key, key_dim, is_node), other_key, asked)
    return alike, asked


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
def _stage_kernel(
    queries, keys, values, betas, decays, sees, matrices, states, starts, counts, updates, outputs,
    heads, groups, key_dim, value_dim, widest, room,
    KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    sequence, head, slice_ = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, count = tl.load(starts + sequence), tl.load(counts + sequence)
    lane, column = tl.arange(0, BLOCK), slice_ * VALUE + tl.arange(0, VALUE)
    is_column = column < value_dim
    own = matrices + (tl.load(states + sequence) * heads + head) * key_dim * value_dim
    key_row = heads // groups * key_dim
    keys, queries = keys + head // groups * key_dim, queries + head // groups * key_dim
    seen_from = sees + sequence * widest * widest
    for first in range(0, count, BLOCK):
        node = first + lane
        is_node, row = node < count, start + node
        at_value = ((row * heads + head) * value_dim)[:, None] + column[None, :]
        value_mask = is_node[:, None] & is_column[None, :]
        value = tl.load(values + at_value, mask=value_mask, other=0.0).to(tl.float32)
        beta = tl.load(betas + row * heads + head, mask=is_node, other=0.0).to(tl.float32)
        decay = tl.load(decays + row * heads + head, mask=is_node, other=0.0)
        update = tl.zeros((BLOCK, VALUE), tl.float32)
        output = tl.zeros((BLOCK, VALUE), tl.float32)
        alike = tl.zeros((BLOCK, BLOCK), tl.float32)
        asked = tl.zeros((BLOCK, BLOCK), tl.float32)
        # A part of the key columns at a time: whole rows and matrices are more than registers hold.
        for part in tl.range(0, KEY, PART, num_stages=3):
            in_key = part + tl.arange(0, PART)
            key = _rows(keys, row, key_row, in_key, key_dim, is_node)
            query = _rows(queries, row, key_row, in_key, key_dim, is_node)
            matrix_mask = (in_key < key_dim)[:, None] & is_column[None, :]
            at = in_key[:, None] * value_dim + column[None, :]
            matrix = tl.load(own + at, mask=matrix_mask, other=0.0)
            update, output = _product(key, matrix, update), _product(query, matrix, output)
            alike, asked = _product(key, tl.trans(key), alike), _product(query, tl.trans(key), asked)
        faded = tl.exp(decay)[:, None]
        update, output = beta[:, None] * (value - faded * update), faded * output
        for before in range(0, first, BLOCK):
            other = before + lane
            other_row = start + other
            other_alike, other_asked = _alike(
                queries, keys, row, other_row, key_row, key_dim, is_node, other < count, KEY, BLOCK, PART
            )
            at_update = ((other_row * heads + head) * value_dim)[:, None] + column[None, :]
            other_update = tl.load(updates + at_update, mask=is_column[None, :], other=0.0)
            other_decay = tl.load(decays + other_row * heads + head)
            at_pair = node[:, None] * widest + other[None, :]
            is_seen = tl.load(seen_from + at_pair, mask=is_node[:, None], other=0)
            pair = tl.exp(tl.where(is_seen != 0, decay[:, None] - other_decay[None, :], float("-inf")))
            update = _product(-beta[:, None] * pair * other_alike, other_update, update)
            output = _product(pair * other_asked, other_update, output)
        both = is_node[:, None] & is_node[None, :]
        is_seen = tl.load(seen_from + node[:, None] * widest + node[None, :], mask=both, other=0)
        pair = tl.exp(tl.where(is_seen != 0, decay[:, None] - decay[None, :], float("-inf")))
        update = _solved(beta[:, None] * pair * alike, update, BLOCK)
        output = _product(pair * asked, update, output)
        tl.store(updates + at_value, update, mask=value_mask)
        tl.store(outputs + at_value, output, mask=value_mask)
        tl.debug_barrier()  # the next block reads these updates, through other threads
    for first in range(count // BLOCK * BLOCK, room, BLOCK):
        _clear(outputs, start, first + lane, count, room, column, heads, head, value_dim)


@triton.jit
def _commit_kernel(
    matrices, keys, updates, decays, states, rows, lengths,
    sequences, num_states, num_rows, heads, groups, key_dim, value_dim, longest,
    KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    place, head, slice_ = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    layer, sequence = (place // sequences).to(tl.int64), place % sequences
    length = tl.load(lengths + sequence)
    in_key, column = tl.arange(0, KEY), slice_ * VALUE + tl.arange(0, VALUE)
    is_key, is_column = in_key < key_dim, column < value_dim
    state = layer * num_states + tl.load(states + sequence)
    at = (state * heads + head) * key_dim * value_dim + in_key[:, None] * value_dim + column[None, :]
    mask = is_key[:, None] & is_column[None, :]
    key_heads = heads // groups
    if length > 0:
        path = rows + sequence * longest
        end = layer * num_rows + tl.load(path + length - 1)
        last = tl.load(decays + end * heads + head)
        matrix = tl.load(matrices + at, mask=mask, other=0.0) * tl.exp(last)
        for step in range(length):
            row = layer * num_rows + tl.load(path + step)
            fading = tl.exp(last - tl.load(decays + row * heads + head))
            at_key = (row * key_heads + head // groups) * key_dim + in_key
            key = tl.load(keys + at_key, mask=is_key, other=0.0)
            at_update = (row * heads + head) * value_dim + column
            update = tl.load(updates + at_update, mask=is_column, other=0.0)
            matrix += key[:, None] * (fading * update)[None, :]
        tl.store(matrices + at, matrix, mask=mask)


@triton.jit
def _convolve_kernel(
    inputs, tails, weight, windows, states, outputs, num_tails, channels,
    KERNEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < channels
    total = along_path(
        inputs, tails, weight, windows, states, row, channel, is_channel, num_tails, channels, channels,
        KERNEL,
    )  # fmt: skip
    tl.store(outputs + row * channels + channel, total, mask=is_channel)


@dataclass(frozen=True)
class TreeKernels(LayerKernels):
    """Launches the kernels. Tensors are contiguous and on one device; shapes are those of `step`."""

    block: int = 16  # rows whose system is solved at a time
    value_slice: int = 32  # value columns of a program
    key_part: int = 16  # key columns that a product takes at a time
    channel_slice: int = 256

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

        Padding gets zeros.
        """
        heads, value_dim = values.shape[1:]
        outputs = torch.empty(values.shape, dtype=torch.float32, device=values.device)
        grid = (len(states), heads, triton.cdiv(value_dim, self.value_slice))
        _stage_kernel[grid](
            queries, keys, values, betas, decays, sees.view(torch.uint8), matrices, states, starts, counts,
            updates, outputs, heads, heads // keys.shape[1], keys.shape[2], value_dim, sees.shape[1],
            room, KEY=_width(keys.shape[2]), VALUE=self.value_slice, BLOCK=self.block,
            PART=min(self.key_part, _width(keys.shape[2])), num_stages=1,
        )  # fmt: skip
        return outputs

    def commit(
        self,
        matrices: torch.Tensor,  # [L, states, Hv, dk, dv] float32, changed
        keys: torch.Tensor,  # [L, rows, Hk, dk] float32
        updates: torch.Tensor,  # [L, rows, Hv, dv] float32
        decays: torch.Tensor,  # [L, rows, Hv] float32
        states: torch.Tensor,  # [S] int64
        rows: torch.Tensor,  # [S, J] int64
        lengths: torch.Tensor,  # [S] int64
    ) -> None:
        """Move every layer's states along the paths."""
        layers, num_states, heads, key_dim, value_dim = matrices.shape
        grid = (layers * len(states), heads, triton.cdiv(value_dim, self.value_slice))
        _commit_kernel[grid](
            matrices, keys, updates, decays, states, rows.contiguous(), lengths, len(states), num_states,
            keys.shape[1], heads, heads // keys.shape[2], key_dim, value_dim, rows.shape[1],
            KEY=_width(key_dim), VALUE=self.value_slice,
        )  # fmt: skip

    def convolve(
        self,
        inputs: torch.Tensor,  # [n, channels]
        tails: torch.Tensor,  # [states, kernel - 1, channels], of one layer
        weight: torch.Tensor,  # [channels, kernel]
        windows: torch.Tensor,  # [n, kernel] int64
        states: torch.Tensor,  # [S] int64
    ) -> torch.Tensor:
        """Convolve every row with its ancestors, `[n, channels]` float32."""
        channels, kernel = weight.shape
        outputs = torch.empty(inputs.shape, dtype=torch.float32, device=inputs.device)
        grid = (len(inputs), triton.cdiv(channels, self.channel_slice))
        _convolve_kernel[grid](
            inputs, tails, weight.contiguous(), windows, states, outputs, len(states) * (kernel - 1),
            channels, KERNEL=kernel, BLOCK=self.channel_slice,
        )  # fmt: skip
        return outputs


def _width(size: int) -> int:
    return max(_LEAST_DOT, int(triton.next_power_of_2(size)))
