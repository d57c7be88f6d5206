"""The walk on the device against the host's, and where a path ends."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree import accept
from ddtree.device.kernels.walk import walk
from ddtree.device.trees import DeviceAcceptance
from ddtree.types import TreeBatch
from tests.fakes.device import DEVICE
from tests.fakes.device_trees import ListTree, on_device, poisoned_memory
from tests.fakes.random_trees import depths_of

few = settings(deadline=None, max_examples=60)


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    with poisoned_memory():
        yield


def check(trees: list[ListTree], nodes: int, target: torch.Tensor, depth: int, fill: int) -> list[int]:
    """Compare with the host's walk; give the accepted counts."""
    packed = on_device(trees, nodes, fill)
    found = walk(packed, target.to(DEVICE), depth)
    plain = on_device(trees, nodes, 0)
    expected = accept.walk(
        TreeBatch(plain.tokens, plain.parents, plain.depths, plain.counts), target.to(DEVICE), depth
    )
    assert found.accepted_counts.tolist() == expected.accepted_counts.tolist()
    assert found.path_rows.tolist() == expected.path_nodes.tolist()
    assert found.accepted_tokens.tolist() == expected.accepted_tokens.tolist()
    assert found.bonus_tokens.tolist() == expected.bonus_tokens.tolist()
    return [int(count) for count in found.accepted_counts.tolist()]


def willing_target(source: random.Random, trees: list[ListTree], nodes: int, share: float) -> torch.Tensor:
    """Of each row, often the token of one of its children; padding rows say anything."""
    target = torch.randint(0, 3, (len(trees), nodes + 1), generator=torch.Generator().manual_seed(1))
    for place, tree in enumerate(trees):
        for node in range(len(tree.parents) + 1):
            below = [t for t, parent in zip(tree.tokens, tree.parents, strict=True) if parent == node]
            if below and source.random() < share:
                target[place, node] = source.choice(below)
    return target


@few
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 12), st.sampled_from([0, 1, 2, 2**30]))
def test_paths_equal_the_hosts(seed: int, places: int, nodes: int, fill: int) -> None:
    source = random.Random(seed)
    reach = source.choice([None, 2])
    trees = [ListTree.random(source, source.randint(0, nodes), reach) for _ in range(places)]
    depth = max([1, *(max(depths_of(tree.parents)) for tree in trees)]) + source.randint(0, 3)
    check(trees, nodes, willing_target(source, trees, nodes, source.choice([0.5, 0.95])), depth, fill)


@pytest.mark.parametrize("nodes", [63, 64, 65, 256])
def test_paths_of_large_trees(nodes: int) -> None:
    source = random.Random(nodes)
    trees = [ListTree.random(source, nodes, 20), ListTree.random(source, nodes // 2, 9)]
    trees.append(ListTree([5] * 31, list(range(31))))
    depth = max(max(depths_of(tree.parents)) for tree in trees)
    counts = check(trees, nodes, willing_target(source, trees, nodes, 1.0), depth, fill=0)
    assert counts[2] == 31
    assert min(counts) >= 2


def test_token_zero_is_a_token_and_padding_is_no_node() -> None:
    chain = ListTree([0, 0, 0], [0, 1, 2])
    assert check([chain, ListTree([], []), ListTree([0], [0])], 5, torch.zeros(3, 6).long(), 4, 0) == [
        3,
        0,
        1,
    ]


def test_the_last_sibling_can_be_the_accepted_one() -> None:
    tree = ListTree([4, 5, 6, 8], [0, 0, 0, 3])
    assert check([tree], 4, torch.tensor([[6, 1, 1, 8, 9]]), 3, 0) == [2]


def test_a_path_ends_where_its_room_ends() -> None:
    chain = ListTree([7, 8, 9], [0, 1, 2])
    found = walk(on_device([chain], 3, 0), torch.tensor([[7, 8, 9, 1]], device=DEVICE), 2)
    assert found.path_rows.tolist() == [[0, 1, 2]]
    assert found.accepted_tokens.tolist() == [[7, 8]]
    assert found.bonus_tokens.tolist() == [9], "the target's token after the last accepted node"


def test_one_copy_carries_everything() -> None:
    chain = ListTree([7, 8], [0, 1])
    found = walk(
        on_device([chain, ListTree([7], [0])], 2, 0), torch.tensor([[7, 8, 1], [3, 1, 1]], device=DEVICE), 2
    )
    copied = DeviceAcceptance.over(found.packed.cpu(), 2, 2)
    assert copied.accepted_counts.tolist() == [2, 0]
    assert copied.bonus_tokens.tolist() == [1, 3]
    assert copied.accepted_tokens.tolist() == [[7, 8], [0, 0]]
    assert copied.path_rows.tolist() == [[0, 1, 2], [0, 0, 0]]
