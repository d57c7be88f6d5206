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
from typing import Any, Protocol

import torch
from torch import nn
from transformers.activations import ACT2FN

from ddtree.attention.plan import StepPlan
from ddtree.device.plan import DevicePlan
from ddtree.recurrent.layer import LayerInputs, LayerWeights, rows_of


class _Project(Protocol):
    def __call__(self, module: Any, rows: torch.Tensor) -> LayerInputs: ...


def _project_apart(module: Any, rows: torch.Tensor) -> LayerInputs:
    """Qwen3.5: four projections."""
    gates = module.in_proj_z(rows).unflatten(-1, (-1, module.head_v_dim))
    return LayerInputs(module.in_proj_qkv(rows), gates, module.in_proj_b(rows), module.in_proj_a(rows))


def _project_by_head(module: Any, rows: torch.Tensor) -> LayerInputs:
    """Qwen3-Next: two projections whose columns stand by key head; the module knows how to order them."""
    parts = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(rows[None]), module.in_proj_ba(rows[None])
    )
    queries, keys, values, gates, betas, steps = (part[0] for part in parts)
    mixed = torch.cat((queries.flatten(1), keys.flatten(1), values.flatten(1)), dim=-1)
    return LayerInputs(mixed, gates, betas, steps)


_PROJECTIONS: dict[str, _Project] = {
    "Qwen3NextGatedDeltaNet": _project_by_head,
    "Qwen3_5GatedDeltaNet": _project_apart,
    "Qwen3_5MoeGatedDeltaNet": _project_apart,
}
KNOWN_CLASSES = tuple(_PROJECTIONS)
_NORMS = ("Qwen3NextRMSNormGated", "Qwen3_5RMSNormGated", "Qwen3_5MoeRMSNormGated")


class TreeForward:
    """The forward of one layer over the rows of a step plan."""

    def __init__(self, module: Any, project: _Project) -> None:
        self._module = module
        self._project = project
        self._activate = ACT2FN[module.activation]
        self.weights = _weights_of(module)  # None: something in the layer is not what the kernels do

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
        if self.weights is not None and step.pool.kernels is not None and not step.keeps:
            mixed = step.run_fused(module.layer_idx, projected, self.weights)
            fused: torch.Tensor = module.out_proj(mixed.view(1, len(mixed), -1))
            return fused
        convolved = step.convolve(module.layer_idx, projected.mixed, module.conv1d.weight[:, 0])
        active = self._activate(convolved.to(hidden_states.dtype))
        rows = rows_of(active, projected, module.A_log, module.dt_bias, step.pool.shape)
        mixed = step.mix(module.layer_idx, rows)
        mixed = mixed.flatten(0, 1).to(hidden_states.dtype)
        normed = module.norm(mixed, projected.gates.reshape(-1, module.head_v_dim))
        output: torch.Tensor = module.out_proj(normed.view(1, len(active), -1))
        return output


def _weights_of(module: Any) -> LayerWeights | None:
    """What the kernels read, where activation and norm are those that they compute."""
    norm, weight = module.norm, module.conv1d.weight
    is_known = type(norm).__name__ in _NORMS and norm.activation == module.activation == "silu"
    if not is_known or module.conv1d.bias is not None or norm.weight.dtype != weight.dtype:
        return None
    return LayerWeights(weight[:, 0], module.A_log, module.dt_bias, norm.weight, norm.variance_epsilon)


def install(model: nn.Module) -> None:
    """Replace the forward of every such layer of a loaded model; a model without any is left alone."""
    for module in _layers(model):
        module.forward = TreeForward(module, _PROJECTIONS[type(module).__name__])


def _layers(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if type(module).__name__ in _PROJECTIONS:
            yield module
