"""The verifier against plain forwards: node logits, the committed cache, features, and lost sessions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ddtree.attention.plan import Segment, StepPlan
from ddtree.tree_mask import ancestor_bits, expand
from ddtree.types import (
    FeatureRequest,
    PrefillRequest,
    SessionBatch,
    Status,
    TreeBatch,
    VerifyRequest,
    VerifyResult,
)
from ddtree.verify import TargetVerifier
from tests.fakes.pipeline import GreedyReference, make_verifier
from tests.fakes.tiny_models import VOCAB_SIZE, make_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def verifier(folder: Path) -> TargetVerifier:
    return make_verifier(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> GreedyReference:
    return GreedyReference(folder)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def sessions(*rows: tuple[int, int, int]) -> SessionBatch:
    ids, epochs, lengths = zip(*rows, strict=True)
    return SessionBatch(torch.tensor(ids), ints(*epochs), ints(*lengths))


def prefill(verifier: TargetVerifier, session_id: int, ids: Sequence[int], reserve: int = 200) -> int:
    request = PrefillRequest(sessions((session_id, 0, 0)), ints(*ids), ints(len(ids)), ints(reserve))
    result = verifier.prefill(request)
    assert result.status.tolist() == [Status.OK]
    return int(result.next_tokens[0])


def tree_batch(*trees: Sequence[tuple[int, int]]) -> TreeBatch:
    """Trees as lists of (token, parent); depths follow."""
    width = max(len(tree) for tree in trees)
    tokens, parents, depths = (torch.zeros((len(trees), width), dtype=torch.int32) for _ in range(3))
    for row, tree in enumerate(trees):
        for column, (token, parent) in enumerate(tree):
            tokens[row, column], parents[row, column] = token, parent
            depths[row, column] = 1 + (depths[row, parent - 1] if parent else 0)
    return TreeBatch(tokens, parents, depths, ints(*(len(tree) for tree in trees)))


def verify(
    verifier: TargetVerifier, rows: Sequence[tuple[int, int, int]], roots: Sequence[int], trees: TreeBatch
) -> VerifyResult:
    return verifier.verify(VerifyRequest(sessions(*rows), ints(*roots), trees))


def random_tree(source: random.Random, nodes: int) -> list[tuple[int, int]]:
    """Distinct (token, parent) pairs, parents before children, token 0 among them."""
    pairs: set[tuple[int, int]] = set()
    tree: list[tuple[int, int]] = []
    while len(tree) < nodes:
        pair = (source.choice([0, source.randrange(VOCAB_SIZE)]), source.randrange(len(tree) + 1))
        if pair not in pairs:
            pairs.add(pair)
            tree.append(pair)
    return tree


def path_of(tree: Sequence[tuple[int, int]], node: int) -> list[int]:
    tokens = []
    while node:
        token, node = tree[node - 1][0], tree[node - 1][1]
        tokens.append(token)
    return tokens[::-1]


@pytest.mark.parametrize("seed", range(4))
def test_logits_of_every_node_equal_a_plain_forward_of_its_path(
    folder: Path, reference: GreedyReference, seed: int
) -> None:
    """Two sequences of different lengths in one step, 70 nodes in one of them: more than one mask word."""
    source = random.Random(seed)
    verifier = make_verifier(folder)
    prompts = [[source.randrange(256) for _ in range(length)] for length in (5, 33)]
    trees = [random_tree(source, 70), random_tree(source, 9)]
    roots = [3, 4]
    for index, prompt in enumerate(prompts):
        prefill(verifier, index, prompt)
    batch = tree_batch(*trees)
    sees = expand(ancestor_bits(batch.parents, batch.counts))
    segments, start = [], 0
    for index, tree in enumerate(trees):
        session = verifier.sessions.find(index, 0, len(prompts[index]))
        assert session is not None
        rows = len(tree) + 1
        depths = torch.cat((torch.zeros(1), batch.depths[index, : rows - 1])).long()
        segments.append(
            Segment(start, rows, session.pages, session.length, depths, sees[index, :rows, :rows])
        )
        start += rows
    ids = torch.tensor([token for root, tree in zip(roots, trees, strict=True)
                        for token in (root, *(token for token, _ in tree))])  # fmt: skip
    plan = StepPlan.build(verifier.pool, tuple(segments))
    logits = verifier.target.forward(ids, plan, torch.arange(len(ids))).logits
    row = 0
    for prompt, root, tree in zip(prompts, roots, trees, strict=True):
        for node in range(len(tree) + 1):
            plain = reference.model(torch.tensor([[*prompt, root, *path_of(tree, node)]])).logits[0, -1]
            assert (logits[row] - plain).abs().max() <= 1e-4
            row += 1


def test_siblings_with_the_same_position_get_the_same_rotation(verifier: TargetVerifier) -> None:
    """The same token as first and as last child of the root has the same key in every layer."""
    prefill(verifier, 1, [9, 8, 7])
    session = verifier.sessions.find(1, 0, 3)
    assert session is not None
    tree = [(5, 0), (6, 0), (7, 1), (8, 3), (5, 2)]  # node 5 repeats node 1's token one level deeper
    twins = [(5, 0), (6, 0), (11, 0), (5, 3), (5, 2)]  # nodes 4 and 5: same token, same depth
    for nodes, same in ((tree, False), (twins, True)):
        batch = tree_batch(nodes)
        sees = expand(ancestor_bits(batch.parents, batch.counts))[0]
        depths = torch.cat((torch.zeros(1), batch.depths[0])).long()
        plan = StepPlan.build(verifier.pool, (Segment(0, len(nodes) + 1, session.pages, 3, depths, sees),))
        verifier.target.forward(torch.tensor([2, *(t for t, _ in nodes)]), plan, torch.arange(1))
        first = 4 if same else 1
        keys = verifier.pool.keys_values[0, 0, plan.slots]
        assert torch.allclose(keys[first], keys[5], atol=1e-6) == same


def continuation(reference: GreedyReference, ids: Sequence[int], count: int) -> list[int]:
    tokens = list(ids)
    for _ in range(count):
        tokens.append(int(reference.model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(ids) :]


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("depth", [0, 1, 3, 6])
def test_the_cache_after_a_commit_equals_a_fresh_prefill(
    folder: Path, reference: GreedyReference, place: str, depth: int
) -> None:
    """The accepted path stands as first, middle or last of its siblings at every depth."""
    verifier, fresh = make_verifier(folder), make_verifier(folder)
    prompt = [20, 21, 22, 23, 24]
    root = prefill(verifier, 1, prompt)
    truth = continuation(reference, [*prompt, root], depth + 1)
    tree: list[tuple[int, int]] = []
    parent = 0
    for token in truth[:depth]:
        decoys = [(token + shift) % VOCAB_SIZE for shift in (1, 2, 3)]
        at = {"first": 0, "middle": 1, "last": 3}[place]
        siblings = [*decoys[:at], token, *decoys[at:]]
        base = len(tree)
        tree += [(sibling, parent) for sibling in siblings]
        parent = base + at + 1
    result = verify(verifier, [(1, 0, len(prompt))], [root], tree_batch(tree))
    assert result.accepted_tokens[0, : int(result.accepted_counts[0])].tolist() == truth[:depth]
    assert int(result.bonus_tokens[0]) == truth[depth]

    committed = [*prompt, root, *truth[:depth]]
    prefill(fresh, 1, committed)
    stages = [
        (verifier, verifier.sessions.find(1, 0, len(committed))),
        (fresh, fresh.sessions.find(1, 0, len(committed))),
    ]
    caches = []
    for stage, session in stages:
        assert session is not None
        slots = session.pages.slots[: len(committed)]
        caches.append((stage.pool.keys_values[:, :, slots], stage.pool.features[slots]))
    assert torch.allclose(caches[0][0], caches[1][0], atol=1e-4)
    assert torch.allclose(caches[0][1], caches[1][1], atol=1e-4)
    assert torch.allclose(result.features, caches[1][1][len(prompt) :], atol=1e-4)


def test_two_hundred_rounds_of_chance_keep_the_cache_exact(folder: Path, reference: GreedyReference) -> None:
    source = random.Random(5)
    verifier = make_verifier(folder)
    ids = [1, 2, 3]
    root = prefill(verifier, 1, ids, reserve=500)
    ids.append(root)
    while len(ids) < 200:
        truth = continuation(reference, ids, 4)
        tree = random_tree(source, source.randrange(1, 12))
        spine, parent = truth[: source.randrange(4)], 0
        for token in spine:
            if (token, parent) in tree:
                parent = tree.index((token, parent)) + 1
            else:
                tree.append((token, parent))
                parent = len(tree)
        result = verify(verifier, [(1, 0, len(ids) - 1)], [ids[-1]], tree_batch(tree))
        accepted = result.accepted_tokens[0, : int(result.accepted_counts[0])].tolist()
        assert [*accepted, int(result.bonus_tokens[0])] == continuation(reference, ids, len(accepted) + 1)
        assert len(accepted) >= len(spine)
        ids += [*accepted, int(result.bonus_tokens[0])]
        verifier.check_integrity()


def test_a_smaller_tree_right_after_a_larger_one_sees_nothing_of_it(
    folder: Path, reference: GreedyReference
) -> None:
    verifier = make_verifier(folder)
    root = prefill(verifier, 1, [4, 4, 4])
    large = verify(verifier, [(1, 0, 3)], [root], tree_batch(random_tree(random.Random(1), 40)))
    kept = int(large.accepted_counts[0])
    ids = [4, 4, 4, root, *large.accepted_tokens[0, :kept].tolist(), int(large.bonus_tokens[0])]
    small = verify(verifier, [(1, 0, len(ids) - 1)], [ids[-1]], tree_batch([(0, 0), (1, 1)]))
    expected = continuation(reference, ids, 1 + int(small.accepted_counts[0]))
    assert int(small.bonus_tokens[0]) == expected[-1]


def test_a_batch_of_different_trees_is_each_tree_alone(folder: Path) -> None:
    source = random.Random(3)
    together, alone = make_verifier(folder), make_verifier(folder)
    prompts = [[source.randrange(256) for _ in range(length)] for length in (7, 7, 21)]
    trees = [random_tree(source, nodes) for nodes in (30, 4, 1)]
    rows, roots = [], []
    for index, prompt in enumerate(prompts):
        roots.append(prefill(together, index, prompt))
        assert prefill(alone, index, prompt) == roots[-1]
        rows.append((index, 0, len(prompt)))
    packed = verify(together, rows, roots, tree_batch(*trees))
    start = 0
    for index, tree in enumerate(trees):
        single = verify(alone, [rows[index]], [roots[index]], tree_batch(tree))
        count = int(single.accepted_counts[0])
        assert int(packed.accepted_counts[index]) == count
        assert int(packed.bonus_tokens[index]) == int(single.bonus_tokens[0])
        assert torch.allclose(packed.features[start : start + count + 1], single.features, atol=1e-4)
        start += count + 1


def test_unknown_sessions_are_lost_and_the_others_are_served(verifier: TargetVerifier) -> None:
    root = prefill(verifier, 1, [1, 2, 3])
    trees = tree_batch([(5, 0)], [(5, 0)], [(5, 0)], [(5, 0)])
    rows = [(2, 0, 3), (1, 0, 3), (1, 1, 4), (1, 0, 9)]
    result = verify(verifier, rows, [root] * 4, trees)
    lost = Status.SESSION_LOST
    assert result.status.tolist() == [lost, Status.OK, lost, lost]
    assert result.features.shape[0] == 1 + int(result.accepted_counts[1])
    nobody = verify(verifier, [(5, 0, 3)], [root], tree_batch([(5, 0)]))
    assert nobody.status.tolist() == [Status.SESSION_LOST]
    assert nobody.features.shape[0] == 0


def test_stored_features_are_the_ones_given_out(verifier: TargetVerifier) -> None:
    request = PrefillRequest(sessions((1, 0, 0)), ints(1, 2, 3, 4), ints(4), ints(50))
    given = verifier.prefill(request).features
    stored = verifier.read_features(FeatureRequest(sessions((1, 0, 4)), ints(1), ints(3)))
    assert torch.equal(stored.features, given[1:])
    beyond = verifier.read_features(FeatureRequest(sessions((1, 0, 4)), ints(2), ints(3)))
    assert beyond.status.tolist() == [Status.SESSION_LOST]


def test_a_prompt_in_chunks_is_the_prompt_at_once(folder: Path) -> None:
    prompt = list(range(40, 77))
    whole, chunked = make_verifier(folder), make_verifier(folder)
    at_once = whole.prefill(PrefillRequest(sessions((1, 0, 0)), ints(*prompt), ints(len(prompt)), ints(99)))
    pieces, length = [], 0
    for size in (1, 16, 20):
        ids = prompt[length : length + size]
        result = chunked.prefill(PrefillRequest(sessions((1, 0, length)), ints(*ids), ints(size), ints(99)))
        pieces.append(result.features)
        length += size
    assert torch.allclose(torch.cat(pieces), at_once.features, atol=1e-4)
    assert int(result.next_tokens[0]) == int(at_once.next_tokens[0])


def test_a_full_pool_is_told_and_frees_with_release(folder: Path) -> None:
    verifier = make_verifier(folder, kv_cache_bytes=1)  # a single page of 16 slots
    request = PrefillRequest(sessions((1, 0, 0), (2, 0, 0)), ints(1, 2, 3, 4), ints(2, 2), ints(16, 16))
    result = verifier.prefill(request)
    assert result.status.tolist() == [Status.OK, Status.POOL_FULL]
    assert torch.equal(result.features[2:], torch.zeros_like(result.features[2:]))
    assert verifier.release([1]).pages_used == 0
    verifier.check_integrity()
