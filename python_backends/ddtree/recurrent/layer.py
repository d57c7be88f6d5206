"""One recurrent layer: its rows and numbers, and what stands around convolution and recurrence in it.

One operation at a time, as transformers' modules compute it, rounding included; where there are kernels a
step does the same in few launches. This module knows neither models nor sessions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from ddtree.recurrent.gated_delta import unit
from ddtree.recurrent.state_pool import StateShape

if TYPE_CHECKING:
    from ddtree.recurrent.step import RecurrentStep


@dataclass(frozen=True)
class LayerRows:
    """A layer's rows as its projections and its convolution give them, `n` of all sequences."""

    queries: torch.Tensor  # [n, Hk, dk] float32, normalised and scaled
    keys: torch.Tensor  # [n, Hk, dk] float32, normalised
    values: torch.Tensor  # [n, Hv, dv]
    log_decays: torch.Tensor  # [n, Hv] float32
    betas: torch.Tensor  # [n, Hv]


@dataclass(frozen=True)
class LayerInputs:
    """What a layer's projections make of its rows."""

    mixed: torch.Tensor  # [n, channels] queries, keys and values before the convolution
    gates: torch.Tensor  # [n, Hv, dv]
    betas: torch.Tensor  # [n, Hv] before the sigmoid
    steps: torch.Tensor  # [n, Hv] before the softplus


@dataclass(frozen=True)
class LayerWeights:
    """A layer's own numbers, beside its projections."""

    convolution: torch.Tensor  # [channels, kernel]
    rates: torch.Tensor  # [Hv] logarithms of the decays' rates
    bias: torch.Tensor  # [Hv] of the steps
    norm: torch.Tensor  # [dv]
    eps: float


def rows_of(
    active: torch.Tensor,  # [n, channels] after convolution and activation
    inputs: LayerInputs,
    rates: torch.Tensor,  # [Hv]
    bias: torch.Tensor,  # [Hv]
    shape: StateShape,
) -> LayerRows:
    """Divide channels into heads, and make decays and shares of what the projections gave."""
    wide = shape.key_heads * shape.key_dim
    queries, keys, values = active.split((wide, wide, shape.value_heads * shape.value_dim), dim=-1)
    per_head = (-1, shape.key_dim)
    # As transformers does: float32 before the exponential, or half precision makes it infinite.
    growth = functional.softplus(inputs.steps.float() + bias)
    return LayerRows(
        queries=unit(queries.unflatten(-1, per_head)) * shape.key_dim**-0.5,
        keys=unit(keys.unflatten(-1, per_head)),
        values=values.unflatten(-1, (-1, shape.value_dim)),
        log_decays=-rates.float().exp() * growth,
        betas=inputs.betas.sigmoid(),
    )


def run_plainly(step: RecurrentStep, layer: int, inputs: LayerInputs, weights: LayerWeights) -> torch.Tensor:
    """What `RecurrentStep.run_fused` computes, `[n, Hv, dv]`; needs no kernels for it."""
    dtype = inputs.mixed.dtype
    active = functional.silu(step.convolve(layer, inputs.mixed, weights.convolution).to(dtype))
    mixed = step.mix(layer, rows_of(active, inputs, weights.rates, weights.bias, step.pool.shape))
    mixed = mixed.to(dtype).float()
    normed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + weights.eps)
    return (weights.norm * normed.to(dtype) * functional.silu(inputs.gates.float())).to(dtype)
