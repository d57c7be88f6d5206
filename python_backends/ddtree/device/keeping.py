"""What follows the target's step on the device: the walk, and the accepted paths kept in the target's cache.

Everything is as wide as a step's shape says, so it can be captured behind the step. This module knows neither
sessions nor the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ddtree.device.buffers import StepBuffers
from ddtree.device.kernels.move import commit_rows, gather_rows, keep_rows
from ddtree.device.kernels.walk import walk
from ddtree.device.steps import StepOutput
from ddtree.device.trees import DeviceAcceptance
from ddtree.kv_cache import KvPool


@dataclass(frozen=True)
class TargetCache:
    """Where accepted paths are kept."""

    pool: KvPool  # of the target
    projection: nn.Module  # taps to context features

    def keep(self, buffers: StepBuffers, output: StepOutput, paths: DeviceAcceptance) -> torch.Tensor:
        """Walk the trees of a step and keep root and accepted path of each place.

        Args:
            buffers: what the step read.
            output: what it gave.
            paths: where the accepted paths are written.

        Returns:
            Their context features `[S, D + 1, H]`, which the pool has too; anything behind a path's end.
        """
        rows = buffers.rows
        accepted = walk(buffers.trees, output.next_tokens, paths.depth, into=paths)
        commit_rows(self.pool.keys_values, rows, accepted)
        if output.recurrent is not None:
            lengths = torch.where(rows.counts > 0, accepted.accepted_counts + 1, 0)
            output.recurrent.commit(accepted.path_rows, lengths)
        features: torch.Tensor = self.projection(gather_rows(output.taps, accepted))
        keep_rows(features, self.pool.features, rows, accepted)
        return features
