"""Decoder layers of Llama-like transformers models in ten launches instead of thirty.

    q k v   turn   attention   output   add + norm   gate up   gate   down   add + norm of the next layer
      │      │     (1 or 2)      │          │           │        │      │       │
      └ matrix products over merged weights, and kernels.layer in between ──────┘

Where a layer has a Gated DeltaNet in place of attention, the first product takes in that one's inputs, and
the step's own kernels stand between it and the output (`fused_delta`).

The model stays as it is: its classes, module names, `state_dict` and forward. Weights of projections with the
same input are laid side by side once, and the model's own linears become views of them. A fused layer runs
when the step comes with a `DevicePlan`; every other forward (of a packed step, others) takes the class's own.

Nothing is assumed about a layer that its exact class does not say, and the first one of every kind is run
both ways at load (`fused_check`): what does not come out alike is left as it is. The model must already be on
the device and of the dtype that it runs with. This module knows no sessions and no graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from ddtree.device.fused_check import why_not
from ddtree.device.fused_delta import DeltaMix
from ddtree.device.kernels.attention import Scoring, tree_attention
from ddtree.device.kernels.layer import Heads, add_norm, gate, open_gates, turn
from ddtree.device.layer_kinds import (
    LayerKind,
    eps_of,
    has_gates,
    is_centred,
    is_norm,
    kind_of,
    mixer_linears,
    mixer_of,
)
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
    is_centred: bool

    @classmethod
    def of(cls, module: Any) -> _Norm:
        return cls(module, module.weight.detach(), eps_of(module), is_centred(module))

    def add(self, hidden: torch.Tensor, update: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The normed sum and the sum."""
        return add_norm(hidden, update, self.weight, self.eps, self.is_centred)


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

    inputs: nn.Module
    output: nn.Module
    gate_up: nn.Module
    down: nn.Module


class _Attention:
    """What stands between the projections of an attention layer."""

    def __init__(self, attention: Any, window: int | None) -> None:
        self._index, self._heads = int(attention.layer_idx), _heads_of(attention)
        self._scoring = Scoring(float(attention.scaling), window)

    def __call__(
        self, packed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plan: DevicePlan
    ) -> torch.Tensor:
        """Attention of packed rows of queries, keys and values, `[S * T, heads * head_dim]`."""
        heads, rows = self._heads, plan.rows
        pool_keys, pool_values = plan.keys(self._index), plan.values(self._index)
        turn(packed, cos, sin, heads, pool_keys, pool_values, rows.slots.view(-1))
        by_head = packed.view(rows.places, rows.rows, -1, heads.size)
        beside = 2 if heads.is_gated else 1  # a query head, and its gate
        query, keys, values = by_head.split([beside * heads.queries, heads.keys, heads.keys], dim=2)
        attended = tree_attention(
            query[:, :, ::beside], keys, values, pool_keys, pool_values, rows, plan.sight, self._scoring
        )
        flat = attended.reshape(packed.shape[0], heads.queries * heads.size)
        return open_gates(flat, packed, heads) if heads.is_gated else flat


class FusedLayer:
    """The forward of one decoder layer: fused under a `DevicePlan`, the class's own otherwise."""

    def __init__(self, layer: Any, kind: LayerKind, make: MakeLinear, relay: _Relay) -> None:
        """Merge the layer's weights; the layer's own forward goes on to work."""
        mixer, mlp = mixer_of(layer), layer.mlp
        self.kind = kind
        self._layer, self._relay = layer, relay
        self._mix = DeltaMix(mixer) if kind.is_recurrent else _Attention(mixer, kind.window)
        inputs, output = mixer_linears(mixer)
        self.before, self._between = _Norm.of(layer.input_layernorm), _Norm.of(layer.post_attention_layernorm)
        self._products = _Products(
            make(*_merge(*inputs)),
            make(*_merge(output)),
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
            normed, _ = self.before.add(hidden, None)
        mixed = products.output(self._mix(products.inputs(normed), cos, sin, plan))
        normed, hidden = self._between.add(hidden, mixed)
        update: torch.Tensor = products.down(products.gate_up(normed))
        if self.after is None:
            return (hidden + update)[None]
        normed, hidden = self.after.add(hidden, update)
        output = hidden[None]
        self._relay.put(self.after, output, normed)
        return output


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
    is_gated = has_gates(attention)
    queries = attention.q_proj.out_features // (2 * size if is_gated else size)
    heads = Heads(queries, attention.k_proj.out_features // size, size, is_gated=is_gated)
    if query_norm is None or key_norm is None:
        return heads
    return replace(
        heads,
        query_norm=query_norm.weight.detach(),
        key_norm=key_norm.weight.detach(),
        eps=eps_of(query_norm),
        is_centred=is_centred(query_norm),
    )


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
