"""The commit on the device: the accepted path's rows become the next committed slots.

A place's rows are staged in the slots after its committed ones, by row; its path goes to the first of them:

    staged     root  n1  n2  n3  n4           path 0, 2, 4 was accepted
    after      root  n2  n4  ··  ··           a slot may be source and destination at once, as n2's is here

This module knows neither trees nor models: it copies what paths name.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree.device.rows import DeviceRows
from ddtree.device.trees import DeviceAcceptance

_COLUMNS = 256  # values of a row that one program moves
_WIDE_COLUMNS = 1024  # of those that copy one row each


@triton.jit(do_not_specialize=["pool_slots", "rows", "depth"])
def _commit_kernel(
    keys_values, slots, counts, accepted_counts, path_rows,
    pool_slots, size, rows, depth,
    PATH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    sequence, plane, tile = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.where(tl.load(counts + sequence) > 0, tl.load(accepted_counts + sequence) + 1, 0)
    step = tl.arange(0, PATH)
    is_step = step < length
    row = tl.load(path_rows + sequence * (depth + 1) + step, mask=is_step, other=0)
    source = tl.load(slots + sequence * rows + row, mask=is_step, other=-1)
    destination = tl.load(slots + sequence * rows + step, mask=is_step, other=-1)
    moves = (source >= 0) & (source != destination)  # a path's row is at or after its step: no slot, no goal
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    mask = moves[:, None] & (column < size)[None, :]
    first = plane * pool_slots
    values = tl.load(keys_values + (first + source)[:, None] * size + column[None, :], mask=mask, other=0.0)
    # Threads of this program own different rows of the tile, and one's destination is another's source: none
    # may store before all have loaded.
    tl.debug_barrier()
    tl.store(keys_values + (first + destination)[:, None] * size + column[None, :], values, mask=mask)


@triton.jit(do_not_specialize=["rows", "depth"])
def _gather_kernel(
    values, accepted_counts, path_rows, gathered, size, rows, depth, COLUMNS: tl.constexpr
):  # fmt: skip
    step, tile = tl.program_id(0), tl.program_id(1)
    sequence = step // (depth + 1)
    is_step = step % (depth + 1) <= tl.load(accepted_counts + sequence)
    row = (sequence * rows + tl.load(path_rows + step)).to(tl.int64)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    value = tl.load(values + row * size + column, mask=inside & is_step, other=0.0)
    tl.store(gathered + step.to(tl.int64) * size + column, value, mask=inside)


@triton.jit(do_not_specialize=["rows", "depth"])
def _keep_kernel(
    values, slots, counts, accepted_counts, pool, size, rows, depth, COLUMNS: tl.constexpr
):  # fmt: skip
    step, tile = tl.program_id(0), tl.program_id(1)
    sequence, place_on_path = step // (depth + 1), step % (depth + 1)
    length = tl.where(tl.load(counts + sequence) > 0, tl.load(accepted_counts + sequence) + 1, 0)
    slot = tl.load(slots + sequence * rows + place_on_path, mask=place_on_path < length, other=-1)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < size) & (slot >= 0)
    value = tl.load(values + step.to(tl.int64) * size + column, mask=inside, other=0.0)
    tl.store(pool + slot * size + column, value, mask=inside)


def commit_rows(
    pool_keys_values: torch.Tensor,  # [L, 2, slots, kv_heads, head_dim], changed
    rows: DeviceRows,
    acceptance: DeviceAcceptance,
) -> None:
    """Move root and accepted path of each place to the slots of its first rows, all layers in one launch.

    Those are the slots of the positions from the committed length on, whoever counts them as committed. Rows
    may overlap: one program moves all rows of its layer and columns, and loads all before it stores any;
    programs share no memory that one of them writes, since sequences stage in slots of their own. Rows that
    stand where they belong, and those of empty places, are not touched.
    """
    layers, both, pool_slots, heads, head_dim = pool_keys_values.shape
    assert pool_keys_values.is_contiguous(), "a pool is one contiguous tensor"
    size, depth = heads * head_dim, acceptance.depth
    columns = min(_COLUMNS, triton.next_power_of_2(size))
    _commit_kernel[(rows.places, layers * both, triton.cdiv(size, columns))](
        pool_keys_values, rows.slots, rows.counts, acceptance.accepted_counts, acceptance.path_rows,
        pool_slots, size, rows.rows, depth,
        PATH=triton.next_power_of_2(depth + 1), COLUMNS=columns, num_warps=4,
    )  # fmt: skip


def gather_rows(
    values: torch.Tensor,  # [S * T, C]
    acceptance: DeviceAcceptance,
) -> torch.Tensor:
    """Give what stands at root and accepted path, `[S, D + 1, C]`, zeros behind a path's end; one launch.

    Whatever stands in other rows, NaN included, does not show.
    """
    places, depth, size = len(acceptance.accepted_counts), acceptance.depth, values.shape[1]
    gathered = torch.empty((places, depth + 1, size), dtype=values.dtype, device=values.device)
    columns = min(_WIDE_COLUMNS, triton.next_power_of_2(size))
    _gather_kernel[(places * (depth + 1), triton.cdiv(size, columns))](
        values.contiguous(), acceptance.accepted_counts, acceptance.path_rows, gathered,
        size, len(values) // places, depth, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return gathered


def keep_rows(
    values: torch.Tensor,  # [S, D + 1, C]
    pool: torch.Tensor,  # [slots, C], changed
    rows: DeviceRows,
    acceptance: DeviceAcceptance,
) -> None:
    """Store what belongs to root and accepted path beside the KV that `commit_rows` moved; one launch.

    Nothing is stored of empty places, behind a path's end, and where a row has no slot.
    """
    places, steps, size = values.shape
    assert steps == acceptance.depth + 1, f"a row for root and each of {acceptance.depth} nodes, not {steps}"
    columns = min(_WIDE_COLUMNS, triton.next_power_of_2(size))
    _keep_kernel[(places * steps, triton.cdiv(size, columns))](
        values.contiguous(), rows.slots, rows.counts, acceptance.accepted_counts, pool,
        size, rows.rows, acceptance.depth, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
