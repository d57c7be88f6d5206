"""The engine's attention and cache as recorded, the slow way: bits read one by one, rows copied one by one.

Written from what the recorded kernels consume, not from how ours packs it: a flat packed mask, offsets,
generation lengths and KV lengths; a pool of blocks with a table per request.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

_WORD = 0xFFFFFFFF


def sees(words: Sequence[int], column: int) -> bool:
    """Whether a mask row of 32-bit words, as signed numbers, has the bit of a column."""
    return bool((words[column // 32] & _WORD) >> (column % 32) & 1)


def tree_attention(
    query: torch.Tensor,  # [sum n, heads, head_dim]
    keys: Sequence[torch.Tensor],  # per request [kv_len, kv_heads, head_dim]
    values: Sequence[torch.Tensor],
    packed_mask: torch.Tensor,  # read flat: request r starts at sum of n * ceil(n / 32) of those before it
    generation_lengths: Sequence[int],
    kv_lens: Sequence[int],
) -> torch.Tensor:
    """Attention of n rows per request over all before them and by their mask; `[sum n, heads, head_dim]`.

    Invisible keys are left out instead of masked, so one that was never written does no harm.
    """
    flat = packed_mask.reshape(-1).tolist()
    outputs, row, at = [], 0, 0
    for request, count in enumerate(generation_lengths):
        words = -(-count // 32)
        base = kv_lens[request] - count
        for node in range(count):
            bits = flat[at + node * words : at + (node + 1) * words]
            visible = [*range(base), *(base + j for j in range(count) if sees(bits, j))]
            outputs.append(_attend(query[row], keys[request][visible], values[request][visible]))
            row += 1
        at += count * words
    return torch.stack(outputs)


def causal_attention(
    query: torch.Tensor,  # [n, heads, head_dim]
    keys: torch.Tensor,  # [kv_len, kv_heads, head_dim]
    values: torch.Tensor,
) -> torch.Tensor:
    """The last n of kv_len rows, each seeing those before it."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,nhd->hqn", query, keys) * query.shape[-1] ** -0.5
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(keys.shape[0] - query.shape[0])
    return torch.einsum("hqn,nhd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values)


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    groups = query.shape[0] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = torch.einsum("hd,nhd->hn", query, keys) * query.shape[-1] ** -0.5
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), values)


def turn(rotary: torch.nn.Module, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate rows `[n, heads, head_dim]` to their positions `[n]`."""
    cos, sin = rotary(rows, positions[None].long())
    turned, _ = apply_rotary_pos_emb(rows[None], rows[None], cos, sin, unsqueeze_dim=2)
    result: torch.Tensor = turned[0]
    return result


class PagedPool:
    """Blocks of keys and values, handed out scattered and from the back; unwritten rows are NaN."""

    def __init__(self, layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int) -> None:
        self.block_size = block_size
        self.rows = torch.full((layers, 2, blocks, block_size, kv_heads, head_dim), float("nan"))
        self.free = [*range(0, blocks, 2), *range(1, blocks, 2)]
        self.tables: dict[int, list[int]] = {}

    def open(self, request: int, tokens: int) -> bool:
        wanted = -(-tokens // self.block_size)
        if wanted > len(self.free):
            return False
        assert request not in self.tables, f"request {request} is open"
        self.tables[request] = [self.free.pop() for _ in range(wanted)]
        return True

    def close(self, request: int) -> None:
        blocks = self.tables.pop(request)
        self.rows[:, :, blocks] = float("nan")
        self.free += blocks

    def write(self, request: int, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        places = [self._at(request, start + index) for index in range(len(keys))]
        blocks, offsets = torch.tensor(places).T
        self.rows[layer, 0, blocks, offsets] = keys
        self.rows[layer, 1, blocks, offsets] = values

    def read(self, request: int, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = self.tables[request]
        assert stop <= len(blocks) * self.block_size, f"{stop} rows of a request with {len(blocks)} blocks"
        keys, values = self.rows[layer][:, blocks].flatten(1, 2)[:, :stop]
        return keys, values

    def copy(self, request: int, source: int, destination: int) -> None:
        """One row, all layers."""
        (block, offset), (to_block, to_offset) = self._at(request, source), self._at(request, destination)
        self.rows[:, :, to_block, to_offset] = self.rows[:, :, block, offset]

    def _at(self, request: int, position: int) -> tuple[int, int]:
        blocks = self.tables[request]
        assert 0 <= position < len(blocks) * self.block_size, (
            f"row {position} of a request with {len(blocks)} blocks of {self.block_size}"
        )
        return blocks[position // self.block_size], position % self.block_size
