"""What the drafter's pass does besides matrix products, norms and attention, one kernel each.

    begin           the block's embeddings and the rotation of its rows
    keep_context    norm, rotation and storing of new context, all layers at once
    convolve        one of DFlash 2's convolutions over the block, with kernels put together on the way

Angles are worked out in float32 whatever the rows' dtype, and results are rounded where the PyTorch form of
the drafter rounds them. Grids depend on shapes alone. This module knows tensors, not the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ddtree.device.rows import DeviceRows

_COLUMNS = 1024  # of a row that one program takes


@dataclass(frozen=True)
class Angles:
    """How a position becomes a rotation."""

    frequencies: torch.Tensor  # [head_dim / 2] float32, radians per position
    scale: torch.Tensor  # [1] float32, factor on sine and cosine


@dataclass(frozen=True)
class Start:
    """What the pass over a block begins with."""

    hidden: torch.Tensor  # [S * B, H] embeddings
    cos: torch.Tensor  # [S * B, head_dim], both halves alike, as transformers has it
    sin: torch.Tensor  # [S * B, head_dim]
    nowhere: torch.Tensor  # [S * B] int64, all -1: the block's keys and values are stored nowhere


@dataclass(frozen=True)
class ContextKv:
    """New context as it comes out of the projection, and what its keys still need."""

    packed: torch.Tensor  # [S * M, L * 2 * kv_heads * head_dim] contiguous: by layer, keys and then values
    key_norm: torch.Tensor  # [L, head_dim] weights of the keys' RMS norm
    eps: float
    angles: Angles


@triton.jit
def _begin_kernel(
    roots, embedding, lengths, counts, depths, frequencies, scales, hidden, cos, sin, nowhere,
    block_size, width, mask_token, factor,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    place = row // block_size
    is_root = (row % block_size == 0) & (tl.load(counts + place) > 0)
    root = tl.load(roots + place)
    token = tl.where(is_root, root, mask_token).to(tl.int64)
    column = part * BLOCK + tl.arange(0, BLOCK)
    is_column = column < width
    loaded = tl.load(embedding + token * width + column, mask=is_column, other=0.0)
    value = (loaded.to(tl.float32) * factor).to(loaded.dtype)
    tl.store(hidden + row.to(tl.int64) * width + column, value, mask=is_column)
    if part == 0:
        lane = tl.arange(0, HALF_BLOCK)
        is_lane = lane < HALF
        position = (tl.load(lengths + place) + tl.load(depths + row)).to(tl.float32)
        angle = position * tl.load(frequencies + lane, mask=is_lane, other=0.0)
        scale = tl.load(scales)
        cosine = (tl.cos(angle) * scale).to(loaded.dtype)
        sine = (tl.sin(angle) * scale).to(loaded.dtype)
        at = row * (2 * HALF) + lane
        tl.store(cos + at, cosine, mask=is_lane)
        tl.store(cos + at + HALF, cosine, mask=is_lane)
        tl.store(sin + at, sine, mask=is_lane)
        tl.store(sin + at + HALF, sine, mask=is_lane)
        tl.store(nowhere + row, tl.full((), -1, tl.int64))


def begin(
    roots: torch.Tensor,  # [S] int64 token ids; those of empty places are not looked at
    embedding: torch.Tensor,  # [V, H] contiguous
    rows: DeviceRows,
    angles: Angles,
    *,
    mask_token: int,
    scale: float,  # factor on embeddings
) -> Start:
    """Embed root and mask tokens of every block and work out the rotation of each row."""
    count, width = rows.places * rows.rows, embedding.shape[1]
    half = angles.frequencies.shape[0]
    start = Start(
        hidden=embedding.new_empty(count, width),
        cos=embedding.new_empty(count, 2 * half),
        sin=embedding.new_empty(count, 2 * half),
        nowhere=torch.empty(count, dtype=torch.int64, device=embedding.device),
    )
    block = min(_COLUMNS, triton.next_power_of_2(width))
    _begin_kernel[(count, triton.cdiv(width, block))](
        roots, embedding, rows.lengths, rows.counts, rows.depths, angles.frequencies, angles.scale,
        start.hidden, start.cos, start.sin, start.nowhere, rows.rows, width, mask_token, scale,
        HALF=half, HALF_BLOCK=triton.next_power_of_2(half), BLOCK=block,
    )  # fmt: skip
    return start


@triton.jit
def _rounded(value, like):
    """A float32 value as it is after being kept in the dtype of `like`."""
    return value.to(like.dtype).to(tl.float32)


@triton.jit(do_not_specialize=["per_place", "pages"])
def _keep_kernel(
    packed, norm, frequencies, scales, page_table, lengths, counts, pool,
    per_place, pages, layer_stride, kind_stride, eps,
    KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    row, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place, index = row // per_place, row % per_place
    is_live = index < tl.load(counts + place)
    position = tl.load(lengths + place) + index
    page = tl.load(page_table + place.to(tl.int64) * pages + position // PAGE, mask=is_live, other=0)
    slot = page.to(tl.int64) * PAGE + position % PAGE
    head, lane = tl.arange(0, HEAD_BLOCK)[:, None], tl.arange(0, HALF_BLOCK)[None, :]
    is_lane = lane < HALF
    mask = (head < KV_HEADS) & is_lane & is_live
    inside = head * (2 * HALF) + lane
    keys = packed + (row.to(tl.int64) * tl.num_programs(1) + layer) * (4 * KV_HEADS * HALF) + inside
    loaded = tl.load(keys, mask=mask, other=0.0)
    low, high = loaded.to(tl.float32), tl.load(keys + HALF, mask=mask, other=0.0).to(tl.float32)
    values = keys + 2 * KV_HEADS * HALF
    value_low = tl.load(values, mask=mask, other=0.0)
    value_high = tl.load(values + HALF, mask=mask, other=0.0)

    squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
    scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
    weights = norm + layer * (2 * HALF) + lane
    low_weight = tl.load(weights, mask=is_lane, other=0.0).to(tl.float32)
    high_weight = tl.load(weights + HALF, mask=is_lane, other=0.0).to(tl.float32)
    low = _rounded(_rounded(low * scale, loaded) * low_weight, loaded)
    high = _rounded(_rounded(high * scale, loaded) * high_weight, loaded)
    angle = position.to(tl.float32) * tl.load(frequencies + lane, mask=is_lane, other=0.0)
    factor = tl.load(scales)
    cosine, sine = _rounded(tl.cos(angle) * factor, loaded), _rounded(tl.sin(angle) * factor, loaded)
    turned_low = _rounded(low * cosine, loaded) - high * sine
    turned_high = _rounded(high * cosine, loaded) + low * sine
    at = pool + layer * layer_stride + slot * (2 * KV_HEADS * HALF) + inside
    tl.store(at, turned_low.to(loaded.dtype), mask=mask)
    tl.store(at + HALF, turned_high.to(loaded.dtype), mask=mask)
    tl.store(at + kind_stride, value_low, mask=mask)
    tl.store(at + kind_stride + HALF, value_high, mask=mask)


def keep_context(
    context: ContextKv,
    counts: torch.Tensor,  # [S] int32, 0..M of each place's rows are new context, the first ones
    rows: DeviceRows,  # page table, and lengths before this context
    pool: torch.Tensor,  # [L, 2, slots, kv_heads, head_dim] contiguous, written
) -> None:
    """Norm and turn new keys, and store them and the values at the slots after the committed ones."""
    layers, _, _, kv_heads, head_dim = pool.shape
    count = context.packed.shape[0]
    _keep_kernel[(count, layers)](
        context.packed, context.key_norm, context.angles.frequencies, context.angles.scale,
        rows.page_table, rows.lengths, counts, pool, count // rows.places, rows.page_table.shape[1],
        pool.stride(0), pool.stride(1), context.eps,
        KV_HEADS=kv_heads, HALF=head_dim // 2, PAGE=rows.page_size,
        HEAD_BLOCK=triton.next_power_of_2(kv_heads), HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
    )  # fmt: skip


@triton.jit(do_not_specialize=["which"])
def _convolve_kernel(
    rows, dynamic, base, output, block_size, width, groups, which,
    KERNEL: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, is_column = row % block_size, column < width
    at = row.to(tl.int64) * width + column
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for offset in tl.static_range(KERNEL):
        is_there = is_column & (inside >= offset)
        loaded = tl.load(rows + at - offset * width, mask=is_there, other=0.0)
        entry = which * KERNEL + offset
        fixed = tl.load(base + entry * width + column, mask=is_column, other=0.0).to(tl.float32)
        own = dynamic + (row.to(tl.int64) * (2 * KERNEL) + entry) * groups + column // GROUP
        moving = tl.load(own, mask=is_column, other=0.0).to(tl.float32)
        product = _rounded(_rounded(fixed, loaded) + moving, loaded) * loaded.to(tl.float32)
        total = _rounded(total + product, loaded)
    tl.store(output + at, total.to(rows.dtype.element_ty), mask=is_column)


def convolve(
    rows: torch.Tensor,  # [S * B, H] contiguous
    dynamic: torch.Tensor,  # [S * B, 2 * kernel * H / group] contiguous, each row's part of both kernels
    base: torch.Tensor,  # [2, kernel, H] contiguous, the learnt part
    which: int,  # 0: the convolution before the sub-layer; 1: the one after
    block_size: int,
) -> torch.Tensor:
    """Weigh every row and those before it in its block, see `dflash2.convolve`. Gives `[S * B, H]`."""
    (count, width), kernel = rows.shape, base.shape[1]
    groups = dynamic.shape[1] // (2 * kernel)
    output = torch.empty_like(rows)
    block = min(_COLUMNS, triton.next_power_of_2(width))
    _convolve_kernel[(count, triton.cdiv(width, block))](
        rows, dynamic, base, output, block_size, width, groups, which,
        KERNEL=kernel, GROUP=width // groups, BLOCK=block,
    )  # fmt: skip
    return output
