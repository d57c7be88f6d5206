"""What one step on the device is: its rows, the pool they are staged in, and how far they see.

The counterpart of `attention.plan.StepPlan`, and handed through a model's forward in the same way. It holds
values on the device and no Python object per sequence, so that a captured forward can be played back. This
module knows neither kernels nor models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddtree.device.rows import DeviceRows, Sight
from ddtree.kv_cache import KvPool
from ddtree.recurrent.step import RecurrentStep


@dataclass(frozen=True)
class DevicePlan:
    """One packed forward of `S * T` rows."""

    rows: DeviceRows
    pool: KvPool
    sight: Sight = Sight.TREE
    recurrent: RecurrentStep | None = None  # where the target has recurrent layers too

    def keys(self, layer: int) -> torch.Tensor:
        """Keys of a decoder layer, `[slots, kv_heads, head_dim]`, a view of the pool."""
        return self.pool.keys_values[self._page_layer(layer), 0]

    def values(self, layer: int) -> torch.Tensor:
        """Values of a decoder layer, `[slots, kv_heads, head_dim]`, a view of the pool."""
        return self.pool.keys_values[self._page_layer(layer), 1]

    def _page_layer(self, layer: int) -> int:
        """Where a decoder layer stands among those that have pages."""
        states = self.pool.states
        return layer if states is None else states.shape.others_before(layer)
