"""Tree attention over the paged cache by PyTorch's scaled dot product, behind transformers' interface.

transformers calls the function registered here in every attention layer of the target, so the model's own
code stays untouched. Every query sees the whole committed prefix; within the staged rows it sees what the
step plan says. The CPU path; it is also the reference for other backends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from ddtree.attention.plan import Segment, StepPlan

ATTENTION_NAME = "ddtree_sdpa"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


class UnsupportedAttention(Exception):
    """The target's attention asks for something this backend does not compute."""


def register() -> str:
    """Make the attention known to transformers and give the name to load a target with."""
    AttentionInterface.register(ATTENTION_NAME, tree_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
    return ATTENTION_NAME


def _no_mask(*_: Any, **__: Any) -> None:
    """Transformers need not build a mask: the step plan has it."""


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, rows, head_dim]
    key: torch.Tensor,  # [1, kv_heads, rows, head_dim]
    value: torch.Tensor,  # [1, kv_heads, rows, head_dim]
    attention_mask: torch.Tensor | None,
    *,
    ddtree_plan: StepPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Stage this layer's keys and values, then attend; gives `[1, rows, heads, head_dim]`.

    Raises:
        UnsupportedAttention: the layer wants soft-capping, attention sinks or a position bias.
    """
    del attention_mask  # always None: see _no_mask
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise UnsupportedAttention(name)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    ddtree_plan.pool.write(layer, ddtree_plan.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    outputs = []
    for index, segment in enumerate(ddtree_plan.segments):
        rows = query[:, :, segment.start : segment.stop]
        groups = query.shape[1] // key.shape[1]
        mask = ddtree_plan.mask(index, sliding_window, groups, query.dtype)
        outputs.append(_attend(ddtree_plan, layer, segment, rows, mask, scaling))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), None


def _attend(
    plan: StepPlan,
    layer: int,
    segment: Segment,
    rows: torch.Tensor,  # [1, heads, count, head_dim]
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of one segment, `[1, count, heads, head_dim]`.

    Query heads that share a KV head are folded into rows, so that the keys are read once per KV head.
    """
    keys, values = plan.pool.read(layer, segment.pages, segment.prefix + segment.count)
    kv_heads, head_dim = keys.shape[1:]
    folded = rows.reshape(1, kv_heads, -1, head_dim)
    attended = functional.scaled_dot_product_attention(
        folded, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], attn_mask=mask, scale=scaling
    )
    return attended.reshape(1, -1, segment.count, head_dim).transpose(1, 2)
