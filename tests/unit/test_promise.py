"""What is promised of draft trees, worked out naively and compared with what the arrays say."""

from __future__ import annotations

from math import exp, inf, log

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddtree.promise import Promise, trusted, updated
from ddtree.tree import build_trees
from ddtree.types import TreeRequest


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.booleans())
def test_paths_and_surprise_equal_a_walk_node_by_node(seed: int, has_edges: bool) -> None:
    generator = np.random.default_rng(seed)
    request = random_request(generator, has_edges=has_edges)
    trees = build_trees(request)
    promise = Promise.of(trees, request)
    depth = request.top_ids.shape[1]
    accepted = np.zeros((len(trees.counts), depth), dtype=np.int64)
    counts = np.zeros(len(trees.counts), dtype=np.int64)
    hits, promised = [], []
    for index, count in enumerate(trees.counts.tolist()):
        own, paths, ranks = [1.0], [1.0], [0]
        for node in range(count):
            d, parent = int(trees.depths[index, node]), int(trees.parents[index, node])
            token = int(trees.tokens[index, node])
            rank = request.top_ids[index, d - 1].tolist().index(token)
            row = (
                request.edge_log_probs[index, d - 1, ranks[parent]]
                if has_edges
                else request.top_log_probs[index, d - 1]
            )
            own.append(exp(float(row[rank])))
            paths.append(paths[parent] * own[-1])
            ranks.append(rank)
        assert promise.own[index, :count].tolist() == pytest.approx(own[1:], rel=1e-5)
        assert promise.paths[index, :count].tolist() == pytest.approx(paths[1:], rel=1e-5)
        assert not promise.paths[index, count:].any()
        at, expected, length = 0, 0.0, 0
        while True:
            children = [n for n in range(count) if int(trees.parents[index, n]) == at]
            expected += min(1.0, sum(own[n + 1] for n in children))
            if not children or generator.random() < 0.3:
                break
            chosen = children[int(generator.integers(len(children)))]
            accepted[index, length] = int(trees.tokens[index, chosen])
            length, at = length + 1, chosen + 1
        counts[index] = length
        hits.append(length)
        promised.append(expected)
    surprise, told = promise.surprise(accepted, counts)
    assert told.tolist() == pytest.approx(promised, rel=1e-5)
    assert surprise.tolist() == pytest.approx(np.asarray(hits) - promised, abs=1e-5)
    assert promise.tokens() == pytest.approx(promise.paths.sum(axis=1))


def random_request(generator: np.random.Generator, *, has_edges: bool) -> TreeRequest:
    sequences, depth, width = 3, 4, 5
    logits = np.sort(generator.normal(size=(sequences, depth, width)) * 2)[..., ::-1].copy()
    log_probs = torch.from_numpy(logits).log_softmax(dim=-1).float()
    ids = np.stack([[generator.permutation(40)[:width] for _ in range(depth)] for _ in range(sequences)])
    edges = (
        torch.from_numpy(generator.normal(size=(sequences, depth, width, width))).log_softmax(dim=-1).float()
    )
    return TreeRequest(
        torch.from_numpy(ids.astype(np.int32)),
        log_probs,
        torch.tensor([0, 7, 20], dtype=torch.int32),
        torch.zeros(sequences, dtype=torch.bool),
        torch.zeros(0),
        edges if has_edges else torch.zeros((0, 0, 0, 0)),
    )


@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6),
    st.floats(0.25, 4.0),
)
@example([1 - 2**-53], 0.25)  # so nearly sure that float32 cannot tell its probability from 1
def test_a_corrected_position_is_in_order_and_within_bounds(probs: list[float], trust: float) -> None:
    rows = torch.tensor([[[log(p) if p else -inf for p in sorted(probs, reverse=True)]]])
    changed = trusted(rows, torch.tensor([trust]))[0, 0]
    assert bool((changed <= 1e-6).all())
    assert changed.tolist() == sorted(changed.tolist(), reverse=True)
    assert changed[1:].tolist() == rows[0, 0, 1:].tolist(), "only the best candidate is corrected"
    best = 1 - (1 - max(probs)) ** trust
    others = sorted(probs)[-2] if len(probs) > 1 else 0.0
    assert exp(float(changed[0])) == pytest.approx(max(best, others), abs=1e-5)


def test_full_trust_changes_nothing_for_that_sequence_alone() -> None:
    rows = torch.tensor([[[0.6, 0.3]], [[0.6, 0.3]]]).log()
    changed = trusted(rows, torch.tensor([1.0, 2.0]))
    assert changed[0].tolist() == rows[0].tolist()
    assert changed[1].exp().flatten().tolist() == pytest.approx([0.84, 0.3])
    edges = torch.zeros((0, 0, 0, 0))
    assert trusted(edges, torch.tensor([2.0])) is edges


@pytest.mark.parametrize(("true", "low", "high"), [(1.0, 0.8, 1.25), (0.5, 0.35, 0.7), (2.0, 1.5, 2.7)])
def test_trust_settles_where_drafts_keep_their_word(true: float, low: float, high: float) -> None:
    """Misses have the power `true` of what is said of them; three positions a round."""
    generator, trust, seen = np.random.default_rng(3), 1.0, []
    for _ in range(600):
        said = generator.uniform(0.2, 0.8, size=3)
        hits = generator.random(3) < 1 - (1 - said) ** true
        promised = float((1 - (1 - said) ** trust).sum())
        trust = updated(trust, float(hits.sum()) - promised, promised)
        seen.append(trust)
    assert low < float(np.mean(seen[200:])) < high


def test_trust_has_bounds() -> None:
    assert updated(4.0, 15.0, 0.1) == 4.0
    assert updated(0.25, -15.0, 15.0) == 0.25
