"""Paged tree attention in the Triton language: every row sees the committed prefix and, of its step, its own.

Committed keys are read through the page table where they stand in the pool; those of the running step as they
come out of the layer. Both make one line of key blocks for each sequence,

    [ blocks of the committed prefix │ blocks of the step's rows ]        one block = `Tiling.keys` keys
      split 0  split 1  split 2  …                  last split

cut into `Tiling.splits` shares that run beside each other. How many there are is decided by shapes, how long
each is by the lengths on the device: a launch can be captured into a graph, and a split that finds nothing to
do says so and ends. A second kernel joins the splits by the weight of their softmax sums (Flash-Decoding, Dao
et al. 2023); with one split there is nothing to join. The query heads that share a KV head, times several
rows, are one side of the matrix products. All sums run in a fixed order, so equal inputs give equal bits.

Behind long contexts `attention_hopper` finds the parts where it can. This module knows neither models nor
sessions, and `attention_tiling` chooses the block sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ddtree.device.kernels.attention_blocks import UNSEEN, own_rows, prefix, share
from ddtree.device.kernels.attention_hopper import attend_in_teams, suits
from ddtree.device.kernels.attention_tiling import (
    AttentionShape,
    Tiling,
    join_warps_for,
    padded,
    teams_for,
    tiling_for,
)
from ddtree.device.rows import DeviceRows, Sight

_LOG2_E = tl.constexpr(math.log2(math.e))  # exponentials are taken as powers of two, which the hardware has
_FAR = tl.constexpr(1 << 30)  # a depth that no row has
_STORED_AT_ONCE = 1024  # columns of a row that one program stores


@dataclass(frozen=True)
class Scoring:
    """How a score comes from a query and a key, and which keys are near enough to have one."""

    scaling: float  # factor of the product, above zero
    window: int | None = None  # a key is seen when fewer positions back than this; `Sight.BLOCK`: either way
    softcap: float | None = None  # scores are bent into (-softcap, softcap) by tanh (Gemma 2)

    @property
    def is_plain(self) -> bool:
        """Whether every key of the prefix has the product's score."""
        return self.window is None and self.softcap is None


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
    tile, split, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2) % KV_HEADS
    place = (tl.program_id(2) // KV_HEADS).to(tl.int64)
    folded, lane = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    row, head, inside = folded // GROUPS, kv_head * GROUPS + folded % GROUPS, lane < HEAD_DIM
    count, length = tl.load(counts + place), tl.load(lengths + place)
    depths, bits = depths + place * rows, bits + place * rows * words
    depth = tl.load(depths + row, mask=row < count, other=_FAR)
    begin, end = share(length, count, depth, tile, split, window, GROUPS, SIGHT, WINDOWED, ROWS, KEYS, SPLITS)
    live = (row < count) & (begin < end)
    at_query = query + place * query_place + (row * query_row + head * query_head)[:, None] + lane[None, :]
    queries = tl.load(at_query, mask=live[:, None] & inside[None, :], other=0.0)
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    highest = tl.full((ROWS,), UNSEEN, dtype=tl.float32)
    weight = tl.zeros((ROWS,), dtype=tl.float32)
    committed, full = tl.cdiv(length, KEYS), length // KEYS
    pool_keys, pool_values = pool_keys + kv_head * pool_head, pool_values + kv_head * pool_head
    table = page_table + place * pages
    total, highest, weight = prefix(
        queries, pool_keys, pool_values, table, length, depth, begin, tl.minimum(end, full),
        total, highest, weight, pool_slot, scale, cap, window,
        HEAD_DIM, WIDTH, PAGE, CAPPED, WINDOWED, KEYS, STAGES, FULL=True,
    )  # fmt: skip
    total, highest, weight = prefix(
        queries, pool_keys, pool_values, table, length, depth, tl.maximum(begin, full),
        tl.minimum(end, committed), total, highest, weight, pool_slot, scale, cap, window,
        HEAD_DIM, WIDTH, PAGE, CAPPED, WINDOWED, KEYS, FEW, FULL=False,
    )  # fmt: skip
    at_keys = tail_keys + place * key_place + kv_head * key_head + lane[None, :]
    at_values = tail_values + place * value_place + kv_head * value_head + lane[None, :]
    total, highest, weight = own_rows(
        queries, at_keys, at_values, bits, depths, row, depth, live, count,
        tl.maximum(begin, committed) - committed, end - committed, total, highest, weight,
        key_row, value_row, words, scale, cap, window,
        HEAD_DIM, WIDTH, SIGHT, CAPPED, WINDOWED, KEYS, FEW,
    )  # fmt: skip
    at = ((place * rows + row) * (KV_HEADS * GROUPS) + head) * SPLITS + split
    mask = (row < rows) & (live | (SPLITS == 1))
    if SUNK and SPLITS == 1:
        sink = tl.load(sinks + head).to(tl.float32) * _LOG2_E
        now = tl.maximum(highest, sink)
        total = total * tl.exp2(highest - now)[:, None]
        weight = weight * tl.exp2(highest - now) + tl.exp2(sink - now)
    mean = tl.where(live[:, None], total / tl.where(weight > 0, weight, 1.0)[:, None], 0.0)
    tl.store(output + at[:, None] * HEAD_DIM + lane[None, :], mean, mask=mask[:, None] & inside[None, :])
    if SPLITS > 1:
        tl.store(sums + at, highest + tl.log2(tl.where(weight > 0, weight, 1.0)), mask=row < count)


@triton.jit(do_not_specialize=["rows"])
def _join_kernel(
    means, sums, counts, sinks, output, rows,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, SUNK: tl.constexpr,
    SPLITS: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, lane = tl.arange(0, JOINED), tl.arange(0, WIDTH)
    at, inside = (row * HEADS + head) * SPLITS + split, lane < HEAD_DIM
    # Read before it is known which of them were written: the answers of both loads are waited for once.
    mean = tl.load(
        means + at[:, None] * HEAD_DIM + lane[None, :],
        mask=(split < SPLITS)[:, None] & inside[None, :],
        other=0.0,
    )
    live = row % rows < tl.load(counts + row // rows)
    found = tl.load(sums + at, mask=split < SPLITS, other=UNSEEN)
    found = tl.where(live, found, UNSEEN)
    highest = tl.max(found, axis=0)
    if SUNK:
        sink = tl.load(sinks + head).to(tl.float32) * _LOG2_E
        highest = tl.maximum(highest, sink)
    base = tl.where(highest == UNSEEN, 0.0, highest)
    shares = tl.exp2(found - base)
    weight = tl.sum(shares, axis=0)
    if SUNK:
        weight += tl.exp2(sink - base)
    joined = tl.sum(shares[:, None] * tl.where(shares[:, None] > 0, mean, 0.0), axis=0)
    joined = joined / tl.where(weight > 0, weight, 1.0)
    tl.store(output + (row * HEADS + head) * HEAD_DIM + lane, joined, mask=inside)


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
    places, count, heads, head_dim = query.shape
    kv_heads = pool_keys.shape[1]
    assert query.dtype == tail_keys.dtype == tail_values.dtype == pool_keys.dtype, "one dtype for all"
    assert pool_keys.stride() == pool_values.stride(), "keys and values of a pool lie alike"
    assert scoring.scaling > 0, f"the highest product has the highest score, not with {scoring.scaling}"
    assert {t.stride(-1) for t in (query, tail_keys, tail_values, pool_keys)} == {1}, "dims lie side by side"
    shape = AttentionShape(
        places, count, heads, kv_heads, head_dim, rows.page_table.shape[1] * rows.page_size,
        query.element_size(),
    )  # fmt: skip
    teams = teams_for(shape) if scoring.is_plain and sinks is None and tiling is None else None
    if teams is not None and suits(query, pool_keys, rows, sight, teams):
        scale = scoring.scaling * _LOG2_E.value
        parts = attend_in_teams(
            query, tail_keys, tail_values, pool_keys, pool_values, rows, sight, scale, teams
        )
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        _join(
            parts.means, parts.sums, rows, None, join_warps_for(max(teams.many, teams.last), head_dim), output
        )
        return output
    cut = tiling_for(shape, tiling)
    return _attend(
        query, tail_keys, tail_values, pool_keys, pool_values, rows, sight, scoring, sinks, cut
    )  # fmt: skip


def _attend(
    query: torch.Tensor, tail_keys: torch.Tensor, tail_values: torch.Tensor,
    pool_keys: torch.Tensor, pool_values: torch.Tensor,
    rows: DeviceRows, sight: Sight, scoring: Scoring, sinks: torch.Tensor | None, cut: Tiling,
) -> torch.Tensor:  # fmt: skip
    """As the kernels of this module do it, which can do everything."""
    places, count, heads, head_dim = query.shape
    kv_heads = pool_keys.shape[1]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    means, sums = output, output
    if cut.splits > 1:
        parts = (places, count, heads, cut.splits)
        means = torch.empty((*parts, head_dim), dtype=torch.float32, device=query.device)
        sums = torch.empty(parts, dtype=torch.float32, device=query.device)
    capped, windowed = scoring.softcap is not None, scoring.window is not None
    cap = scoring.softcap or 1.0
    scale = 2.0 * scoring.scaling / cap if capped else scoring.scaling
    _attend_kernel[(triton.cdiv(count * (heads // kv_heads), cut.rows), cut.splits, places * kv_heads)](
        query, tail_keys, tail_values, pool_keys, pool_values, rows.page_table, rows.lengths, rows.counts,
        rows.depths, rows.bits, output if sinks is None else sinks, means, sums,
        *query.stride()[:3], *tail_keys.stride()[:3], *tail_values.stride()[:3], *pool_keys.stride()[:2],
        scale * _LOG2_E.value, cap * _LOG2_E.value, scoring.window or 0, count, rows.bits.shape[2],
        rows.page_table.shape[1],
        KV_HEADS=kv_heads, GROUPS=heads // kv_heads, HEAD_DIM=head_dim, WIDTH=padded(head_dim),
        PAGE=rows.page_size, SIGHT=int(sight), CAPPED=capped, WINDOWED=windowed, SUNK=sinks is not None,
        ROWS=cut.rows, KEYS=cut.keys, SPLITS=cut.splits, STAGES=cut.stages,
        FEW=min(cut.stages, 2), num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    if cut.splits > 1:
        _join(means, sums, rows, sinks, cut.join_warps, output)
    return output


def _join(
    means: torch.Tensor,  # [S, T, heads, splits, head_dim]
    sums: torch.Tensor,  # [S, T, heads, splits]
    rows: DeviceRows,
    sinks: torch.Tensor | None,
    warps: int,
    output: torch.Tensor,  # [S, T, heads, head_dim], written
) -> None:
    places, count, heads, splits, head_dim = means.shape
    _join_kernel[(places * count, heads)](
        means, sums, rows.counts, output if sinks is None else sinks, output, count,
        HEADS=heads, HEAD_DIM=head_dim, WIDTH=padded(head_dim), SUNK=sinks is not None,
        SPLITS=splits, JOINED=triton.next_power_of_2(splits), num_warps=warps,
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
