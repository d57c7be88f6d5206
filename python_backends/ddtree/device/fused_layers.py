"""Decoder layers of Llama-like transformers models in ten launches instead of thirty.

    q k v   turn   attention   output   add + norm   gate up   gate   down   add + norm of the next layer
      │      │     (1 or 2)      │          │           │        │      │       │
      └ matrix products over merged weights, and kernels.layer in between ──────┘

The model stays as it is: its classes, module names, `state_dict` and forward. Weights of projections with the
same input are laid side by side once, and the model's own linears become views of them. A fused layer runs
when the step comes with a `DevicePlan`; every other forward (prefill, others) takes the class's own.

Nothing is assumed about a layer that its exact class does not say, and the first one of every kind is run
both ways at load (`fused_check`): what does not come out alike is left as it is. The model must already be on
the device and of the dtype that it runs with. This module knows no sessions and no graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from ddtree.device.fused_check import why_not
from ddtree.device.kernels.attention import Scoring, tree_attention
from ddtree.device.kernels.layer import Heads, add_norm, gate, turn
from ddtree.device.layer_kinds import LayerKind, is_norm, kind_of
from ddtree.device.plan import DevicePlan

_LOG = logging.getLogger(__name__)


class MakeLinear(Protocol):
    """Makes what multiplies rows with a weight, which belongs to the model and must stay its only copy."""

    def __call__(
        self,
        weight: torch.Tensor,  # [out, in]; when gated [2 * out, in], the gate's rows first
        bias: torch.Tensor | None,
        *,
        gated: bool = False,
    ) -> nn.Module:
        """A module from `[R, in]` to `[R, out]`; when gated, silu of the gate's columns times the others."""


class PlainLinear(nn.Module):
    """PyTorch's own product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool = False) -> None:
        super().__init__()
        self._weight, self._bias, self._gated = weight, bias, gated

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply to rows `[R, in]`."""
        product = functional.linear(rows, self._weight, self._bias)
        return gate(product) if self._gated else product


@dataclass(frozen=True)
class _Norm:
    """An RMS norm of the model, to be worked out by a kernel."""

    module: nn.Module
    weight: torch.Tensor  # [H]
    eps: float

    @classmethod
    def of(cls, module: Any) -> _Norm:
        return cls(module, module.weight.detach(), float(module.variance_epsilon))


class _Relay:
    """A layer's output with the next norm already applied, kept until that norm is asked for."""

    def __init__(self) -> None:
        self._norm: nn.Module | None = None
        self._hidden: torch.Tensor | None = None
        self._normed: torch.Tensor | None = None

    def put(self, norm: _Norm, hidden: torch.Tensor, normed: torch.Tensor) -> None:
        """Keep the normed form of `hidden`."""
        self._norm, self._hidden, self._normed = norm.module, hidden, normed

    def take(self, norm: nn.Module, hidden: torch.Tensor) -> torch.Tensor | None:
        """Give it to this norm of this very tensor, and hold it no longer; None for any other."""
        is_it = self._norm is norm and self._hidden is hidden
        normed = self._normed if is_it else None
        self._norm = self._hidden = self._normed = None
        return normed


@dataclass(frozen=True)
class _Products:
    """The four matrix products of a layer; the third gates what comes out."""

    qkv: nn.Module
    output: nn.Module
    gate_up: nn.Module
    down: nn.Module


class FusedLayer:
    """The forward of one decoder layer: fused under a `DevicePlan`, the class's own otherwise."""

    def __init__(self, layer: Any, kind: LayerKind, make: MakeLinear, relay: _Relay) -> None:
        """Merge the layer's weights; the layer's own forward goes on to work."""
        attention, mlp = layer.self_attn, layer.mlp
        self.kind = kind
        self._layer, self._relay = layer, relay
        self._index, self._heads = int(attention.layer_idx), _heads_of(attention)
        self._scoring = Scoring(float(attention.scaling), kind.window)
        self.before, self._between = _Norm.of(layer.input_layernorm), _Norm.of(layer.post_attention_layernorm)
        self._products = _Products(
            make(*_merge(attention.q_proj, attention.k_proj, attention.v_proj)),
            make(*_merge(attention.o_proj)),
            make(*_merge(mlp.gate_proj, mlp.up_proj), gated=True),
            make(*_merge(mlp.down_proj)),
        )
        self.after: _Norm | None = None  # what norms this layer's output, if that is known

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Run the layer on `[1, S * T, H]`; arguments are those of transformers' decoder layers."""
        plan = options.get("ddtree_plan")
        if not isinstance(plan, DevicePlan):
            return type(self._layer).forward(self._layer, hidden_states, *args, **options)
        cos, sin = options["position_embeddings"]
        return self.fused(hidden_states, cos[0], sin[0], plan)

    def fused(
        self,
        hidden_states: torch.Tensor,  # [1, S * T, H]
        cos: torch.Tensor,  # [S * T, head_dim]
        sin: torch.Tensor,  # [S * T, head_dim]
        plan: DevicePlan,
    ) -> torch.Tensor:
        """Give the layer's output `[1, S * T, H]` and stage its keys and values."""
        hidden, products = hidden_states[0], self._products
        normed = self._relay.take(self.before.module, hidden_states)
        if normed is None:
            normed, _ = add_norm(hidden, None, self.before.weight, self.before.eps)
        attended = products.output(self._attend(products.qkv(normed), cos, sin, plan))
        normed, hidden = add_norm(hidden, attended, self._between.weight, self._between.eps)
        update: torch.Tensor = products.down(products.gate_up(normed))
        if self.after is None:
            return (hidden + update)[None]
        normed, hidden = add_norm(hidden, update, self.after.weight, self.after.eps)
        output = hidden[None]
        self._relay.put(self.after, output, normed)
        return output

    def _attend(
        self, packed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plan: DevicePlan
    ) -> torch.Tensor:
        """Attention of packed rows of queries, keys and values, `[S * T, heads * head_dim]`."""
        heads, rows = self._heads, plan.rows
        pool_keys, pool_values = plan.keys(self._index), plan.values(self._index)
        turn(packed, cos, sin, heads, pool_keys, pool_values, rows.slots.view(-1))
        by_head = packed.view(rows.places, rows.rows, -1, heads.size)
        query, keys, values = by_head.split([heads.queries, heads.keys, heads.keys], dim=2)
        attended = tree_attention(
            query, keys, values, pool_keys, pool_values, rows, plan.sight, self._scoring
        )
        return attended.reshape(packed.shape[0], heads.queries * heads.size)


class _FinalNorm:
    """The forward of the norm after the last layer: what that layer already worked out, or its own."""

    def __init__(self, module: Any, relay: _Relay) -> None:
        self._module, self._relay = module, relay

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norm `[1, S * T, H]`."""
        normed = self._relay.take(self._module, hidden_states)
        if normed is not None:
            return normed[None]
        own: torch.Tensor = type(self._module).forward(self._module, hidden_states)
        return own


def fuse(model: nn.Module, linear: MakeLinear = PlainLinear) -> int:
    """Fuse in place every decoder layer of a known kind that comes out alike; gives how many there are.

    Args:
        model: a causal LM of transformers, loaded, in evaluation, where it stays.
        linear: makes the modules of the matrix products.
    """
    fused = 0
    for parent in list(model.modules()):
        layers = getattr(parent, "layers", None)
        if isinstance(layers, nn.ModuleList):
            fused += _fuse_stack(layers, getattr(parent, "norm", None), linear)
    return fused


@torch.no_grad()
def _fuse_stack(layers: nn.ModuleList, last: Any, make: MakeLinear) -> int:
    relay, verdicts = _Relay(), dict[LayerKind, bool]()
    forwards: list[FusedLayer | None] = []
    for layer in layers:
        kind = kind_of(layer)
        if kind is None or not verdicts.get(kind, True):
            forwards.append(None)
            continue
        forward = FusedLayer(layer, kind, make, relay)
        if kind not in verdicts:
            reason = why_not(layer, forward.fused)
            verdicts[kind] = reason is None
            if reason is not None:
                _LOG.warning("%s runs unfused, more slowly: %s", type(layer).__name__, reason)
        forwards.append(forward if verdicts[kind] else None)
    _install(layers, forwards, last, relay)
    return sum(forward is not None for forward in forwards)


def _install(layers: nn.ModuleList, forwards: Sequence[FusedLayer | None], last: Any, relay: _Relay) -> None:
    """Give layers their new forward, and each the norm that follows it."""
    for layer, forward, follower in zip(layers, forwards, [*forwards[1:], None], strict=True):
        if forward is not None:
            layer.forward = forward
            forward.after = None if follower is None else follower.before
    if forwards and forwards[-1] is not None and is_norm(last, forwards[-1].kind.dtype):
        forwards[-1].after = _Norm.of(last)
        last.forward = _FinalNorm(last, relay)


def _heads_of(attention: Any) -> Heads:
    size = int(attention.head_dim)
    query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    sizes = (attention.q_proj.out_features // size, attention.k_proj.out_features // size, size)
    if query_norm is None or key_norm is None:
        return Heads(*sizes)
    eps = float(query_norm.variance_epsilon)
    return Heads(*sizes, query_norm.weight.detach(), key_norm.weight.detach(), eps)


def _merge(*linears: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Lay weights and biases side by side, and make the linears' own views of that."""
    if len(linears) == 1:
        return linears[0].weight.detach(), _bias_of(linears[0])
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [bias for linear in linears if (bias := _bias_of(linear)) is not None]
    bias = torch.cat(biases) if biases else None
    start = 0
    for linear in linears:
        own = slice(start, start + linear.out_features)
        linear.weight = nn.Parameter(weight[own], requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias[own], requires_grad=False)
        start = own.stop
    return weight, bias


def _bias_of(linear: nn.Linear) -> torch.Tensor | None:
    bias: torch.Tensor | None = getattr(linear, "bias", None)
    return None if bias is None else bias.detach()
