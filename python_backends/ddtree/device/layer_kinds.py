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
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from ddtree.models.gated_delta_net import TreeForward


@dataclass(frozen=True)
class LayerKind:
    """What layers have in common whose forward is the same code on the same shapes."""

    layer: type[nn.Module]
    window: int | None  # positions a row sees, itself included; None: all
    dtype: torch.dtype
    device: torch.device
    is_recurrent: bool = False  # whether a Gated DeltaNet stands where others have attention


@dataclass(frozen=True)
class _Family:
    """The parts of a decoder layer, and where its attention finds its window."""

    attention: Any
    mlp: Any
    norm: Any
    window: Callable[[Any], int | None]
    recurrent: Any = None  # what some layers have in place of attention


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
    qwen3_5.Qwen3_5DecoderLayer: _Family(
        qwen3_5.Qwen3_5Attention, qwen3_5.Qwen3_5MLP, qwen3_5.Qwen3_5RMSNorm, _no_window,
        qwen3_5.Qwen3_5GatedDeltaNet,
    ),
}  # fmt: skip
_NORMS = tuple(family.norm for family in _FAMILIES.values())
_CENTRED_NORMS = (qwen3_5.Qwen3_5RMSNorm,)
# The last one is applied to what the mixing gives, the others to what goes into it.
_ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
_RECURRENT_LINEARS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
_MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")


def mixer_of(layer: Any) -> Any:
    """What mixes the rows of a layer of a known family: its attention, or what it has in place of it."""
    return layer.self_attn if hasattr(layer, "self_attn") else layer.linear_attn


def mixer_linears(mixer: Any) -> tuple[list[Any], Any]:
    """The linears of such a part: those applied to its input, and that of its output."""
    names = _ATTENTION_LINEARS if hasattr(mixer, "q_proj") else _RECURRENT_LINEARS
    *inputs, output = (getattr(mixer, name) for name in names)
    return inputs, output


def kind_of(layer: Any) -> LayerKind | None:
    """The kind of a decoder layer; None when it is not known, or is not quite what its class says."""
    family = _FAMILIES.get(type(layer))
    if family is None or "forward" in vars(layer):
        return None
    mixer, mlp = mixer_of(layer), layer.mlp
    is_recurrent = family.recurrent is not None and type(mixer) is family.recurrent
    if not (is_recurrent and _runs_trees(mixer)) and not (
        type(mixer) is family.attention and _is_plain(mixer)
    ):
        return None
    if type(mlp) is not family.mlp or not _is_plain(mlp) or type(mlp.up_proj) is not nn.Linear:
        return None
    weight = mlp.up_proj.weight
    if weight.is_meta or not isinstance(mlp.act_fn, (SiLUActivation, nn.SiLU)):
        return None
    if not (_has_plain_linears(layer, weight) and _has_plain_norms(layer, weight.dtype)):
        return None
    window = None if is_recurrent else family.window(mixer)
    return LayerKind(type(layer), window, weight.dtype, weight.device, is_recurrent)


def is_norm(module: Any, dtype: torch.dtype) -> bool:
    """Whether a module is an RMS norm that kernels know: Llama's, or a centred one."""
    return type(module) in _NORMS and _is_plain(module) and module.weight.dtype == dtype


def is_centred(norm: nn.Module) -> bool:
    """Whether a known norm scales by one plus its weight, and is rounded only after that."""
    return type(norm) in _CENTRED_NORMS


def eps_of(norm: Any) -> float:
    """What a known norm adds to the mean square."""
    return float(norm.eps if is_centred(norm) else norm.variance_epsilon)


def has_gates(attention: Any) -> bool:
    """Whether the query projection of a known attention gives an output gate behind every head."""
    return type(attention) is qwen3_5.Qwen3_5Attention


def _runs_trees(mixer: Any) -> bool:
    """Whether a recurrent part is what `gated_delta_net` made of it, and the kernels do all that it does."""
    forward = vars(mixer).get("forward")
    is_known = isinstance(forward, TreeForward) and forward.weights is not None
    return is_known and not (mixer._forward_hooks or mixer._forward_pre_hooks)  # noqa: SLF001


def _is_plain(module: nn.Module) -> bool:
    """Whether calling it is running its class's forward: other code wraps forwards or adds hooks."""
    return not (
        "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks  # noqa: SLF001
    )


def _has_plain_linears(layer: Any, like: torch.Tensor) -> bool:
    inputs, output = mixer_linears(mixer_of(layer))
    gate, up, down = (getattr(layer.mlp, name) for name in _MLP_LINEARS)
    for linear in (*inputs, output, gate, up, down):
        if type(linear) is not nn.Linear or not _is_plain(linear):
            return False
        if any((part.dtype, part.device) != (like.dtype, like.device) for part in linear.parameters()):
            return False
    # What is merged has biases throughout or none.
    has_bias = [{linear.bias is None for linear in merged} for merged in (inputs, (gate, up))]
    return all(len(answers) == 1 for answers in has_bias)


def _has_plain_norms(layer: Any, dtype: torch.dtype) -> bool:
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    heads = [getattr(mixer_of(layer), name, None) for name in ("q_norm", "k_norm")]
    of_heads = [norm for norm in heads if norm is not None]
    if len(of_heads) == 1 or not all(is_norm(norm, dtype) for norm in norms + of_heads):
        return False
    return len({eps_of(norm) for norm in of_heads}) <= 1
