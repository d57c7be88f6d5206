"""What stands between the merged projections of a Gated DeltaNet layer and its output, in the step's kernels.

    packed row    queries keys values | gates | betas | steps
                        │                 │       └───────┴─ decays, shares
                        └─ convolution ─ tree form ─ gated norm ─▶ rows for the output projection

Views of the packed rows are all that is made of them: the kernels read them where they stand. This module
knows one layer's numbers, not how the step runs.
"""

from __future__ import annotations

from typing import Any

import torch

from ddtree.device.plan import DevicePlan
from ddtree.models.gated_delta_net import TreeForward
from ddtree.recurrent.layer import LayerInputs, run_plainly


class DeltaMix:
    """Mixes the rows of one layer, as `TreeForward` does, but behind one product in place of four."""

    def __init__(self, module: Any) -> None:
        """Take the numbers of a `Qwen3_5GatedDeltaNet` that runs trees already."""
        forward = vars(module)["forward"]
        assert isinstance(forward, TreeForward), "gated_delta_net was installed"
        assert forward.weights is not None, "the kernels do all that this layer does"
        self._index, self._weights = int(module.layer_idx), forward.weights
        self._value_dim = int(module.head_v_dim)
        self._parts = (int(module.conv_dim), int(module.value_dim), *2 * (int(module.num_v_heads),))

    def __call__(
        self,
        packed: torch.Tensor,  # [S * T, channels + Hv * dv + 2 * Hv]
        _cos: torch.Tensor,
        _sin: torch.Tensor,
        plan: DevicePlan,
    ) -> torch.Tensor:
        """Give what the output projection takes, `[S * T, Hv * dv]`; what a commit needs is noted."""
        step = plan.recurrent
        assert step is not None, "a plan for this target needs the states of its sessions"
        mixed, gates, betas, steps = packed.split(self._parts, dim=1)
        inputs = LayerInputs(mixed, gates.unflatten(1, (-1, self._value_dim)), betas, steps)
        # Without kernels the step works it out with PyTorch, from the same packed rows.
        run = run_plainly if step.pool.kernels is None else type(step).run_fused
        return run(step, self._index, inputs, self._weights).flatten(1)
