# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, attr-defined"
# A kernel's parameters are what `triton.jit` makes of them: no annotation but constexpr has a meaning there.
"""GPU kernels of generation: attention of one new token per slot over its cache, and choosing that token.

Imported only where there is a CUDA device, since the CPU build of torch brings no `triton`. Both have a plain
twin in `decode_attention` and `slots`, which the CPU runs and the tests compare with.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _decode(
    query, key, value, cached_keys, cached_values, positions, output,
    scale, capacity, group: tl.constexpr, width: tl.constexpr, rows: tl.constexpr,
    padded: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    # One program per slot and key head; the key head's query heads are the rows of one matmul.
    slot, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    pair = (slot * heads + head).to(tl.int64)
    place = tl.load(positions + slot).to(tl.int32)
    row, lane = tl.arange(0, rows), tl.arange(0, padded)
    real = lane < width
    query_at = pair * group * width + row[:, None] * width + lane[None, :]
    inside = (row[:, None] < group) & real[None, :]
    queries = tl.load(query + query_at, mask=inside, other=0.0)
    new_key = tl.load(key + pair * width + lane, mask=real, other=0.0)
    new_value = tl.load(value + pair * width + lane, mask=real, other=0.0)
    base = pair * capacity * width
    tl.store(cached_keys + base + place * width + lane, new_key, mask=real)
    tl.store(cached_values + base + place * width + lane, new_value, mask=real)
    # The new token comes from registers, so the stores above need not be seen by the loads below.
    best = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
    total = tl.full([rows], 1.0, tl.float32)
    mixed = tl.zeros([rows, padded], tl.float32) + new_value.to(tl.float32)[None, :]
    for start in range(0, place, block):
        token = start + tl.arange(0, block)
        seen = token < place
        at = base + token[:, None] * width + lane[None, :]
        here = seen[:, None] & real[None, :]
        keys = tl.load(cached_keys + at, mask=here, other=0.0)
        scores = tl.dot(queries, tl.trans(keys)).to(tl.float32) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        peak = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - peak[:, None])
        fade = tl.exp(best - peak)
        values = tl.load(cached_values + at, mask=here, other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(values.dtype), values).to(tl.float32)
        total = total * fade + tl.sum(weights, 1)
        best = peak
    result = mixed / total[:, None]
    tl.store(output + query_at, result.to(output.dtype.element_ty), mask=inside)


def decode_attention(
    query: torch.Tensor,  # [S, heads, width]
    key: torch.Tensor,  # [S, kv_heads, width] of the new token
    value: torch.Tensor,
    cached_keys: torch.Tensor,  # [S, kv_heads, capacity, width]
    cached_values: torch.Tensor,
    positions: torch.Tensor,  # [S] int64, where the new token stands
    scale: float,
) -> torch.Tensor:
    """Store each slot's new key and value and attend over its tokens so far; `[S, heads, width]`."""
    slots, heads, width = query.shape
    kv_heads, capacity = cached_keys.shape[1:3]
    group = heads // kv_heads
    output = torch.empty_like(query)
    _decode[(slots, kv_heads)](
        query, key, value, cached_keys, cached_values, positions, output,
        scale, capacity, group=group, width=width, rows=max(16, triton.next_power_of_2(group)),
        padded=max(16, triton.next_power_of_2(width)), block=64, num_warps=4,
    )  # fmt: skip
    return output


@triton.jit
def _choose(logits, temperatures, seed, chosen, vocabulary, block: tl.constexpr):
    slot = tl.program_id(0)
    temperature = tl.load(temperatures + slot)
    stream = tl.load(seed)
    best = float("-inf")
    winner = 0
    for start in range(0, vocabulary, block):
        token = start + tl.arange(0, block)
        inside = token < vocabulary
        scores = tl.load(logits + slot.to(tl.int64) * vocabulary + token, mask=inside, other=float("-inf"))
        scores = scores.to(tl.float32)
        if temperature > 0:
            uniform = tl.rand(stream, slot * vocabulary + token)
            # Gumbel noise scaled by the temperature: the winner is a draw from softmax(logits / temperature).
            scores -= temperature * tl.log(-tl.log(tl.maximum(uniform, 1e-10)))
        peak = tl.max(scores, 0)
        if peak > best:
            best = peak
            winner = start + tl.argmax(scores, 0)
    tl.store(chosen + slot, winner.to(tl.int64))


def choose_tokens(
    logits: torch.Tensor,  # [S, V]
    temperatures: torch.Tensor,  # [S] float32; 0: the most probable token
    seed: torch.Tensor,  # [1] int64, another one for every step
) -> torch.Tensor:
    """Draw one token per slot; `[S]` int64."""
    slots, vocabulary = logits.shape
    chosen = torch.empty(slots, dtype=torch.int64, device=logits.device)
    launch: Any = _choose[(slots,)]
    launch(logits, temperatures, seed, chosen, vocabulary, block=4096, num_warps=8)
    return chosen
