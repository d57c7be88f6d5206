"""Reads a drafter's weights and joins those that are multiplied with the same input.

This module knows the checkpoint's tensor names on one side and the modules' parameter names on the other.
"""

from __future__ import annotations

import torch

from ddtree.models.draft_checkpoint import DraftCheckpoint, tensor_shapes

Tensors = dict[str, torch.Tensor]


def read_projection(checkpoint: DraftCheckpoint, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Read what turns tapped hidden states into context features."""
    return checkpoint.load(("fc.weight", "hidden_norm.weight"), dtype, device)


def read_draft(checkpoint: DraftCheckpoint, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Read layers and final norm under the names of `DFlashDraft`'s parameters."""
    config, joined = checkpoint.config, Tensors()
    kinds = ("weight", "bias") if config.attention_bias else ("weight",)
    context: dict[str, list[torch.Tensor]] = {kind: [] for kind in kinds}
    context_norms = []
    names = list(tensor_shapes(config))
    for index in range(len(config.layers)):
        layer = f"layers.{index}."
        part = checkpoint.load([name for name in names if name.startswith(layer)], dtype, device)
        for kind in kinds:
            heads = [part.pop(f"{layer}self_attn.{name}_proj.{kind}") for name in "qkv"]
            joined[f"{layer}self_attn.qkv_proj.{kind}"] = torch.cat(heads)
            context[kind] += heads[1:]
        gate_up = [part.pop(f"{layer}mlp.{name}_proj.weight") for name in ("gate", "up")]
        joined[f"{layer}mlp.gate_up_proj.weight"] = torch.cat(gate_up)
        q_norm, k_norm = (part.pop(f"{layer}self_attn.{name}_norm.weight") for name in "qk")
        norms = [q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)]
        joined[f"{layer}self_attn.qk_norm"] = torch.cat(norms)
        context_norms.append(k_norm)
        joined |= part
    for kind in kinds:
        joined[f"context_kv_proj.{kind}"] = torch.cat(context[kind])
    joined["context_k_norm"] = torch.stack(context_norms).unsqueeze(1)
    others = [name for name in names if name == "norm.weight" or name.startswith("candidate_selector.")]
    return joined | checkpoint.load(others, dtype, device)
