"""What the warps of one program of `attention_hopper` do with blocks of keys.

One warp brings full blocks of committed keys, and groups of four take them in. What is masked, each group
loads itself. This module knows neither places nor splits: it is given addresses, barriers and a softmax.
"""
# ruff: noqa: ANN201, N806  what a kernel's function gives has no type of Python's; constants are upper case

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

FEW = gl.constexpr(32)  # keys of a masked block
WORD = gl.constexpr(64)  # ancestor bits of a word
UNSEEN = gl.constexpr(float("-inf"))  # the score of a key that is not seen
together = getattr(gl, "barrier", None) or gl.thread_barrier  # the second in Triton 3.6


@gluon.jit
def bring(
    pool_at, first, second, kv_head, memory, ready,
    DIM: gl.constexpr, KEYS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Let a block come: `CHUNK` rows from slot `first` on, and any others from slot `second` on."""
    mbarrier.expect(ready, KEYS * DIM * 2)
    tma.async_copy_global_to_shared(pool_at, [first, kv_head * DIM], ready, memory.slice(0, CHUNK))
    if KEYS > CHUNK:
        tma.async_copy_global_to_shared(pool_at, [second, kv_head * DIM], ready, memory.slice(CHUNK, CHUNK))


@gluon.jit
def load(
    keys_at, values_at, keys, values, keys_ready, values_ready, keys_free, values_free,
    table, kv_head, begin, end,
    DIM: gl.constexpr, PAGE: gl.constexpr, CHUNK: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring blocks `begin`, …, as memory comes free, `CHUNK` keys at a time: a block or a page."""
    for block in range(begin, end):
        stage, phase = (block - begin) % STAGES, ((block - begin) // STAGES) & 1
        # Before the wait: where keys are is known when there is room for them.
        first = gl.load(table + block * KEYS // PAGE) * PAGE + block * KEYS % PAGE
        second = first
        if KEYS > CHUNK:
            second = gl.load(table + block * KEYS // PAGE + 1) * PAGE
        mbarrier.wait(keys_free.index(stage), phase ^ 1)
        bring(keys_at, first, second, kv_head, keys.index(stage), keys_ready.index(stage), DIM, KEYS, CHUNK)
        mbarrier.wait(values_free.index(stage), phase ^ 1)
        bring(
            values_at, first, second, kv_head, values.index(stage), values_ready.index(stage),
            DIM, KEYS, CHUNK,
        )  # fmt: skip


@gluon.jit
def softmax(scores, highest, weight, scale):
    """Weights of a block, what becomes of those before, the highest score and the weights' sum."""
    now = gl.maximum(highest, gl.max(scores, axis=1) * scale)
    base = gl.where(now == UNSEEN, 0.0, now)
    shares = gl.exp2(scores * scale - gl.expand_dims(base, 1))
    fade = gl.exp2(highest - base)
    return shares, fade, now, weight * fade + gl.sum(shares, axis=1)


@gluon.jit
def full_blocks(
    queries, keys, values, keys_ready, values_ready, keys_free, values_free,
    total, highest, weight, blocks, scale,
    SCORES: gl.constexpr, TOTAL: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Take in `blocks` > 0 blocks as they come."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, TOTAL, 2)
    mbarrier.wait(keys_ready.index(0), 0)
    none = gl.zeros((64, KEYS), gl.float32, SCORES)
    scores = warpgroup_mma(queries, keys.index(0).permute((1, 0)), none, use_acc=False)
    mbarrier.arrive(keys_free.index(0))
    shares, fade, highest, weight = softmax(scores, highest, weight, scale)
    operand = gl.convert_layout(shares.to(gl.bfloat16), OPERAND)
    mbarrier.wait(values_ready.index(0), 0)
    for turn in range(1, blocks):
        stage, phase, before = turn % STAGES, (turn // STAGES) & 1, (turn - 1) % STAGES
        mbarrier.wait(keys_ready.index(stage), phase)
        none = gl.zeros((64, KEYS), gl.float32, SCORES)
        coming = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        summed = warpgroup_mma(operand, values.index(before), total, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[coming])
        mbarrier.arrive(keys_free.index(stage))
        shares, fade, highest, weight = softmax(scores, highest, weight, scale)
        fresh = gl.convert_layout(shares.to(gl.bfloat16), OPERAND)
        # This wait stands between the softmax and the next one: else the assembler moves that one up, and the
        # softmax no longer runs beside the product.
        mbarrier.wait(values_ready.index(stage), phase)
        total, _old, operand, fade, weight = warpgroup_mma_wait(
            0, deps=[summed, operand, fresh, fade, weight]
        )
        mbarrier.arrive(values_free.index(before))
        total = total * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, TOTAL)), 1)
    last = (blocks - 1) % STAGES
    total = warpgroup_mma(operand, values.index(last), total)
    mbarrier.arrive(values_free.index(last))
    return total, highest, weight


@gluon.jit
def masked_block(
    queries, key_at, value_at, there, seen, keys, values, total, highest, weight, scale,
    SCORES: gl.constexpr, TOTAL: gl.constexpr,
):  # fmt: skip
    """Take in one block of which `there` is read and `seen` is seen; `keys`, `values`: memory of its own."""
    new_keys = gl.load(key_at, mask=there, other=0.0)
    new_values = gl.load(value_at, mask=there, other=0.0)
    together()
    keys.store(new_keys)
    values.store(new_values)
    fence_async_shared()
    together()
    none = gl.zeros((64, FEW), gl.float32, SCORES)
    scores = warpgroup_mma(queries, keys.permute((1, 0)), none, use_acc=False)
    shares, fade, highest, weight = softmax(gl.where(seen, scores, UNSEEN), highest, weight, scale)
    total = total * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, TOTAL)), 1)
    operand = gl.convert_layout(shares.to(gl.bfloat16), gl.DotOperandLayout(0, TOTAL, 2))
    return warpgroup_mma(operand, values, total), highest, weight


@gluon.jit
def rest(
    queries, keys, values, tail_keys, tail_values, pool_keys, pool_values, table, bits,
    total, highest, weight, key_row, value_row, pool_slot, scale, words, count, length, full, own,
    GROUPS: gl.constexpr, PAGE: gl.constexpr, CAUSAL: gl.constexpr,
    WIDE: gl.constexpr, SCORES: gl.constexpr, TOTAL: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Take in committed keys from `full` on and the keys of the sequence's own rows."""
    place, lane = gl.arange(0, FEW, gl.SliceLayout(1, WIDE)), gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
    column = gl.arange(0, FEW, gl.SliceLayout(0, SCORES))
    row = (own + gl.arange(0, 64, gl.SliceLayout(1, SCORES))) // GROUPS
    stop = gl.minimum(count, (own + 63) // GROUPS + 1)  # a row sees no row behind itself
    stop = gl.where(own // GROUPS < count, stop, 0)
    for first in range(full, gl.where(stop > 0, length, 0), FEW):
        key = first + place
        page = gl.load(table + key // PAGE, mask=key < length, other=0)
        at = gl.expand_dims((page.to(gl.int64) * PAGE + key % PAGE) * pool_slot, 1) + gl.expand_dims(lane, 0)
        there = gl.expand_dims(key < length, 1)
        seen = gl.expand_dims(first + column < length, 0)
        total, highest, weight = masked_block(
            queries, pool_keys + at, pool_values + at, there, seen, keys, values,
            total, highest, weight, scale, SCORES, TOTAL,
        )  # fmt: skip
    for first in range(0, stop, FEW):
        other = first + place
        there = gl.expand_dims(other < count, 1)
        key_at = tail_keys + gl.expand_dims(other * key_row, 1) + gl.expand_dims(lane, 0)
        value_at = tail_values + gl.expand_dims(other * value_row, 1) + gl.expand_dims(lane, 0)
        seen = gl.expand_dims(first + column < count, 0)
        if CAUSAL:
            seen = seen & (gl.expand_dims(first + column, 0) <= gl.expand_dims(row, 1))
        else:
            word = gl.load(bits + row * words + first // WORD, mask=row < count, other=0)
            bit = (first % WORD + column).to(gl.int64)
            seen = seen & (((gl.expand_dims(word, 1) >> gl.expand_dims(bit, 0)) & 1) != 0)
        total, highest, weight = masked_block(
            queries, key_at, value_at, there, seen, keys, values, total, highest, weight, scale, SCORES, TOTAL
        )
    return total, highest, weight


@gluon.jit
def keep(
    means, sums, total, highest, weight, count, kv_head, own, split, splits, most,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, TOTAL: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Store a split's part; the last one also says that splits are empty which other tiles have."""
    folded = own + gl.arange(0, 64, gl.SliceLayout(1, TOTAL))
    row, head = folded // GROUPS, kv_head * GROUPS + folded % GROUPS
    to, live = (row * HEADS + head) * most + split, row < count
    weight = gl.where(weight > 0, weight, 1.0)
    gl.store(sums + to, highest + gl.log2(weight), mask=live)
    if split == splits - 1:
        nothing = gl.full((64,), UNSEEN, gl.float32, gl.SliceLayout(1, TOTAL))
        for unused in range(splits, most):
            gl.store(sums + to + (unused - split), nothing, mask=live)
    at = gl.expand_dims(to * DIM, 1) + gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, TOTAL)), 0)
    gl.store(means + at, total / gl.expand_dims(weight, 1), mask=gl.expand_dims(live, 1))
