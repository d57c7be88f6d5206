"""Which decoder layers of transformers are known well enough to be computed by other means.

A layer is known by its exact class and by the exact classes of what is inside it: a subclass, a quantised
linear, a wrapped forward or a hook on a part may all do something else. This module changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3


@dataclass(frozen=True)
class LayerKind:
    """What layers have in common whose forward is the same code on the same shapes."""

    layer: type[nn.Module]
    window: int | None  # positions a row sees, itself included; None: all
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _Family:
    """The parts of a decoder layer, and where its attention finds its window."""

    attention: Any
    mlp: Any
    norm: Any
    window: Callable[[Any], int | None]


def _no_window(_: Any) -> int | None:
    return None


def _own_window(attention: Any) -> int | None:
    window: int | None = attention.sliding_window
    return window


def _window_of_all(attention: Any) -> int | None:
    return getattr(attention.config, "sliding_window", None)


_FAMILIES: dict[Any, _Family] = {
    llama.LlamaDecoderLayer: _Family(
        llama.LlamaAttention, llama.LlamaMLP, llama.LlamaRMSNorm, _no_window
    ),
    qwen2.Qwen2DecoderLayer: _Family(
        qwen2.Qwen2Attention, qwen2.Qwen2MLP, qwen2.Qwen2RMSNorm, _own_window
    ),
    qwen3.Qwen3DecoderLayer: _Family(
        qwen3.Qwen3Attention, qwen3.Qwen3MLP, qwen3.Qwen3RMSNorm, _own_window
    ),
    mistral.MistralDecoderLayer: _Family(
        mistral.MistralAttention, mistral.MistralMLP, mistral.MistralRMSNorm, _window_of_all
    ),
}  # fmt: skip
_NORMS = tuple(family.norm for family in _FAMILIES.values())
_ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")


def kind_of(layer: Any) -> LayerKind | None:
    """The kind of a decoder layer; None when it is not known, or is not quite what its class says."""
    family = _FAMILIES.get(type(layer))
    if family is None or "forward" in vars(layer):
        return None
    attention, mlp = layer.self_attn, layer.mlp
    parts = [(attention, family.attention), (mlp, family.mlp)]
    if not all(type(part) is expected and _is_plain(part) for part, expected in parts):
        return None
    weight = attention.q_proj.weight
    if weight.is_meta or not isinstance(mlp.act_fn, (SiLUActivation, nn.SiLU)):
        return None
    if not (_has_plain_linears(layer, weight) and _has_plain_norms(layer, weight.dtype)):
        return None
    return LayerKind(type(layer), family.window(attention), weight.dtype, weight.device)


def is_norm(module: Any, dtype: torch.dtype) -> bool:
    """Whether a module is an RMS norm as Llama has it: scaled by its weight, rounded before that."""
    return type(module) in _NORMS and _is_plain(module) and module.weight.dtype == dtype


def _is_plain(module: nn.Module) -> bool:
    """Whether calling it is running its class's forward: other code wraps forwards or adds hooks."""
    return not (
        "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks  # noqa: SLF001
    )


def _has_plain_linears(layer: Any, like: torch.Tensor) -> bool:
    linears = [getattr(layer.self_attn, name) for name in _ATTENTION_LINEARS]
    linears += [getattr(layer.mlp, name) for name in _MLP_LINEARS]
    for linear in linears:
        if type(linear) is not nn.Linear or not _is_plain(linear):
            return False
        if any((part.dtype, part.device) != (like.dtype, like.device) for part in linear.parameters()):
            return False
    query, key, value, _, gate, up, _ = (linear.bias is None for linear in linears)
    return query == key == value and gate == up


def _has_plain_norms(layer: Any, dtype: torch.dtype) -> bool:
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    heads = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]
    of_heads = [norm for norm in heads if norm is not None]
    if len(of_heads) == 1 or len({norm.variance_epsilon for norm in of_heads}) > 1:
        return False
    return all(is_norm(norm, dtype) for norm in norms + of_heads)
