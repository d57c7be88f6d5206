"""Tries at load whether a target can be verified with trees at all, instead of finding wrong tokens later.

A tree shares one forward among nodes that must not know of each other. That holds where a row meets other
rows in attention alone, and where all attention is ours. Some models of transformers mix rows elsewhere (a
recurrent or convolutional layer) or have attention of their own that no mask of ours reaches. Their code is
not read here: three tiny forwards show it.

          chain x y          tree x (d, y)          chain x d y
          y sees x           y sees x, not d        y sees x and d

The logits of `y` must be the same in the first two, however much `d` would have changed them. Known recurrent
layers (`gated_delta_net`) are tried in the same way, each time from an empty state.
"""

from __future__ import annotations

import torch

from ddtree.attention.plan import Segment, StepPlan
from ddtree.attention.sdpa import UnsupportedAttention
from ddtree.errors import CheckpointError
from ddtree.kv_cache import KvPool, Pages
from ddtree.models.target import TargetModel
from ddtree.recurrent.state_pool import PoolSize, StatePool

_ROWS = 3
# Rounding differs with the number of rows; in bf16 an expert may even change. A model that lets `d` through
# is off by a large share of what `d` does to `y`.
_MOST_SHARE = 0.2
_ROUNDING = 1e-2


class _CountingPool(KvPool):
    """A pool that notes which layers staged their keys. It has one state, which stays empty."""

    def __init__(self, target: TargetModel) -> None:
        super().__init__(target.cache_shape(0), budget_bytes=1, page_size=_ROWS, device=target.device)
        self.staged: list[int] = []
        if (shape := target.state_shape()) is not None:
            self.states = StatePool(shape, PoolSize(1, _ROWS), target.device)

    def state_of(self, pages: Pages) -> int:
        """The one there is: nothing is ever committed."""
        del pages
        return 0

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.staged.append(layer)
        super().write(layer, slots, keys, values)


def check_trees_work(target: TargetModel) -> None:
    """Run three tiny forwards and compare.

    Raises:
        CheckpointError: the target's attention is not ours, or asks for something we do not compute, or rows
            reach each other outside of it; one line.
    """
    name = type(target.model).__name__
    pool = _CountingPool(target)
    try:
        logits = _logits_of_y(target, pool)
    except UnsupportedAttention as error:
        raise CheckpointError(
            f"target: {name} asks its attention for {error}, which trees are not verified with"
        ) from None
    except (RuntimeError, IndexError, TypeError, AttributeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"target: {name} cannot run with tree attention: {reason}") from None
    expected = [*range(target.cache_shape(0).layers)] * len(logits)
    if sorted(pool.staged) != sorted(expected):
        missing = sorted(set(expected) - set(pool.staged))
        raise CheckpointError(
            f"target: {name} runs {len(missing)} of {len(set(expected))} layers (the first is "
            f"{missing[0] if missing else 0}) without transformers' attention interface, so a tree mask does "
            "not reach them; only decoders whose every layer is attention or a known recurrence are served"
        )
    chain, tree, longer = logits
    off, reach = float((tree - chain).norm()), float((longer - chain).norm())
    if not off <= max(_MOST_SHARE * reach, _ROUNDING * float(chain.norm())):
        raise CheckpointError(
            f"target: in {name} a draft node changes the logits of its sibling (by {off:.3g}, where "
            f"{reach:.3g} is what it does to a child), so rows meet outside of attention; it cannot be "
            "verified with trees"
        )


def _logits_of_y(target: TargetModel, pool: KvPool) -> list[torch.Tensor]:
    """The last row's logits of chain, tree and longer chain, each `[V]` float32."""
    pages = pool.reserve(_ROWS)
    assert pages is not None, "the pool was made for these rows"
    x, d, y = (token % target.vocab_size for token in (3, 7, 5))
    siblings = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool, device=target.device)
    logits = []
    for tokens, depths, sees in (
        ((x, y), (0, 1), None),
        ((x, d, y), (0, 1, 1), siblings),
        ((x, d, y), (0, 1, 2), None),
    ):
        place = torch.tensor(depths, device=target.device)
        plan = StepPlan.build(pool, (Segment(0, len(tokens), pages, 0, place, sees),))
        ids = torch.tensor(tokens, device=target.device)
        logits.append(target.forward(ids, plan, ids.new_tensor([len(tokens) - 1])).logits[0].float())
    return logits
