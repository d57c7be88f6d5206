"""Paged tree attention in the Triton language: every row sees the committed prefix and, of its step, its own.

Committed keys are read through the page table where they stand in the pool; those of the running step as they
come out of the layer. Both make one line of key blocks for each sequence,

    [ blocks of the committed prefix │ blocks of the step's rows ]        one block = `Tiling.keys` keys
      split 0  split 1  split 2  …                  last split

cut into `Tiling.splits` shares that run beside each other. How many there are is decided by shapes, how long
each is by the lengths on the device: a launch can be captured into a graph, and a split that finds nothing to
do says so and ends. A second kernel joins the splits by the weight of their softmax sums (Flash-Decoding, Dao
et al. 2023); with one split there is nothing to join. The query heads that share a KV head, times several
rows, are one side of the matrix products, cut into tiles. Where but a few are left over for the last tile,
its programs have fewer rows in the same launch, and their keys are cut into shares of their own. All sums run
in a fixed order, so equal inputs give equal bits.

This module knows neither models nor sessions, and `attention_tiling` chooses the block sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ddtree.device.kernels.attention_blocks import LOG2_E, UNSEEN, attend_rows
from ddtree.device.kernels.attention_tiling import AttentionShape, Tiling, padded, tiling_for
from ddtree.device.rows import DeviceRows, Sight

_STORED_AT_ONCE = 1024  # columns of a row that one program stores


@dataclass(frozen=True)
class Scoring:
    """How a score comes from a query and a key, and which keys are near enough to have one."""

    scaling: float  # factor of the product, above zero
    window: int | None = None  # a key is seen when fewer positions back than this; `Sight.BLOCK`: either way
    softcap: float | None = None  # scores are bent into (-softcap, softcap) by tanh (Gemma 2)


@triton.jit(do_not_specialize=["window", "rows", "words", "pages"])
def _attend_kernel(
    query, tail_keys, tail_values, pool_keys, pool_values, page_table, lengths, counts, depths, bits, sinks,
    output, sums,
    query_place, query_row, query_head, key_place, key_row, key_head, value_place, value_row, value_head,
    pool_slot, pool_head, scale, cap, window, rows, words, pages,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, SIGHT: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    SUNK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, FEW: tl.constexpr,  # blocks under way; the same where there is but a block or two
):  # fmt: skip
    attend_rows(
        tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2) // KV_HEADS, tl.program_id(2) % KV_HEADS,
        query, tail_keys, tail_values, pool_keys, pool_values, page_table, lengths, counts, depths, bits,
        sinks, output, sums,
        query_place, query_row, query_head, key_place, key_row, key_head, value_place, value_row, value_head,
        pool_slot, pool_head, scale, cap, window, rows, words, pages,
        KV_HEADS, GROUPS, HEAD_DIM, WIDTH, PAGE, SIGHT, CAPPED, WINDOWED, SUNK, ROWS, KEYS, SPLITS,
        SPLITS, STAGES, FEW,
    )  # fmt: skip


@triton.jit(do_not_specialize=["window", "rows", "words", "pages"])
def _attend_uneven_kernel(
    query, tail_keys, tail_values, pool_keys, pool_values, page_table, lengths, counts, depths, bits, sinks,
    output, sums,
    query_place, query_row, query_head, key_place, key_row, key_head, value_place, value_row, value_head,
    pool_slot, pool_head, scale, cap, window, rows, words, pages,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, SIGHT: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    SUNK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, FEW: tl.constexpr, LAST_ROWS: tl.constexpr, LAST_SPLITS: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """All tiles but the last are full; the last few rows have smaller programs in the same launch."""
    tiles, program = rows * GROUPS // ROWS, tl.program_id(0)
    place, kv_head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    if program < tiles * SPLITS:
        attend_rows(
            program % tiles * ROWS, program // tiles, place, kv_head,
            query, tail_keys, tail_values, pool_keys, pool_values, page_table, lengths, counts, depths,
            bits, sinks, output, sums, query_place, query_row, query_head, key_place, key_row, key_head,
            value_place, value_row, value_head,
            pool_slot, pool_head, scale, cap, window, rows, words, pages,
            KV_HEADS, GROUPS, HEAD_DIM, WIDTH, PAGE, SIGHT, CAPPED, WINDOWED, SUNK, ROWS, KEYS, SPLITS,
            MOST, STAGES, FEW,
        )  # fmt: skip
    else:
        attend_rows(
            tiles * ROWS, program - tiles * SPLITS, place, kv_head,
            query, tail_keys, tail_values, pool_keys, pool_values, page_table, lengths, counts, depths,
            bits, sinks, output, sums, query_place, query_row, query_head, key_place, key_row, key_head,
            value_place, value_row, value_head,
            pool_slot, pool_head, scale, cap, window, rows, words, pages,
            KV_HEADS, GROUPS, HEAD_DIM, WIDTH, PAGE, SIGHT, CAPPED, WINDOWED, SUNK, LAST_ROWS, KEYS,
            LAST_SPLITS, MOST, STAGES, FEW,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "items"])
def _join_kernel(
    means, sums, counts, sinks, output, rows, items,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    SUNK: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, LAST_SPLITS: tl.constexpr,
    MOST: tl.constexpr, JOINED: tl.constexpr, TOGETHER: tl.constexpr,  # heads of a program
):  # fmt: skip
    item = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    split, lane = tl.arange(0, JOINED), tl.arange(0, WIDTH)
    there, inside = item < items, lane < HEAD_DIM
    row, head, item = item // HEADS, item % HEADS, item.to(tl.int64)
    splits = tl.full((TOGETHER,), SPLITS, dtype=tl.int32)
    if LAST_SPLITS != SPLITS:
        folded = row % rows * GROUPS + head % GROUPS
        splits = tl.where(folded < rows * GROUPS // ROWS * ROWS, SPLITS, LAST_SPLITS)
    mine = there[None, :] & (split[:, None] < splits[None, :])
    at = item[None, :] * MOST + split[:, None]
    # Read before it is known which of them were written: the answers of both loads are waited for once.
    mean = tl.load(
        means + at[:, :, None] * HEAD_DIM + lane[None, None, :],
        mask=mine[:, :, None] & inside[None, None, :],
        other=0.0,
    )
    live = row % rows < tl.load(counts + row // rows, mask=there, other=0)
    found = tl.load(sums + at, mask=mine, other=UNSEEN)
    found = tl.where(live[None, :], found, UNSEEN)
    highest = tl.max(found, axis=0)
    if SUNK:
        sink = tl.load(sinks + head, mask=there, other=0.0).to(tl.float32) * LOG2_E
        highest = tl.maximum(highest, sink)
    base = tl.where(highest == UNSEEN, 0.0, highest)
    shares = tl.exp2(found - base[None, :])
    weight = tl.sum(shares, axis=0)
    if SUNK:
        weight += tl.exp2(sink - base)
    joined = tl.sum(shares[:, :, None] * tl.where(shares[:, :, None] > 0, mean, 0.0), axis=0)
    joined = joined / tl.where(weight > 0, weight, 1.0)[:, None]
    at_output = output + item[:, None] * HEAD_DIM + lane[None, :]
    tl.store(at_output, joined, mask=there[:, None] & inside[None, :])


@triton.jit
def _store_kernel(
    keys, values, pool_keys, pool_values, slots,
    rows, key_place, key_row, key_head, value_place, value_row, value_head, pool_slot, pool_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    packed, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place, row, head, lane = packed // rows, packed % rows, column // HEAD_DIM, column % HEAD_DIM
    slot = tl.load(slots + packed)
    mask = (column < KV_HEADS * HEAD_DIM) & (slot >= 0)
    key = tl.load(keys + place * key_place + row * key_row + head * key_head + lane, mask=mask)
    value = tl.load(values + place * value_place + row * value_row + head * value_head + lane, mask=mask)
    at = slot * pool_slot + head * pool_head + lane
    tl.store(pool_keys + at, key, mask=mask)
    tl.store(pool_values + at, value, mask=mask)


def tree_attention(
    query: torch.Tensor,  # [S, T, heads, head_dim]
    tail_keys: torch.Tensor,  # [S, T, kv_heads, head_dim], this step's own, turned
    tail_values: torch.Tensor,  # [S, T, kv_heads, head_dim]
    pool_keys: torch.Tensor,  # [slots, kv_heads, head_dim], of one layer
    pool_values: torch.Tensor,  # [slots, kv_heads, head_dim]
    rows: DeviceRows,
    sight: Sight,
    scoring: Scoring,
    *,
    sinks: torch.Tensor | None = None,  # [heads], scores of a key without a value (GPT-OSS)
    tiling: Tiling | None = None,
) -> torch.Tensor:  # [S, T, heads, head_dim] contiguous, of the query's dtype
    """Attend from every row to its committed prefix and to what `sight` says of its sequence's rows.

    Row t of place s stands at position `lengths[s] + depths[s, t]`; committed key p at p. Rows behind
    `counts[s]` come out as zeros, and nothing behind `counts[s]`, `lengths[s]` or a sequence's last page is
    read. Query, keys and values may be views into wider rows, as columns of one merged projection are; the
    pool is float32, float16 or bfloat16, and so are the rows. Softmax and sums are float32.
    """
    (places, count, heads, head_dim), kv_heads = query.shape, pool_keys.shape[1]
    assert query.dtype == tail_keys.dtype == tail_values.dtype == pool_keys.dtype, "one dtype for all"
    assert pool_keys.stride() == pool_values.stride(), "keys and values of a pool lie alike"
    assert scoring.scaling > 0, f"the highest product has the highest score, not with {scoring.scaling}"
    assert {t.stride(-1) for t in (query, tail_keys, tail_values, pool_keys)} == {1}, "dims lie side by side"
    slots = rows.page_table.shape[1] * rows.page_size
    shape = AttentionShape(places, count, heads, kv_heads, head_dim, slots, query.element_size())
    cut = tiling_for(shape, tiling)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    means, sums, most = output, output, max(cut.splits, cut.last_splits)
    if most > 1:
        means = output.new_empty((places, count, heads, most, head_dim), dtype=torch.float32)
        sums = output.new_empty((places, count, heads, most), dtype=torch.float32)
    capped, cap = scoring.softcap is not None, scoring.softcap or 1.0
    scale = 2.0 * scoring.scaling / cap if capped else scoring.scaling
    arguments = (
        query, tail_keys, tail_values, pool_keys, pool_values, rows.page_table, rows.lengths, rows.counts,
        rows.depths, rows.bits, output if sinks is None else sinks, means, sums,
        *query.stride()[:3], *tail_keys.stride()[:3], *tail_values.stride()[:3], *pool_keys.stride()[:2],
        scale * LOG2_E.value, cap * LOG2_E.value, scoring.window or 0, count, rows.bits.shape[2],
        rows.page_table.shape[1],
    )  # fmt: skip
    constants = {
        "KV_HEADS": kv_heads, "GROUPS": heads // kv_heads, "HEAD_DIM": head_dim, "WIDTH": padded(head_dim),
        "PAGE": rows.page_size, "SIGHT": int(sight), "CAPPED": capped,
        "WINDOWED": scoring.window is not None, "SUNK": sinks is not None, "ROWS": cut.rows,
        "KEYS": cut.keys, "SPLITS": cut.splits, "STAGES": cut.stages, "FEW": min(cut.stages, 2),
        "num_warps": cut.warps, "num_stages": cut.stages,
    }  # fmt: skip
    if cut.last_rows == cut.rows:
        grid = (triton.cdiv(shape.folded, cut.rows), cut.splits, places * kv_heads)
        _attend_kernel[grid](*arguments, **constants)
    else:
        programs = shape.folded // cut.rows * cut.splits + cut.last_splits
        _attend_uneven_kernel[(programs, places * kv_heads)](
            *arguments, **constants, LAST_ROWS=cut.last_rows, LAST_SPLITS=cut.last_splits, MOST=most
        )
    if most > 1:
        _join(means, sums, rows.counts, sinks, output, kv_heads, cut)
    return output


def _join(
    means: torch.Tensor,  # [S, T, heads, splits, head_dim] float32
    sums: torch.Tensor,  # [S, T, heads, splits] float32, logarithms to base 2
    counts: torch.Tensor,
    sinks: torch.Tensor | None,
    output: torch.Tensor,  # written
    kv_heads: int,
    cut: Tiling,
) -> None:
    places, count, heads, most, head_dim = means.shape
    items = places * count * heads
    _join_kernel[(triton.cdiv(items, cut.join_heads),)](
        means, sums, counts, output if sinks is None else sinks, output, count, items,
        HEADS=heads, GROUPS=heads // kv_heads, HEAD_DIM=head_dim, WIDTH=padded(head_dim),
        SUNK=sinks is not None, ROWS=cut.rows, SPLITS=cut.splits, LAST_SPLITS=cut.last_splits, MOST=most,
        JOINED=triton.next_power_of_2(most), TOGETHER=cut.join_heads, num_warps=cut.join_warps,
    )  # fmt: skip


def store(
    keys: torch.Tensor,  # [S, T, kv_heads, head_dim], turned; a view into wider rows will do
    values: torch.Tensor,  # [S, T, kv_heads, head_dim]
    pool_keys: torch.Tensor,  # [slots, kv_heads, head_dim], written
    pool_values: torch.Tensor,  # [slots, kv_heads, head_dim], written
    slots: torch.Tensor,  # [S, T] int64, no slot twice; -1: stored nowhere
) -> None:
    """Write a step's keys and values of one layer to its slots of the pool."""
    places, count, kv_heads, head_dim = keys.shape
    assert pool_keys.stride() == pool_values.stride(), "keys and values of a pool lie alike"
    columns = min(_STORED_AT_ONCE, triton.next_power_of_2(kv_heads * head_dim))
    _store_kernel[(places * count, triton.cdiv(kv_heads * head_dim, columns))](
        keys, values, pool_keys, pool_values, slots, count, *keys.stride()[:3], *values.stride()[:3],
        *pool_keys.stride()[:2], KV_HEADS=kv_heads, HEAD_DIM=head_dim, COLUMNS=columns,
    )  # fmt: skip
