"""The vectorised walk against one that follows a dictionary."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.accept import walk
from ddtree.types import TreeBatch
from ddtree.verify_batch import Paths
from tests.oracles.tree_walks import follow_target

no_deadline = settings(deadline=None)  # the machine may be busy with other things

Case = tuple[list[int], list[int], list[int]]  # tokens, parents, target tokens


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A random tree with few token ids, 0 among them, and a target that often agrees with a child."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(0, 12))):
        token, parent = draw(st.integers(0, 3)), draw(st.integers(0, len(tokens)))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    target = [draw(st.integers(0, 3)) for _ in range(len(tokens) + 1)]
    return tokens, parents, target


def depths_of(parents: list[int]) -> list[int]:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths[1:]


def pack(trees: list[Case], fill: int = 0) -> tuple[TreeBatch, torch.Tensor]:
    width = max(len(tokens) for tokens, _, _ in trees)

    def rows(lists: list[list[int]], size: int) -> torch.Tensor:
        padded = [values + [fill] * (size - len(values)) for values in lists]
        return torch.tensor(padded, dtype=torch.int32).reshape(len(lists), size)

    batch = TreeBatch(
        tokens=rows([tokens for tokens, _, _ in trees], width),
        parents=rows([parents for _, parents, _ in trees], width),
        depths=rows([depths_of(parents) for _, parents, _ in trees], width),
        counts=torch.tensor([len(tokens) for tokens, _, _ in trees], dtype=torch.int32),
    )
    return batch, rows([target for _, _, target in trees], width + 1)


def check(trees: list[Case], fill: int = 0) -> None:
    batch, target = pack(trees, fill)
    result = walk(batch, target)
    for index, (tokens, parents, target_tokens) in enumerate(trees):
        expected = follow_target(tokens, parents, target_tokens)
        count = int(result.accepted_counts[index])
        assert count == len(expected.nodes)
        assert result.path_nodes[index, : count + 1].tolist() == [0, *expected.nodes]
        assert result.accepted_tokens[index, :count].tolist() == expected.tokens
        assert int(result.bonus_tokens[index]) == expected.bonus
        assert not result.path_nodes[index, count + 1 :].any()
        assert not result.accepted_tokens[index, count:].any()
    assert result.path_nodes.shape[1] == result.accepted_tokens.shape[1] + 1


@no_deadline
@given(st.lists(cases(), min_size=1, max_size=4))
def test_walk_equals_dictionary_walk(trees: list[Case]) -> None:
    check(trees)


@no_deadline
@given(st.lists(cases(), min_size=1, max_size=4), st.integers(1, 3))
def test_whatever_padding_holds_is_never_accepted(trees: list[Case], fill: int) -> None:
    # Stale padding: parents, depths and tokens of an earlier, larger tree.
    check(trees, fill)


def test_token_zero_is_a_token() -> None:
    check([([0, 0, 0], [0, 1, 2], [0, 0, 0, 0]), ([0], [0], [0, 7])])


def test_last_sibling_can_be_the_accepted_one() -> None:
    batch, target = pack([([4, 5, 6, 8], [0, 0, 0, 3], [6, 1, 1, 8, 9])])
    result = walk(batch, target)
    assert result.path_nodes.tolist() == [[0, 3, 4]]
    assert result.accepted_tokens.tolist() == [[6, 8]]
    assert result.bonus_tokens.tolist() == [9]


def test_a_match_below_a_rejected_parent_is_not_accepted() -> None:
    batch, target = pack([([4, 5], [0, 1], [9, 5, 1])])
    result = walk(batch, target)
    assert result.accepted_counts.tolist() == [0]
    assert result.bonus_tokens.tolist() == [9]


def test_a_long_chain_is_accepted_in_full_and_to_its_first_error() -> None:
    count = 150
    tokens, parents = list(range(count)), list(range(count))
    whole = [*tokens, 7]
    broken = [*tokens[:100], 999, *tokens[101:], 7]
    check([(tokens, parents, whole), (tokens, parents, broken)])


def test_given_depth_sets_the_width_without_changing_the_path() -> None:
    batch, target = pack([([4, 5], [0, 1], [4, 5, 6])])
    result = walk(batch, target, max_depth=15)
    assert result.path_nodes.tolist() == [[0, 1, 2] + [0] * 13]
    assert result.accepted_tokens.shape == (1, 15)


def test_no_nodes_give_the_bonus_token_alone() -> None:
    batch, target = pack([([], [], [3]), ([], [], [0])])
    result = walk(batch, target)
    assert result.bonus_tokens.tolist() == [3, 0]
    assert result.path_nodes.tolist() == [[0], [0]]
    assert result.accepted_tokens.shape == (2, 0)


def test_paths_on_the_host_end_where_they_were_accepted() -> None:
    """Two trees: root, 2, 3 with the tokens 20, 30; and the root alone."""
    trees = TreeBatch(
        torch.tensor([[10, 20, 30], [7, 8, 9]]),
        torch.tensor([[0, 0, 2], [0, 1, 2]]),
        torch.tensor([[1, 1, 2], [1, 2, 3]]),
        torch.tensor([3, 3]),
    )
    paths = Paths.of(walk(trees, torch.tensor([[20, 1, 30, 5], [1, 1, 1, 1]]), 3))
    assert paths.nodes == [[0, 2, 3], [0]]
    assert paths.tokens == [[20, 30], []]
