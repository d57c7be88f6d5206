"""Tree attention over the paged cache by PyTorch's scaled dot product, behind transformers' interface.

transformers calls the function registered here in every attention layer of the target, so the model's own
code stays untouched. Every query sees the whole committed prefix; within the staged rows it sees what the
step plan says. Soft-capped scores and attention sinks, which the scaled dot product does not know, are worked
out step by step. The CPU path; it is also the reference for other backends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from ddtree.attention.plan import StepPlan
from ddtree.device.plan import DevicePlan

# Not named after sdpa: transformers would refuse it for models whose own sdpa path is missing (GPT-OSS).
ATTENTION_NAME = "ddtree_tree"
# What a layer may ask for that is not computed here; any other option leaves the scores as they are.
_UNSUPPORTED = ("position_bias", "indices", "block_indices")


class UnsupportedAttention(Exception):
    """The target's attention asks for something this backend does not compute; the message names it."""


def register() -> str:
    """Make the attention known to transformers and give the name to load a target with.

    No mask function goes with it: then transformers builds none (the step plan has it), and does not look at
    the positions either, which on a GPU would wait for the device.
    """
    AttentionInterface.register(ATTENTION_NAME, tree_attention)
    return ATTENTION_NAME


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, rows, head_dim]
    key: torch.Tensor,  # [1, kv_heads, rows, head_dim]
    value: torch.Tensor,  # [1, kv_heads, rows, head_dim]
    attention_mask: torch.Tensor | None,
    *,
    ddtree_plan: StepPlan | DevicePlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Stage this layer's keys and values, then attend; gives `[1, rows, heads, head_dim]`.

    Args:
        module: the attention layer.
        query: turned queries of all rows.
        key: turned keys of all rows.
        value: values of all rows.
        attention_mask: always None, see `register`.
        ddtree_plan: which rows belong together and who sees whom.
        scaling: factor on the scores; None: one over the root of the head size.
        sliding_window: positions a row sees, itself included; None: all.
        softcap: scores are pressed into ± this by a tanh (Gemma 2).
        s_aux: `[heads]`, the score of a place that takes attention and gives nothing (GPT-OSS's sinks).
        options: what else the model passes on; ignored unless it would change the result.

    Raises:
        UnsupportedAttention: the layer is not causal, or wants something that is not computed here.
    """
    del attention_mask
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise UnsupportedAttention(name)
    if not options.get("is_causal", getattr(module, "is_causal", True)):
        raise UnsupportedAttention("attention that is not causal")
    if isinstance(ddtree_plan, DevicePlan):
        from ddtree.device.attend import attend  # kernels: not everywhere installed

        attended = attend(
            module, query, key, value, ddtree_plan,
            scaling=scaling, sliding_window=sliding_window, softcap=softcap, s_aux=s_aux,
        )  # fmt: skip
        return attended, None
    layer = ddtree_plan.page_layer(int(module.layer_idx))  # type: ignore[arg-type]
    ddtree_plan.pool.write(layer, ddtree_plan.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    outputs = []
    for index, segment in enumerate(ddtree_plan.segments):
        rows = query[:, :, segment.start : segment.stop]
        groups = query.shape[1] // key.shape[1]
        mask = ddtree_plan.mask(index, sliding_window, groups, query.dtype)
        keys, values = ddtree_plan.pool.read(layer, segment.pages, segment.prefix + segment.count)
        seen = _Seen(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], mask, scaling)
        if softcap is None and s_aux is None:
            outputs.append(_attend(rows, seen))
        else:
            outputs.append(_attend_in_steps(rows, seen, softcap, s_aux))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), None


@dataclass(frozen=True)
class _Seen:
    """What one segment's rows may see of one layer."""

    keys: torch.Tensor  # [1, kv_heads, T, head_dim]
    values: torch.Tensor  # [1, kv_heads, T, head_dim]
    mask: torch.Tensor | None  # [groups * count, T], additive
    scaling: float | None


def _attend(
    rows: torch.Tensor,  # [1, heads, count, head_dim]
    seen: _Seen,
) -> torch.Tensor:
    """Attention of one segment, `[1, count, heads, head_dim]`.

    Query heads that share a KV head are folded into rows, so that the keys are read once per KV head.
    """
    attended = functional.scaled_dot_product_attention(
        _fold(rows, seen), seen.keys, seen.values, attn_mask=seen.mask, scale=seen.scaling
    )
    return _unfold(attended, rows)


def _attend_in_steps(
    rows: torch.Tensor,  # [1, heads, count, head_dim]
    seen: _Seen,
    softcap: float | None,
    sinks: torch.Tensor | None,  # [heads]
) -> torch.Tensor:
    """The same with capped scores or a sink per head: one more score that no value belongs to."""
    folded = _fold(rows, seen)
    scaling = rows.shape[-1] ** -0.5 if seen.scaling is None else seen.scaling
    scores = (folded @ seen.keys.transpose(-1, -2)).float() * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if seen.mask is not None:
        scores = scores + seen.mask
    if sinks is not None:
        per_row = sinks.float().repeat_interleave(rows.shape[2]).view(1, folded.shape[1], -1, 1)
        scores = torch.cat((scores, per_row), dim=-1)
    shares = scores.softmax(dim=-1)[..., : seen.keys.shape[2]]
    return _unfold(shares.to(seen.values.dtype) @ seen.values, rows)


def _fold(rows: torch.Tensor, seen: _Seen) -> torch.Tensor:
    """Rows of the query heads of one KV head after another, `[1, kv_heads, groups * count, head_dim]`."""
    return rows.reshape(1, seen.keys.shape[1], -1, rows.shape[-1])


def _unfold(attended: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Undo `_fold` and put rows before heads."""
    return attended.reshape(1, rows.shape[1], rows.shape[2], -1).transpose(1, 2)
