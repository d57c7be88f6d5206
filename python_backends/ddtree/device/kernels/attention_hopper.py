"""Tree attention for many query rows behind a long context, as Hopper does it fastest.

Warps that load are apart from warps that multiply (FlashAttention-3, Shah et al. 2024). A program has a
*team* of two *groups*, four warps with 64 query rows each, and one warp that brings blocks of keys and values
through the tensor memory accelerator, several ahead: each block is read once for 128 rows. No group waits for
the other. A group starts the product of a block's keys together with that of the last block's values, and
takes the softmax of the one while the other runs:

    QK 1 and PV 0 ──┐             QK 2 and PV 1 ──┐
       softmax 1 beside PV 0         softmax 2 beside PV 1        …

Only full blocks of committed keys come this way, nothing masked. What is left of the keys, and the step's own
rows, each group of a tile's last split loads itself. What is found are parts, as by `attention`'s splits.

This module does not know when it is the better choice. It needs Triton 3.6 or later, and compute capability
9.0.
"""
# ruff: noqa: N806  constants of kernels are upper case

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ddtree.device.kernels.attention_hopper_blocks import FEW, UNSEEN, full_blocks, keep, load, rest, together
from ddtree.device.kernels.attention_tiling import TEAM, TeamTiling
from ddtree.device.rows import DeviceRows, Sight

_DIM = 128  # columns of a head that registers were counted for
_TEAM = gl.constexpr(TEAM)
_REGISTERS = gl.constexpr(240)  # of a group's thread
_MASKED_COST = gl.constexpr(128)  # keys of full blocks that take as long as one masked block


@dataclass(frozen=True)
class Parts:
    """What every split found; where a sum is -inf it found nothing, and the mean is anything."""

    means: torch.Tensor  # [S, T, heads, splits, head_dim] float32
    sums: torch.Tensor  # [S, T, heads, splits] float32, logarithms to base 2


@gluon.jit
def _attend(
    all_queries, keys, values, all_few_keys, all_few_values, keys_ready, values_ready, keys_free, values_free,
    query, tail_keys, tail_values, pool_keys, pool_values, table, bits, means, sums,
    query_row, query_head, key_row, value_row, pool_slot,
    scale, words, count, length, kv_head, first_row, split, splits, most, begin, end,
    MEMBER: gl.constexpr, HEADS: gl.constexpr, GROUPS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """What one group of the team does."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    MASKED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FEW, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    own = first_row + MEMBER * 64
    folded = own + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    row, head = folded // GROUPS, kv_head * GROUPS + folded % GROUPS
    lane = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, WIDE)), 0)
    at = gl.expand_dims(row * query_row + head * query_head, 1) + lane
    queries = all_queries.index(MEMBER)
    queries.store(gl.load(query + at, mask=gl.expand_dims(row < count, 1), other=0.0))
    fence_async_shared()
    together()
    highest = gl.full((64,), UNSEEN, gl.float32, gl.SliceLayout(1, SCORES))
    weight = gl.zeros((64,), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros((64, DIM), gl.float32, TOTAL)
    if end > begin:
        if own // GROUPS < count:
            total, highest, weight = full_blocks(
                queries, keys, values, keys_ready, values_ready, keys_free, values_free,
                total, highest, weight, end - begin, scale, SCORES, TOTAL, KEYS, STAGES,
            )  # fmt: skip
        else:
            for turn in range(end - begin):  # keeps step: memory is free once all groups say so
                stage, phase = turn % STAGES, (turn // STAGES) & 1
                mbarrier.wait(keys_ready.index(stage), phase)
                mbarrier.arrive(keys_free.index(stage))
                mbarrier.wait(values_ready.index(stage), phase)
                mbarrier.arrive(values_free.index(stage))
    highest = gl.convert_layout(highest, gl.SliceLayout(1, MASKED))
    weight = gl.convert_layout(weight, gl.SliceLayout(1, MASKED))
    if split == splits - 1:
        few_keys, few_values = all_few_keys.index(MEMBER), all_few_values.index(MEMBER)
        total, highest, weight = rest(
            queries, few_keys, few_values, tail_keys, tail_values, pool_keys, pool_values, table, bits,
            total, highest, weight, key_row, value_row, pool_slot, scale, words,
            count, length, length // KEYS * KEYS, own, GROUPS, PAGE, CAUSAL, WIDE, MASKED, TOTAL, DIM,
        )  # fmt: skip
    weight = gl.convert_layout(weight, gl.SliceLayout(1, TOTAL))
    highest = gl.convert_layout(highest, gl.SliceLayout(1, TOTAL))
    keep(
        means, sums, total, highest, weight, count, kv_head, own, split, splits, most,
        HEADS, GROUPS, TOTAL, DIM,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["rows", "words", "pages", "tiles", "many", "last"])
def _parts_kernel(
    query, tail_keys, tail_values, pool_keys, pool_values, keys_at, values_at,
    page_table, lengths, counts, bits, means, sums,
    query_place, query_row, query_head, key_place, key_row, key_head, value_place, value_row, value_head,
    pool_slot, pool_head, scale, rows, words, pages, tiles, many, last,  # splits of a tile, of the last one
    KV_HEADS: gl.constexpr, GROUPS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, CHUNK: gl.constexpr,
    CAUSAL: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    kv_head, place = gl.program_id(1) % KV_HEADS, (gl.program_id(1) // KV_HEADS).to(gl.int64)
    tile = gl.minimum(gl.program_id(0) // many, tiles - 1)
    split, splits = gl.program_id(0) - tile * many, gl.where(tile == tiles - 1, last, many)
    most = gl.maximum(many, last)
    count, length = gl.load(counts + place), gl.load(lengths + place)
    HEADS: gl.constexpr = KV_HEADS * GROUPS
    query += place * query_place
    tail_keys += place * key_place + kv_head * key_head
    tail_values += place * value_place + kv_head * value_head
    pool_keys, pool_values = pool_keys + kv_head * pool_head, pool_values + kv_head * pool_head
    table, bits = page_table + place * pages, bits + place * rows * words
    sums, means = sums + place * rows * HEADS * most, means + place * rows * HEADS * most * DIM
    first_row, full = tile * _TEAM * 64, length // KEYS
    stop = gl.minimum(count, (first_row + _TEAM * 64 - 1) // GROUPS + 1)
    masked = gl.where(
        first_row // GROUPS < count, (length - full * KEYS + FEW - 1) // FEW + (stop + FEW - 1) // FEW, 0
    )
    line = full + masked * _MASKED_COST // KEYS
    begin, end = gl.minimum(line * split // splits, full), gl.minimum(line * (split + 1) // splits, full)
    end = gl.where(first_row // GROUPS < count, end, begin)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(gl.bfloat16, [_TEAM, 64, DIM], SHARED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, DIM], SHARED)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, DIM], SHARED)
    few_keys = gl.allocate_shared_memory(gl.bfloat16, [_TEAM, FEW, DIM], SHARED)
    few_values = gl.allocate_shared_memory(gl.bfloat16, [_TEAM, FEW, DIM], SHARED)
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(keys_ready.index(stage), count=1)
        mbarrier.init(values_ready.index(stage), count=1)
        mbarrier.init(keys_free.index(stage), count=_TEAM)
        mbarrier.init(values_free.index(stage), count=_TEAM)
    fence_async_shared()
    together()
    gl.warp_specialize([
        (_attend, (
        queries, keys, values, few_keys, few_values,
        keys_ready, values_ready, keys_free, values_free,
        query, tail_keys, tail_values, pool_keys, pool_values, table, bits, means, sums,
        query_row, query_head, key_row, value_row, pool_slot,
        scale, words, count, length, kv_head, first_row, split, splits, most, begin, end,
        0, HEADS, GROUPS, DIM, PAGE, KEYS, STAGES, CAUSAL,
    )),
        (_attend, (
        queries, keys, values, few_keys, few_values,
        keys_ready, values_ready, keys_free, values_free,
        query, tail_keys, tail_values, pool_keys, pool_values, table, bits, means, sums,
        query_row, query_head, key_row, value_row, pool_slot,
        scale, words, count, length, kv_head, first_row, split, splits, most, begin, end,
        1, HEADS, GROUPS, DIM, PAGE, KEYS, STAGES, CAUSAL,
    )),
        (load, (
        keys_at, values_at, keys, values, keys_ready, values_ready, keys_free, values_free,
        table, kv_head, begin, end, DIM, PAGE, CHUNK, KEYS, STAGES,
    )),
    ], [4, 1], [_REGISTERS, 24])  # fmt: skip


@cache
def is_hopper() -> bool:
    """Whether kernels run, or are compiled, on compute capability 9.0."""
    if triton.knobs.runtime.interpret:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch == 90)


def suits(query: torch.Tensor, pool: torch.Tensor, rows: DeviceRows, sight: Sight, cut: TeamTiling) -> bool:
    """Whether these kernels can do it; attention without a window, a cap or sinks."""
    page, keys = rows.page_size, cut.keys
    return (
        is_hopper()
        and query.dtype == torch.bfloat16
        and query.shape[-1] == _DIM
        and sight in (Sight.TREE, Sight.CAUSAL)
        and (page % keys == 0 or 2 * page == keys)
        and pool.stride()[1:] == (_DIM, 1)
        and pool.stride(0) == pool.shape[1] * _DIM
    )


def attend_in_teams(
    query: torch.Tensor,  # [S, T, heads, head_dim] bfloat16
    tail_keys: torch.Tensor,  # [S, T, kv_heads, head_dim]
    tail_values: torch.Tensor,  # [S, T, kv_heads, head_dim]
    pool_keys: torch.Tensor,  # [slots, kv_heads, head_dim]
    pool_values: torch.Tensor,  # [slots, kv_heads, head_dim]
    rows: DeviceRows,
    sight: Sight,
    scale: float,  # of scores, in units of log 2
    cut: TeamTiling,
) -> Parts:
    """Attend as `attention.tree_attention` does, and leave the joining of parts to it."""
    places, count, heads, dim = query.shape
    kv_heads, most = pool_keys.shape[1], max(cut.many, cut.last)
    means = torch.empty((places, count, heads, most, dim), dtype=torch.float32, device=query.device)
    sums = torch.empty((places, count, heads, most), dtype=torch.float32, device=query.device)
    tiles = triton.cdiv(count * (heads // kv_heads), 64 * TEAM)
    chunk, layout = min(rows.page_size, cut.keys), gl.NVMMASharedLayout(128, 8 * query.element_size(), 2)
    keys_at, values_at = (
        TensorDescriptor.from_tensor(pool.flatten(1), [chunk, dim], layout)
        for pool in (pool_keys, pool_values)
    )
    _parts_kernel[((tiles - 1) * cut.many + cut.last, places * kv_heads)](
        query, tail_keys, tail_values, pool_keys, pool_values, keys_at, values_at,
        rows.page_table, rows.lengths, rows.counts, rows.bits, means, sums,
        *query.stride()[:3], *tail_keys.stride()[:3], *tail_values.stride()[:3], *pool_keys.stride()[:2],
        scale, count, rows.bits.shape[2], rows.page_table.shape[1], tiles, cut.many, cut.last,
        KV_HEADS=kv_heads, GROUPS=heads // kv_heads, DIM=dim, PAGE=rows.page_size, CHUNK=chunk,
        CAUSAL=sight == Sight.CAUSAL, KEYS=cut.keys, STAGES=cut.stages,
        num_warps=4,
    )  # fmt: skip
    return Parts(means, sums)
