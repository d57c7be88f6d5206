"""How the target's token is chosen from its logits at a node.

The acceptance walk follows whatever is chosen here, so this is the only place where a request's sampling
parameters act. Greedy only so far.
"""

from __future__ import annotations

import torch


def choose(logits: torch.Tensor) -> torch.Tensor:
    """The target's token for each row of `[rows, V]`: the first of the largest logits, `[rows]` int64."""
    # On a CPU argmax over bfloat16 takes five times as long as converting first.
    return logits.float().argmax(dim=-1)
