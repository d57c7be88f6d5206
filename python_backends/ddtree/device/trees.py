"""Draft trees and accepted paths as values on the device, between the kernels that make and use them.

Everything is as wide as its shape says, not as the values need: `N` nodes a tree, `D` positions a path, and
counts say how much of it means something. This module knows no kernels, models or sessions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceTrees:
    """Draft trees, best node first. Node i (1-based; node 0 is the root) stands in column i - 1.

    Columns at and after `counts[s]` are padding: zeros, and a log-probability of -inf.
    """

    tokens: torch.Tensor  # [S, N] int32
    parents: torch.Tensor  # [S, N] int32, node index of the parent, 0 = root, parent < own index
    depths: torch.Tensor  # [S, N] int32, 1..D
    counts: torch.Tensor  # [S] int32
    log_probs: torch.Tensor  # [S, N] float32, of the path from the root

    @classmethod
    def unwritten(cls, places: int, nodes: int, device: torch.device) -> DeviceTrees:
        """Room for the trees of `places` sequences, `nodes` = N nodes each at most; holds anything."""

        def room(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            tokens=room(places, nodes),
            parents=room(places, nodes),
            depths=room(places, nodes),
            counts=room(places),
            log_probs=room(places, nodes, dtype=torch.float32),
        )

    @property
    def nodes(self) -> int:
        """N, nodes that a tree has room for."""
        return int(self.tokens.shape[1])


@dataclass(frozen=True)
class DeviceAcceptance:
    """Accepted paths. The tensors are contiguous views of `packed`, so that one copy carries all of them."""

    packed: torch.Tensor  # [S * (2 D + 3)] int32
    accepted_counts: torch.Tensor  # [S] accepted nodes, root not counted
    bonus_tokens: torch.Tensor  # [S] the target's token after the path's last node
    accepted_tokens: torch.Tensor  # [S, D] draft tokens on the path, zeros after its end
    path_rows: torch.Tensor  # [S, D + 1] node indices, root first, zeros after the path's end

    @classmethod
    def over(cls, packed: torch.Tensor, places: int, depth: int) -> DeviceAcceptance:
        """See a buffer, on the device or a copy of it on the host, as the paths of `places` sequences."""
        counts, bonus, tokens, rows = packed.split([places, places, places * depth, places * (depth + 1)])
        return cls(packed, counts, bonus, tokens.view(places, depth), rows.view(places, depth + 1))

    @classmethod
    def unwritten(cls, places: int, depth: int, device: torch.device) -> DeviceAcceptance:
        """Room for the paths of `places` sequences, `depth` = D nodes each at most; holds anything."""
        packed = torch.empty(places * (2 * depth + 3), dtype=torch.int32, device=device)
        return cls.over(packed, places, depth)

    @property
    def depth(self) -> int:
        """D, accepted nodes that a path has room for."""
        return int(self.accepted_tokens.shape[1])
