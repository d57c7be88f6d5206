"""The acceptance walk on the device: from the root to the child that holds the target's token, and on.

One program follows one tree with all its nodes in registers: a step is one comparison of every node's parent
and token with what is wanted, so a walk takes as many steps as tokens are accepted. It gives what
`accept.walk` gives. This module does not know how the target's tokens were chosen and touches no cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree.device.trees import DeviceAcceptance, DeviceTrees


@triton.jit(do_not_specialize=["nodes", "depth"])
def _walk_kernel(
    tokens, parents, node_counts, target_tokens, accepted_counts, bonus_tokens, accepted_tokens, path_rows,
    nodes, depth,
    NODES: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    column, position = tl.arange(0, NODES), tl.arange(0, POSITIONS)
    is_node = column < tl.load(node_counts + sequence)
    token = tl.load(tokens + sequence * nodes + column, mask=is_node, other=0)
    parent = tl.load(parents + sequence * nodes + column, mask=is_node, other=-1)
    target_row = target_tokens + sequence * (nodes + 1)

    accepted = tl.min(column, axis=0)  # zero, of the type that a loop carries
    path = tl.zeros((POSITIONS,), tl.int32)
    said = tl.zeros((POSITIONS,), tl.int32)
    wanted = tl.load(target_row).to(tl.int32)
    child = tl.max(tl.where((parent == 0) & (token == wanted), column + 1, 0), axis=0)
    while (child > 0) & (accepted < depth):
        said = tl.where(position == accepted, wanted, said)
        accepted += 1
        path = tl.where(position == accepted, child, path)
        wanted = tl.load(target_row + child).to(tl.int32)
        child = tl.max(tl.where((parent == child) & (token == wanted), column + 1, 0), axis=0)

    tl.store(accepted_counts + sequence, accepted)
    tl.store(bonus_tokens + sequence, wanted)
    tl.store(accepted_tokens + sequence * depth + position, said, mask=position < depth)
    tl.store(path_rows + sequence * (depth + 1) + position, path, mask=position <= depth)


def walk(
    trees: DeviceTrees,
    target_tokens: torch.Tensor,  # [S, T] int64, T = N + 1
    depth: int,
    into: DeviceAcceptance | None = None,
) -> DeviceAcceptance:
    """Follow each tree along the target's tokens, in one launch.

    Args:
        trees: nodes whose (parent, token) pairs are unique; padding is never accepted, whatever it holds.
        target_tokens: the target's token after each row, root first; anything for padding rows.
        depth: D of the result; a path ends there, were the tree deeper.
        into: where the paths are written and what is returned; new tensors when absent.
    """
    places, nodes = trees.tokens.shape
    assert target_tokens.shape == (places, nodes + 1), f"a token per row, not {list(target_tokens.shape)}"
    acceptance = DeviceAcceptance.unwritten(places, depth, trees.tokens.device) if into is None else into
    assert acceptance.accepted_tokens.shape == (places, depth), f"no room for {places} paths of {depth} nodes"
    _walk_kernel[(places,)](
        trees.tokens, trees.parents, trees.counts, target_tokens.contiguous(),
        acceptance.accepted_counts, acceptance.bonus_tokens, acceptance.accepted_tokens, acceptance.path_rows,
        nodes, depth,
        NODES=triton.next_power_of_2(max(1, nodes)), POSITIONS=triton.next_power_of_2(depth + 1), num_warps=1,
    )  # fmt: skip
    return acceptance
