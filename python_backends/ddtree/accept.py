"""The acceptance walk: from the root to the child that holds the target's own token, as deep as that goes.

Whatever the target would emit at a node, greedily or by a draw with that node's own prefix, is what gets
emitted, so the output is exactly the target's (sample and match; lossless for every tree). This module does
not know how the target's tokens were chosen and touches no cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ddtree.tree_mask import parents_from_root
from ddtree.types import TreeBatch


@dataclass(frozen=True)
class Acceptance:
    """Accepted paths; D' is at least the deepest accepted node. Everything is int64 on the inputs' device."""

    accepted_counts: torch.Tensor  # [S] accepted nodes, root not counted
    path_nodes: torch.Tensor  # [S, D' + 1] node indices, root first, zeros after the path's end
    accepted_tokens: torch.Tensor  # [S, D'] draft tokens on the path, zeros after its end
    bonus_tokens: torch.Tensor  # [S] the target's token after the path's last node


def walk(
    trees: TreeBatch,
    target_tokens: torch.Tensor,  # [S, N + 1] the target's token after each node, root first
    max_depth: int | None = None,
) -> Acceptance:
    """Follow each tree along the target's tokens.

    A node is accepted when its token is the target's after its parent and its parent is accepted. Unique
    (parent, token) pairs make that a single path. Padding is never accepted, whatever it holds.

    Args:
        trees: draft trees on the device of `target_tokens`.
        target_tokens: any integer type; columns of padding nodes may hold anything.
        max_depth: D' of the result. When absent it is read from `trees.depths`, which on an accelerator waits
            for the device.
    """
    counts, depths = trees.counts.unsqueeze(1), trees.depths.long()
    num_sequences, num_nodes = depths.shape
    if max_depth is None:
        max_depth = int(depths.max()) if depths.numel() else 0
    parents = parents_from_root(trees.parents, trees.counts)
    columns = torch.arange(num_nodes, device=depths.device)
    accepted = (trees.tokens == target_tokens.gather(1, parents[:, 1:])) & (columns < counts)
    accepted = F.pad(accepted, (1, 0), value=True)
    # Pointer doubling: after k steps a node has heard from its nearest 2^k nodes upwards.
    jump = parents
    for _ in range(min(num_nodes, max_depth).bit_length()):
        accepted = accepted & accepted.gather(1, jump)
        jump = jump.gather(1, jump)

    on_path = accepted[:, 1:]
    # Nodes off the path all write 0, the root's index, to place 0: no two writes disagree.
    path_nodes = torch.zeros(num_sequences, max_depth + 1, dtype=torch.int64, device=depths.device)
    path_nodes.scatter_(1, depths * on_path, (columns + 1) * on_path)
    accepted_counts = on_path.sum(1)
    last_nodes = path_nodes.gather(1, accepted_counts.unsqueeze(1))
    node_tokens = F.pad(trees.tokens.long(), (1, 0))
    return Acceptance(
        accepted_counts=accepted_counts,
        path_nodes=path_nodes,
        accepted_tokens=node_tokens.gather(1, path_nodes[:, 1:]),
        bonus_tokens=target_tokens.gather(1, last_nodes).squeeze(1).long(),
    )
