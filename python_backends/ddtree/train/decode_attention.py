"""Attention of a frozen target for generation and for tapping, behind transformers' attention interface.

The target's own code runs unchanged. With a `SlotCache` each row of the batch is one new token of a slot with
its own length; without one, rows are whole sequences and every token sees those before it. Padding stands at
the end, where no real token sees it, so no mask is ever made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

from ddtree.errors import InvalidArgument

ATTENTION_NAME = "ddtree_train"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


@dataclass
class SlotCache:
    """Keys and values of all slots; a slot's tokens `[0, positions[slot])` are valid."""

    keys: list[torch.Tensor]  # per layer [S, kv_heads, capacity, head_dim]
    values: list[torch.Tensor]
    positions: torch.Tensor  # [S] int64, where each slot's next token stands

    @classmethod
    def empty(cls, config: Any, slots: int, capacity: int, like: torch.Tensor) -> SlotCache:
        """Allocate for a target's text configuration, on the device and in the dtype of `like`."""
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        width = int(getattr(config, "head_dim", None) or int(config.hidden_size) // heads)
        shape = (slots, kv_heads, capacity, width)

        def one_per_layer() -> list[torch.Tensor]:
            return [like.new_zeros(shape) for _ in range(int(config.num_hidden_layers))]

        positions = torch.zeros(slots, dtype=torch.int64, device=like.device)
        return cls(one_per_layer(), one_per_layer(), positions)


def register() -> str:
    """Make the attention known to transformers and give the name to load a target with.

    No mask function is registered: transformers then makes no mask, where with one it would look into the
    positions first, which waits for the device and cannot be captured.
    """
    AttentionInterface.register(ATTENTION_NAME, attend)
    return ATTENTION_NAME


def check_window(config: Any, length: int) -> None:
    """Refuse sequences longer than a sliding window of the target: no mask is made for one.

    Raises:
        InvalidArgument: naming the window.
    """
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and length > window:
        raise InvalidArgument.of(
            "max_length", f"must be at most the target's sliding window {window}", length, "shorten it"
        )


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # [S, heads, rows, head_dim]
    key: torch.Tensor,  # [S, kv_heads, rows, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    ddtree_slots: SlotCache | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend; gives `[S, rows, heads, head_dim]`.

    Raises:
        InvalidArgument: the layer wants soft-capping, attention sinks or a position bias.
    """
    del attention_mask  # always None: see register
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise InvalidArgument.of("target", f"must not use attention with {name}", name, "train another")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if ddtree_slots is None:
        gqa = query.shape[1] != key.shape[1]
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=gqa)
        return seen.transpose(1, 2), None
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    keys, values = ddtree_slots.keys[layer], ddtree_slots.values[layer]
    step = _kernel if query.is_cuda else _plain
    seen = step(query[:, :, 0], key[:, :, 0], value[:, :, 0], keys, values, ddtree_slots.positions, scale)
    return seen.unsqueeze(1), None


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    from ddtree.train.kernels import decode_attention

    rows = query.contiguous(), key.contiguous(), value.contiguous()
    return decode_attention(*rows, keys, values, positions, scale)


def _plain(
    query: torch.Tensor,  # [S, heads, head_dim]
    key: torch.Tensor,  # [S, kv_heads, head_dim]
    value: torch.Tensor,
    keys: torch.Tensor,  # [S, kv_heads, capacity, head_dim]
    values: torch.Tensor,
    positions: torch.Tensor,  # [S]
    scale: float,
) -> torch.Tensor:
    slots = torch.arange(len(query), device=query.device)
    keys[slots, :, positions] = key
    values[slots, :, positions] = value
    seen = torch.arange(keys.shape[2], device=query.device) <= positions[:, None]
    grouped = query.unflatten(1, (keys.shape[1], -1))
    output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen[:, None, None], scale=scale)
    return output.flatten(1, 2)
