"""Whether what another process calls draft trees are some: its model may have been replaced.

The target would verify anything, at positions that are none, and emit what it never would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ddtree.errors import Unavailable
from ddtree.types import TreeBatch

_MOST_SHOWN: Final = 4


def check_trees(trees: TreeBatch, sequences: int, depth: int) -> None:
    """Hold trees to what `TreeBatch` says of them.

    Args:
        trees: as they were answered.
        sequences: S, for which they were asked.
        depth: D, the deepest a node may be.

    Raises:
        Unavailable: they are no trees; the message names the field and the rule.
    """
    tokens, parents, depths, counts = (
        field.cpu().numpy() for field in (trees.tokens, trees.parents, trees.depths, trees.counts)
    )
    if counts.shape != (sequences,):
        raise _broken("counts", f"must have the shape [{sequences}]", list(counts.shape))
    shape = (sequences, tokens.shape[-1])
    for name, field in (("tokens", tokens), ("parents", parents), ("depths", depths)):
        if field.shape != shape:
            raise _broken(name, f"must have the shape {list(shape)}", list(field.shape))
    if not ((counts >= 0) & (counts <= shape[1])).all():
        raise _broken("counts", f"must be between 0 and {shape[1]}", counts)
    node = np.arange(1, shape[1] + 1)
    is_node = node <= counts[:, None]
    is_placed = (parents >= 0) & (parents < node)
    if not (is_placed | ~is_node).all():
        raise _broken("parents", "must stand before their children", parents[~is_placed & is_node])
    above = np.pad(depths, ((0, 0), (1, 0)))
    is_right = (depths == np.take_along_axis(above, np.where(is_node, parents, 0), axis=1) + 1) & (
        depths <= depth
    )
    if not (is_right | ~is_node).all():
        rule = f"must be one more than the parent's and at most {depth}"
        raise _broken("depths", rule, depths[~is_right & is_node])


def _broken(field: str, rule: str, values: Sequence[int] | NDArray[np.int32]) -> Unavailable:
    got = ", ".join(str(value) for value in values[:_MOST_SHOWN]) + ", …" * (len(values) > _MOST_SHOWN)
    return Unavailable(f"model tree_builder answered no draft trees: {field} {rule}, got [{got}]; repair it")
