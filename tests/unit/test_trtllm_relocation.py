"""Accepted paths to the front of a request's rows, over a simulator of the engine's paged pool."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.trtllm.relocation import draft_indices, moves
from tests.fakes.trtllm_attention import PagedPool

BLOCK = 32
LAYERS, KV_HEADS, HEAD_DIM = 2, 1, 2


def filled(tokens: int, *, blocks: int = 24) -> PagedPool:
    """A pool where row p of request 1 holds the number p in every layer; request 2 holds -p."""
    pool = PagedPool(LAYERS, blocks, BLOCK, KV_HEADS, HEAD_DIM)
    for request, sign in ((1, 1.0), (2, -1.0)):
        assert pool.open(request, tokens)
        rows = sign * torch.arange(tokens).float()[:, None, None].expand(tokens, KV_HEADS, HEAD_DIM)
        for layer in range(LAYERS):
            pool.write(request, layer, 0, rows + layer * 1000, rows + layer * 1000 + 0.5)
    return pool


def held(pool: PagedPool, request: int, layer: int, stop: int) -> list[float]:
    keys, values = pool.read(request, layer, stop)
    assert torch.equal(keys + 0.5, values), "keys and values moved apart"
    return (keys[:, 0, 0] - layer * 1000).tolist()


def relocate(pool: PagedPool, base: int, path: list[int]) -> None:
    for move in moves(base, draft_indices(path)):
        pool.copy(1, move.source, move.destination)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """Length before, draft nodes, and a path: ascending node indices, the root first."""
    base = draw(st.sampled_from([0, 1, 5, 29, 30, 31, 32, 33, 62, 63, 64, 100]))
    nodes = draw(st.integers(1, 80))
    accepted = draw(st.sets(st.integers(1, nodes), max_size=12))
    return base, nodes, [0, *sorted(accepted)]


@settings(max_examples=150, deadline=None)
@given(cases())
def test_the_path_follows_the_root_and_nothing_before_it_changes(case: tuple[int, int, list[int]]) -> None:
    base, nodes, path = case
    tokens = base + 1 + nodes
    pool = filled(tokens)
    relocate(pool, base, path)
    expected = [*range(base), *(base + node for node in path)]
    for layer in range(LAYERS):
        assert held(pool, 1, layer, len(expected)) == expected
        assert held(pool, 2, layer, tokens) == [-float(row) for row in range(tokens)]


@settings(max_examples=150, deadline=None)
@given(cases())
def test_one_by_one_is_the_same_as_reading_all_first(case: tuple[int, int, list[int]]) -> None:
    """Whichever way the kernel copies, the result is the same: in this order no source was overwritten."""
    base, _, path = case
    steps = moves(base, draft_indices(path))
    written: set[int] = set()
    for step in steps:
        assert step.source not in written
        assert step.source > step.destination
        written.add(step.destination)


def test_a_block_boundary_and_an_overlap() -> None:
    """Rows 31 and 32 are in different blocks; the second move reads where the third writes."""
    pool = filled(60)
    relocate(pool, 30, [0, 2, 3, 4])
    assert held(pool, 1, 1, 34) == [*range(31), 32, 33, 34]


def test_a_sibling_that_is_not_the_first_is_accepted() -> None:
    pool = filled(12)
    relocate(pool, 4, [0, 3, 7])
    assert held(pool, 1, 0, 7) == [0, 1, 2, 3, 4, 7, 11]


@pytest.mark.parametrize("path", [[0], [0, 1], [0, 1, 2, 3]])
def test_a_path_along_the_front_moves_nothing(path: list[int]) -> None:
    assert moves(9, draft_indices(path)) == ()


@pytest.mark.parametrize("path", [[1, 2], [0, 2, 2], [0, 3, 1]])
def test_what_is_no_path_is_refused(path: list[int]) -> None:
    with pytest.raises(AssertionError):
        draft_indices(path)
