"""What of the tree form of Gated DeltaNet waits for no other rows, as functions of `delta_stage`'s kernels.

    root              the first row: one step of plain decoding, some value columns of a head
    root_shares       how much of the root's update some rows take
    pair              how much of each other's updates rows of two blocks take, or of one block: its inverse
    through_state     rows of a block through the state as it stands

This module knows tensors; not how tasks are given to programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ddtree.device.kernels.product import product


@triton.jit
def _rows(source, row, stride, lane, key_dim, is_row):
    """Some key columns of rows, `[rows, PART]`."""
    mask = is_row[:, None] & (lane < key_dim)[None, :]
    return tl.load(source + (row * stride)[:, None] + lane[None, :], mask=mask, other=0.0)


@triton.jit
def root(  # noqa: ANN201 - kernels have no types of Python's
    queries, keys, values, betas, decays, own, updates, outputs, row, column, heads, head, key_row, key_dim,
    value_dim, KEY: tl.constexpr,
):  # fmt: skip
    """A row with nothing but the state before it."""
    in_key = tl.arange(0, KEY)
    is_key, is_column, at_row = in_key < key_dim, column < value_dim, row * heads + head
    mask = is_key[:, None] & is_column[None, :]
    matrix = tl.load(own + in_key[:, None] * value_dim + column[None, :], mask=mask, other=0.0)
    key = tl.load(keys + row * key_row + in_key, mask=is_key, other=0.0)
    query = tl.load(queries + row * key_row + in_key, mask=is_key, other=0.0)
    value = tl.load(values + at_row * value_dim + column, mask=is_column, other=0.0).to(tl.float32)
    faded, beta = tl.exp(tl.load(decays + at_row)), tl.load(betas + at_row).to(tl.float32)
    update = beta * (value - faded * tl.sum(key[:, None] * matrix, axis=0))
    output = faded * tl.sum(query[:, None] * matrix, axis=0) + tl.sum(query * key, axis=0) * update
    tl.store(updates + at_row * value_dim + column, update, mask=is_column)
    tl.store(outputs + at_row * value_dim + column, output, mask=is_column)


@triton.jit
def root_shares(  # noqa: ANN201
    queries, keys, betas, decays, sees, shares, start, count, first, heads, head, key_row, key_dim, widest,
    KEY: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What some rows take from the root's update, and their outputs do, side by side: `[ROWS, 2]`."""
    lane, in_key = tl.arange(0, ROWS), tl.arange(0, KEY)
    node = first + lane
    is_node, row, is_key = node < count, start + node, in_key < key_dim
    key = tl.load(keys + start * key_row + in_key, mask=is_key, other=0.0)[None, :]
    beta = tl.load(betas + row * heads + head, mask=is_node, other=0.0).to(tl.float32)
    gap = tl.load(decays + row * heads + head, mask=is_node, other=0.0) - tl.load(
        decays + start * heads + head
    )
    is_seen = tl.load(sees + node * widest, mask=is_node, other=0)
    alike = tl.sum(_rows(keys, row, key_row, in_key, key_dim, is_node) * key, axis=1)
    asked = tl.sum(_rows(queries, row, key_row, in_key, key_dim, is_node) * key, axis=1)
    fading = tl.exp(tl.where(is_seen != 0, gap, float("-inf")))
    tl.store(shares + 2 * lane, -beta * fading * alike)
    tl.store(shares + 2 * lane + 1, fading * asked)


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
def pair(  # noqa: ANN201
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
def through_state(  # noqa: ANN201
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
