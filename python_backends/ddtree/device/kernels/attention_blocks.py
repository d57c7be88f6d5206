"""What one program of tree attention does with blocks of keys; `attention` launches it and draws the line.

This module knows neither places nor splits: it is given addresses, a range of blocks and a running softmax.
"""
# ruff: noqa: ANN201  what a kernel's function gives has no type of Python's

from __future__ import annotations

import triton
import triton.language as tl

from ddtree.device.rows import Sight

_TREE = tl.constexpr(int(Sight.TREE))
_CAUSAL = tl.constexpr(int(Sight.CAUSAL))
_BLOCK = tl.constexpr(int(Sight.BLOCK))
UNSEEN = tl.constexpr(float("-inf"))  # the score of a key that is not seen


@triton.jit
def pages_of(table, block, length, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """The page of a block of keys, or of each key where a block may reach over several pages."""
    if PAGE % KEYS == 0:
        pages = tl.load(table + block * KEYS // PAGE, mask=block * KEYS < length, other=0)
    else:
        key = block * KEYS + tl.arange(0, KEYS)
        pages = tl.load(table + key // PAGE, mask=key < length, other=0)
    return pages


@triton.jit
def score(queries, keys, scale, cap, CAPPED: tl.constexpr):
    """Scores `[ROWS, KEYS]`: in units of log 2 when capped, else `take_in` has the scale."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if CAPPED:
        scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores * scale))  # cap x tanh
    return scores


@triton.jit
def take_in(scores, values, total, highest, weight, scale, CAPPED: tl.constexpr):
    """Carry the softmax on: the weighted sum, the highest score, which it refers to, and its weights' sum."""
    unit = 1.0 if CAPPED else scale  # of each score, so that scaling it is part of the difference below
    now = tl.maximum(highest, tl.max(scores, axis=1) * unit)
    # A row that has seen nothing yet would subtract infinity from infinity.
    base = tl.where(now == UNSEEN, 0.0, now)
    shares = tl.exp2(scores * unit - base[:, None])
    fade = tl.exp2(highest - base)
    weight = weight * fade + tl.sum(shares, axis=1)
    total = tl.dot(shares.to(values.dtype), values, total * fade[:, None], input_precision="ieee")
    return total, now, weight


@triton.jit
def share(
    length, count, depth, tile, split, window,
    GROUPS: tl.constexpr, SIGHT: tl.constexpr, WINDOWED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A split's part of the line of blocks: its first block and the one behind its last."""
    committed = tl.cdiv(length, KEYS)
    if WINDOWED:
        first = tl.maximum(length + tl.min(depth, axis=0) - window + 1, 0) // KEYS
        first = tl.minimum(first, committed)
    else:
        first = 0
    stop = count
    if SIGHT != _BLOCK:  # in a tree, too, a row sees no row behind itself
        stop = tl.minimum(count, (tile * ROWS + ROWS - 1) // GROUPS + 1)
    blocks = committed - first + tl.cdiv(stop, KEYS)
    blocks = tl.where(tile * ROWS // GROUPS < count, blocks, 0)
    each = tl.cdiv(blocks, SPLITS)
    begin = first + split * each
    return begin, tl.minimum(begin + each, first + blocks)


@triton.jit
def prefix(
    queries, pool_keys, pool_values, table, length, depth, begin, end, total, highest, weight,
    pool_slot, scale, cap, window,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Take in blocks of committed keys; `FULL`: none of them reaches beyond the last key."""
    lane, place = tl.arange(0, WIDTH), tl.arange(0, KEYS)
    inside = lane < HEAD_DIM
    within = place[:, None] * pool_slot + lane[None, :]  # a block's addresses, were it the pool's first
    pages = pages_of(table, begin, length, PAGE, KEYS)
    for block in tl.range(begin, end, num_stages=STAGES):
        key = block * KEYS + place
        there = key < length
        if PAGE % KEYS == 0:  # one product for all keys: a product for each is a quarter of the loop
            first, at = pages.to(tl.int64) * PAGE + block % (PAGE // KEYS) * KEYS, within
        else:
            first, at = 0, (pages.to(tl.int64) * PAGE + key % PAGE)[:, None] * pool_slot + lane[None, :]
        own_keys, own_values = pool_keys + first * pool_slot, pool_values + first * pool_slot
        pages = pages_of(table, block + 1, length, PAGE, KEYS)  # early: the next block waits for nothing
        if FULL and WIDTH == HEAD_DIM:
            keys, values = tl.load(own_keys + at), tl.load(own_values + at)
        elif FULL:
            keys = tl.load(own_keys + at, mask=inside[None, :], other=0.0)
            values = tl.load(own_values + at, mask=inside[None, :], other=0.0)
        else:
            mask = there[:, None] & inside[None, :]
            keys = tl.load(own_keys + at, mask=mask, other=0.0)
            values = tl.load(own_values + at, mask=mask, other=0.0)
        scores = score(queries, keys, scale, cap, CAPPED)
        if WINDOWED:
            near = length + depth[:, None] - key[None, :] < window
            scores = tl.where(near & there[None, :], scores, UNSEEN)
        elif not FULL:
            scores = tl.where(there[None, :], scores, UNSEEN)
        total, highest, weight = take_in(scores, values, total, highest, weight, scale, CAPPED)
    return total, highest, weight


@triton.jit
def visible(
    bits, depths, row, live, depth, first, count, words, window,
    SIGHT: tl.constexpr, WINDOWED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Which of their sequence's rows `first`, `first + 1`, … rows see, `[ROWS, KEYS]`."""
    other = first + tl.arange(0, KEYS)
    seen = live[:, None] & (other < count)[None, :]
    if SIGHT == _TREE:
        at = bits + row * words + first // 64
        word = tl.load(at, mask=live, other=0)[:, None]
        if KEYS > 64:
            second = tl.load(at + 1, mask=live & (first // 64 + 1 < words), other=0)[:, None]
            word = tl.where((other // 64 == first // 64)[None, :], word, second)
        bit = tl.arange(0, KEYS) % 64 + (first % 64 if KEYS < 64 else 0)
        seen = seen & (((word >> bit.to(tl.int64)[None, :]) & 1) != 0)
    if SIGHT == _CAUSAL:
        seen = seen & (other[None, :] <= row[:, None])
    if WINDOWED:
        apart = depth[:, None] - tl.load(depths + other, mask=other < count, other=0)[None, :]
        seen = seen & (apart < window)
        if SIGHT == _BLOCK:
            seen = seen & (apart > -window)
    return seen


@triton.jit
def own_rows(
    queries, tail_keys, tail_values, bits, depths, row, depth, live, count, begin, end,
    total, highest, weight, key_row, value_row, words, scale, cap, window,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, SIGHT: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take in blocks `begin`, … of the keys of the sequence's own rows."""
    inside = tl.arange(0, WIDTH) < HEAD_DIM
    for block in tl.range(begin, end, num_stages=STAGES):
        other = block * KEYS + tl.arange(0, KEYS)
        mask = (other < count)[:, None] & inside[None, :]
        keys = tl.load(tail_keys + other[:, None] * key_row, mask=mask, other=0.0)
        values = tl.load(tail_values + other[:, None] * value_row, mask=mask, other=0.0)
        seen = visible(
            bits, depths, row, live, depth, block * KEYS, count, words, window, SIGHT, WINDOWED, KEYS
        )
        scores = tl.where(seen, score(queries, keys, scale, cap, CAPPED), UNSEEN)
        total, highest, weight = take_in(scores, values, total, highest, weight, scale, CAPPED)
    return total, highest, weight
