"""Lets the Gated DeltaNet layers of Qwen3-Next, Qwen3.5 and Qwen3.6 run over trees and sessions.

transformers' modules mix rows in their own forward, which has no seam like the attention interface. So here
that forward is replaced, on the loaded module itself, by one that uses the module's own projections, norm and
parameters and leaves convolution and recurrence to the step's plan. Classes, weights and names in the state
dict stay as they are.

The classes are known by their names and differ in their projections only. This module knows neither sessions
nor trees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from ddtree.attention.plan import StepPlan
from ddtree.device.plan import DevicePlan
from ddtree.recurrent.gated_delta import unit
from ddtree.recurrent.step import LayerRows


@dataclass(frozen=True)
class Projected:
    """What a layer's projections make of its rows."""

    mixed: torch.Tensor  # [n, channels] queries, keys and values before the convolution
    gates: torch.Tensor  # [n, Hv, dv]
    betas: torch.Tensor  # [n, Hv] before the sigmoid
    steps: torch.Tensor  # [n, Hv] before the softplus


class _Project(Protocol):
    def __call__(self, module: Any, rows: torch.Tensor) -> Projected: ...


def _project_apart(module: Any, rows: torch.Tensor) -> Projected:
    """Qwen3.5: four projections."""
    gates = module.in_proj_z(rows).unflatten(-1, (-1, module.head_v_dim))
    return Projected(module.in_proj_qkv(rows), gates, module.in_proj_b(rows), module.in_proj_a(rows))


def _project_by_head(module: Any, rows: torch.Tensor) -> Projected:
    """Qwen3-Next: two projections whose columns stand by key head; the module knows how to order them."""
    parts = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(rows[None]), module.in_proj_ba(rows[None])
    )
    queries, keys, values, gates, betas, steps = (part[0] for part in parts)
    mixed = torch.cat((queries.flatten(1), keys.flatten(1), values.flatten(1)), dim=-1)
    return Projected(mixed, gates, betas, steps)


_PROJECTIONS: dict[str, _Project] = {
    "Qwen3NextGatedDeltaNet": _project_by_head,
    "Qwen3_5GatedDeltaNet": _project_apart,
    "Qwen3_5MoeGatedDeltaNet": _project_apart,
}
KNOWN_CLASSES = tuple(_PROJECTIONS)


class TreeForward:
    """The forward of one layer over the rows of a step plan."""

    def __init__(self, module: Any, project: _Project) -> None:
        self._module = module
        self._project = project
        self._activate = ACT2FN[module.activation]

    def __call__(
        self,
        hidden_states: torch.Tensor,  # [1, n, H]
        *,
        ddtree_plan: StepPlan | DevicePlan,
        **_: Any,
    ) -> torch.Tensor:
        """Run all rows of the plan; gives `[1, n, H]`."""
        module, step = self._module, ddtree_plan.recurrent
        assert step is not None, "a plan for this target needs the states of its sessions"
        projected = self._project(module, hidden_states[0])
        convolved = step.convolve(module.layer_idx, projected.mixed, module.conv1d.weight[:, 0])
        active = self._activate(convolved.to(hidden_states.dtype))
        mixed = step.mix(module.layer_idx, self._rows(active, projected))
        rows = mixed.flatten(0, 1).to(hidden_states.dtype)
        normed = module.norm(rows, projected.gates.reshape(-1, module.head_v_dim))
        output: torch.Tensor = module.out_proj(normed.view(1, len(active), -1))
        return output

    def _rows(self, active: torch.Tensor, projected: Projected) -> LayerRows:
        module = self._module
        queries, keys, values = active.split((module.key_dim, module.key_dim, module.value_dim), dim=-1)
        per_head = (-1, module.head_k_dim)
        # As transformers does: float32 before the exponential, or half precision makes it infinite.
        rate = functional.softplus(projected.steps.float() + module.dt_bias)
        return LayerRows(
            queries=unit(queries.unflatten(-1, per_head)) * module.head_k_dim**-0.5,
            keys=unit(keys.unflatten(-1, per_head)),
            values=values.unflatten(-1, (-1, module.head_v_dim)),
            log_decays=-module.A_log.float().exp() * rate,
            betas=projected.betas.sigmoid(),
        )


def install(model: nn.Module) -> None:
    """Replace the forward of every such layer of a loaded model; a model without any is left alone."""
    for module in _layers(model):
        module.forward = TreeForward(module, _PROJECTIONS[type(module).__name__])


def _layers(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if type(module).__name__ in _PROJECTIONS:
            yield module
