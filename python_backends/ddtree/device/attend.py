"""Tree attention on the device behind transformers' interface, for layers that keep their own forward.

Layers of kinds that are not fused (experts, Gemma, GPT-OSS) call this in place of their attention, as they
call `attention.sdpa` elsewhere. It only changes shapes: what is seen and how that is computed, the kernels
know.
"""

from __future__ import annotations

import torch

from ddtree.device.kernels.attention import Scoring, store
from ddtree.device.kernels.attention import tree_attention as attend_to_tree
from ddtree.device.plan import DevicePlan


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, S * T, head_dim]
    key: torch.Tensor,  # [1, kv_heads, S * T, head_dim]
    value: torch.Tensor,  # [1, kv_heads, S * T, head_dim]
    plan: DevicePlan,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stage this layer's keys and values, then attend; gives `[1, S * T, heads, head_dim]`.

    Args:
        module: the attention layer, which knows its index.
        query: turned queries of all rows.
        key: turned keys of all rows.
        value: values of all rows.
        plan: the step.
        scaling: factor on the scores; None: one over the root of the head size.
        sliding_window: positions a row sees, itself included; None: all.
        softcap: scores are pressed into ± this by a tanh.
        s_aux: `[heads]`, the score of a place that takes attention and gives nothing.
    """
    layer, rows = int(module.layer_idx), plan.rows  # type: ignore[arg-type]
    pool_keys, pool_values = plan.keys(layer), plan.values(layer)
    queries, keys, values = (_by_place(tensor, plan) for tensor in (query, key, value))
    store(keys, values, pool_keys, pool_values, rows.slots)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(factor, sliding_window, softcap)
    attended = attend_to_tree(
        queries, keys, values, pool_keys, pool_values, rows, plan.sight, scoring, sinks=s_aux
    )
    return attended.flatten(0, 1)[None]


def _by_place(tensor: torch.Tensor, plan: DevicePlan) -> torch.Tensor:
    """Rows before heads, and apart by place, `[S, T, heads, head_dim]`: a view if dims lie side by side."""
    rows = tensor[0].transpose(0, 1)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    return rows.view(plan.rows.places, plan.rows.rows, *rows.shape[1:])
