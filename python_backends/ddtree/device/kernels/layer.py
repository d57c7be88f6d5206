"""What stands between the matrix products of a Llama-like decoder layer, one kernel each.

    add_norm    residual sum and RMS norm
    turn        norms of query and key heads, rotary positions, keys and values into the pool
    open_gates  what was attended to, times the sigmoid of each query head's own gate
    gate        silu(gate) * up

A decoder layer of transformers spends two thirds of its launches on these, each a pass over a few rows that
takes longer to start than to run. Results are rounded where transformers rounds them (what is not float32 is
rounded after every product and sum), so that a bf16 model keeps its own numbers.

Grids depend on shapes alone. This module knows tensors, neither models nor plans.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_GATE_BLOCK = 1024
_MANY_PROGRAMS = 4096  # enough to fill a large card; beyond, a program of `turn` takes more heads


@triton.jit
def _rounded(value, like):
    """A float32 value as it is after being kept in the dtype of `like`."""
    return value.to(like.dtype).to(tl.float32)


@triton.jit
def _scaled(value, factor, like, IS_CENTRED: tl.constexpr):
    """Times a norm's weight. Llama's norms round before that; centred ones only after, and scale by 1 + w."""
    return value * (1.0 + factor) if IS_CENTRED else _rounded(value, like) * factor


@triton.jit
def _add_norm_kernel(
    hidden, update, weight, normed, summed, width, eps,
    HAS_UPDATE: tl.constexpr, IS_CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first, column = tl.program_id(0).to(tl.int64) * width, tl.arange(0, BLOCK)
    is_column = column < width
    factor = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    loaded = tl.load(hidden + first + column, mask=is_column, other=0.0)
    value = loaded.to(tl.float32)
    if HAS_UPDATE:
        value += tl.load(update + first + column, mask=is_column, other=0.0).to(tl.float32)
        value = _rounded(value, loaded)
        tl.store(summed + first + column, value.to(loaded.dtype), mask=is_column)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    output = _scaled(value * scale, factor, loaded, IS_CENTRED)
    tl.store(normed + first + column, output.to(loaded.dtype), mask=is_column)


def add_norm(
    hidden: torch.Tensor,  # [R, H]
    update: torch.Tensor | None,  # [R, H], or None: nothing is added
    weight: torch.Tensor,  # [H]
    eps: float,
    is_centred: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add, then RMS norm with the rounding of `LlamaRMSNorm`; centred as `centred_norm` and its rounding.

    Tensors are contiguous and of one dtype.

    Returns:
        The normed sum and the sum, each `[R, H]`; without an update the sum is `hidden` itself.
    """
    rows, width = hidden.shape
    normed = torch.empty_like(hidden)
    summed = hidden if update is None else torch.empty_like(hidden)
    block = triton.next_power_of_2(width)
    _add_norm_kernel[(rows,)](
        hidden, update, weight, normed, summed, width, eps,
        HAS_UPDATE=update is not None, IS_CENTRED=is_centred, BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return normed, summed


@dataclass(frozen=True)
class Heads:
    """What a packed row of queries, keys and values is made of, and how its heads are prepared."""

    queries: int
    keys: int  # KV heads
    size: int  # of a head
    query_norm: torch.Tensor | None = None  # [size], RMS norm of each query head; with `key_norm` or neither
    key_norm: torch.Tensor | None = None  # [size]
    eps: float = 0.0  # of both norms
    is_centred: bool = False  # whether both norms scale by one plus their weight
    is_gated: bool = False  # whether each query head is followed by its output gate, [size]

    @property
    def width(self) -> int:
        """Columns of a packed row."""
        return (self.queries * (2 if self.is_gated else 1) + 2 * self.keys) * self.size


@triton.jit
def _normed(value, scale, factor, loaded, IS_CENTRED: tl.constexpr):
    return _rounded(_scaled(value * scale[:, None], factor, loaded, IS_CENTRED), loaded)


@triton.jit
def _turn_kernel(
    packed, cos, sin, query_norm, key_norm, pool_keys, pool_values, slots,
    row_stride, angle_stride, slot_stride, queries, keys, eps,
    SIZE: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr, IS_CENTRED: tl.constexpr, GATE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    # A program owns both halves of its heads: nobody else reads what it writes in place.
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    is_query, is_turned = head < queries, head < queries + keys
    is_value = (head >= queries + keys) & (head < queries + 2 * keys)
    slot = tl.load(slots + row)
    own = packed + row * row_stride + head * SIZE + tl.minimum(head, queries) * GATE
    key_place = pool_keys + slot * slot_stride + (head - queries) * SIZE
    value_place = pool_values + slot * slot_stride + (head - queries - keys) * SIZE
    is_stored_key = is_turned & (head >= queries) & (slot >= 0)
    is_stored_value = is_value & (slot >= 0)

    lane = tl.arange(0, HALF_BLOCK)[None, :]
    is_lane = lane < HALF
    is_read = is_lane & (is_turned | is_value)
    loaded = tl.load(own + lane, mask=is_read, other=0.0)
    low, high = loaded.to(tl.float32), tl.load(own + HALF + lane, mask=is_read, other=0.0).to(tl.float32)
    angles = row * angle_stride + lane
    low_cos = tl.load(cos + angles, mask=is_lane, other=0.0).to(tl.float32)
    low_sin = tl.load(sin + angles, mask=is_lane, other=0.0).to(tl.float32)
    high_cos = tl.load(cos + angles + HALF, mask=is_lane, other=0.0).to(tl.float32)
    high_sin = tl.load(sin + angles + HALF, mask=is_lane, other=0.0).to(tl.float32)
    # Values pass unchanged: stored before the norm and the rotation take the names over.
    tl.store(value_place + lane, low.to(loaded.dtype), mask=is_lane & is_stored_value)
    tl.store(value_place + HALF + lane, high.to(loaded.dtype), mask=is_lane & is_stored_value)
    squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
    if REST_BLOCK > 0:
        rest_lane = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        is_rest = rest_lane < SIZE
        rest = tl.load(own + rest_lane, mask=is_rest & (is_turned | is_value), other=0.0).to(tl.float32)
        tl.store(value_place + rest_lane, rest.to(loaded.dtype), mask=is_rest & is_stored_value)
        squares += tl.sum(rest * rest, axis=1)
    if HAS_NORM:
        scale = tl.rsqrt(squares / SIZE + eps)
        of_query = tl.load(query_norm + lane, mask=is_lane, other=0.0).to(tl.float32)
        of_key = tl.load(key_norm + lane, mask=is_lane, other=0.0).to(tl.float32)
        low = _normed(low, scale, tl.where(is_query, of_query, of_key), loaded, IS_CENTRED)
        of_query = tl.load(query_norm + HALF + lane, mask=is_lane, other=0.0).to(tl.float32)
        of_key = tl.load(key_norm + HALF + lane, mask=is_lane, other=0.0).to(tl.float32)
        high = _normed(high, scale, tl.where(is_query, of_query, of_key), loaded, IS_CENTRED)
    turned_low = _rounded(low * low_cos, loaded) + _rounded(-high * low_sin, loaded)
    turned_high = _rounded(high * high_cos, loaded) + _rounded(low * high_sin, loaded)
    tl.store(own + lane, turned_low.to(loaded.dtype), mask=is_lane & is_turned)
    tl.store(own + HALF + lane, turned_high.to(loaded.dtype), mask=is_lane & is_turned)
    tl.store(key_place + lane, turned_low.to(loaded.dtype), mask=is_lane & is_stored_key)
    tl.store(key_place + HALF + lane, turned_high.to(loaded.dtype), mask=is_lane & is_stored_key)
    if REST_BLOCK > 0:
        if HAS_NORM:
            of_query = tl.load(query_norm + rest_lane, mask=is_rest, other=0.0).to(tl.float32)
            of_key = tl.load(key_norm + rest_lane, mask=is_rest, other=0.0).to(tl.float32)
            rest = _normed(rest, scale, tl.where(is_query, of_query, of_key), loaded, IS_CENTRED)
            tl.store(own + rest_lane, rest.to(loaded.dtype), mask=is_rest & is_turned)
        tl.store(key_place + rest_lane, rest.to(loaded.dtype), mask=is_rest & is_stored_key)


def turn(
    packed: torch.Tensor,  # [R, heads.width]: queries (with gates), keys, values; changed in place
    cos: torch.Tensor,  # [R, head size or less]
    sin: torch.Tensor,  # [R, head size or less]
    heads: Heads,
    pool_keys: torch.Tensor,  # [slots, KV heads, head size], of one layer
    pool_values: torch.Tensor,  # [slots, KV heads, head size]
    slots: torch.Tensor,  # [R] int64; -1: stored nowhere
) -> None:
    """Norm and turn query and key heads in place, and store keys and values in the pool.

    Halves are rotated as by transformers' `rotate_half`; dimensions of a head beyond the width of `cos` are
    not turned. Rows of all tensors are contiguous, the pool's two from `KvPool`, all of one dtype.
    """
    rows, total = packed.shape[0], heads.queries + 2 * heads.keys
    half = cos.shape[1] // 2
    rest = heads.size - 2 * half
    assert packed.shape[1] == heads.width, "a packed row is queries, keys and values"
    assert cos.stride() == sin.stride(), "cosines and sines are laid out alike"
    assert pool_keys.stride() == pool_values.stride(), "keys and values of the pool are laid out alike"
    at_once = 2 if rows * total <= 2 * _MANY_PROGRAMS else 8
    _turn_kernel[(rows, triton.cdiv(total, at_once))](
        packed, cos, sin, heads.query_norm, heads.key_norm, pool_keys, pool_values, slots,
        packed.stride(0), cos.stride(0), pool_keys.stride(0), heads.queries, heads.keys, heads.eps,
        SIZE=heads.size, HALF=half, HALF_BLOCK=triton.next_power_of_2(half),
        REST_BLOCK=triton.next_power_of_2(rest) if rest else 0,
        HAS_NORM=heads.query_norm is not None, IS_CENTRED=heads.is_centred,
        GATE=heads.size if heads.is_gated else 0, HEADS=at_once, num_warps=1,
        enable_fp_fusion=False,  # a product is rounded before it is added, as transformers rounds it
    )  # fmt: skip


@triton.jit
def _gate_kernel(gate_up, output, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < width
    loaded = tl.load(gate_up + row * 2 * width + column, mask=is_column, other=0.0)
    gate = loaded.to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=is_column, other=0.0).to(tl.float32)
    active = _rounded(gate / (1.0 + tl.exp(-gate)), loaded)
    tl.store(output + row * width + column, (active * up).to(loaded.dtype), mask=is_column)


def gate(
    gate_up: torch.Tensor,  # [R, 2 * I] contiguous: gates, then ups
) -> torch.Tensor:
    """Give silu(gate) * up, `[R, I]`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(rows, width)
    _gate_kernel[(rows, triton.cdiv(width, _GATE_BLOCK))](
        gate_up, output, width, BLOCK=_GATE_BLOCK, num_warps=4
    )
    return output


@triton.jit
def _open_gates_kernel(attended, packed, width, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < width
    at = row * width + column
    gate_at = row * row_stride + column // SIZE * (2 * SIZE) + SIZE + column % SIZE
    loaded = tl.load(attended + at, mask=is_column, other=0.0)
    gate = tl.load(packed + gate_at, mask=is_column, other=0.0).to(tl.float32)
    share = _rounded(1.0 / (1.0 + tl.exp(-gate)), loaded)
    tl.store(attended + at, (loaded.to(tl.float32) * share).to(loaded.dtype), mask=is_column)


def open_gates(
    attended: torch.Tensor,  # [R, queries * size] contiguous; changed in place
    packed: torch.Tensor,  # [R, heads.width], gated
    heads: Heads,
) -> torch.Tensor:
    """Multiply every query head's output by the sigmoid of its gate; gives `attended`."""
    rows, width = attended.shape
    assert heads.is_gated, "every query head has a gate behind it"
    _open_gates_kernel[(rows, triton.cdiv(width, _GATE_BLOCK))](
        attended, packed, width, packed.stride(0), SIZE=heads.size, BLOCK=_GATE_BLOCK, num_warps=4
    )
    return attended
