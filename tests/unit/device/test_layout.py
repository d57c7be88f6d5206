"""Rows of a verify step as laid out on the device, against loops and the host's ancestor bits."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.device.kernels.layout import lay_out
from ddtree.device.rows import DeviceRows
from ddtree.tree_mask import ancestor_bits, expand
from tests.fakes.device import DEVICE
from tests.fakes.device_trees import ListTree, on_device
from tests.fakes.random_trees import depths_of, sees_of

few = settings(deadline=None, max_examples=40)
POISON = 2**30


@dataclass(frozen=True)
class Laid:
    """Rows of a step and the tokens in them."""

    rows: DeviceRows
    token_ids: torch.Tensor


def lay(
    trees: list[ListTree], nodes: int, *, lengths: list[int], active: list[bool], page_size: int, pages: int
) -> Laid:
    """Lay out into poisoned rows; the pages of place s are 100 s + 7, 100 s + 10, …, as far as needed."""
    places = len(trees)
    rows = DeviceRows.empty(places, nodes + 1, pages, page_size, DEVICE)
    for tensor in (rows.page_table, rows.counts, rows.depths, rows.bits, rows.slots):
        tensor.fill_(POISON)
    rows.lengths.copy_(torch.tensor(lengths))
    for place, tree in enumerate(trees):
        needed = min(pages, -(-(lengths[place] + len(tree.parents) + 1) // page_size))
        rows.page_table[place, :needed] = torch.arange(needed, device=DEVICE) * 3 + 100 * place + 7
    token_ids = torch.full((places, nodes + 1), POISON, device=DEVICE)
    roots = torch.arange(places, device=DEVICE) + 50
    lay_out(on_device(trees, nodes, POISON), roots, torch.tensor(active, device=DEVICE), rows, token_ids)
    return Laid(rows, token_ids)


def check(
    trees: list[ListTree], nodes: int, *, lengths: list[int], active: list[bool], page_size: int = 4
) -> None:
    pages = max(-(-(length + nodes + 1) // page_size) for length in lengths)
    laid = lay(trees, nodes, lengths=lengths, active=active, page_size=page_size, pages=pages)
    rows = laid.rows
    there = [tree if is_active else ListTree([], []) for tree, is_active in zip(trees, active, strict=True)]
    real = on_device(there, nodes, POISON)
    assert torch.equal(rows.bits, ancestor_bits(real.parents, real.counts))
    for place, tree in enumerate(there):
        count = (len(tree.parents) + 1) * active[place]
        padding = nodes + 1 - count
        assert int(rows.counts[place]) == count
        assert rows.depths[place].tolist() == depths_of(tree.parents)[:count] + [0] * padding
        assert laid.token_ids[place].tolist() == [50 + place, *tree.tokens][:count] + [0] * padding
        slots = []
        for position in range(lengths[place], lengths[place] + count):
            page, offset = divmod(position, page_size)
            slots.append((100 * place + 7 + 3 * page) * page_size + offset)
        assert rows.slots[place].tolist() == slots + [-1] * padding


@few
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 9), st.data())
def test_rows_equal_the_hosts(seed: int, places: int, nodes: int, data: st.DataObject) -> None:
    source = random.Random(seed)
    reach = source.choice([None, 1, 2])
    check(
        [ListTree.random(source, source.randint(0, nodes), reach) for _ in range(places)],
        nodes,
        lengths=data.draw(st.lists(st.integers(0, 20), min_size=places, max_size=places)),
        active=data.draw(st.lists(st.booleans(), min_size=places, max_size=places)),
        page_size=source.choice([1, 3, 4, 16]),
    )


@pytest.mark.parametrize("nodes", [62, 63, 64, 65, 127, 128, 256])
def test_words_begin_and_end_where_they_should(nodes: int) -> None:
    """A chain across all words, a bush, and a short tree; bit 63 makes a word negative."""
    source = random.Random(nodes)
    chain = ListTree(list(range(nodes)), list(range(nodes)))
    trees = [chain, ListTree.random(source, nodes, 9), ListTree.random(source, 3)]
    check(trees, nodes, lengths=[5, 0, 1000], active=[True] * 3, page_size=16)


def test_the_module_s_example() -> None:
    laid = lay(
        [ListTree([7, 8, 9], [0, 0, 1])], 3, lengths=[0], active=[True], page_size=16, pages=1
    )  # fmt: skip
    assert laid.rows.bits.tolist() == [[[0b0001], [0b0011], [0b0101], [0b1011]]]
    assert torch.equal(expand(laid.rows.bits)[0].cpu(), sees_of([0, 0, 1]))


def test_a_row_without_a_page_has_no_slot() -> None:
    laid = lay([ListTree([0, 0, 0], [0, 1, 2])], 3, lengths=[6], active=[True], page_size=4, pages=2)
    assert laid.rows.slots.tolist() == [[42, 43, -1, -1]]


def test_rows_for_another_number_of_nodes_are_refused() -> None:
    trees = on_device([ListTree([1], [0])], 4, 0)
    rows = DeviceRows.empty(1, 4, 1, 4, DEVICE)
    with pytest.raises(AssertionError, match="4 nodes and the root need 5 rows, not 4"):
        lay_out(trees, torch.zeros(1), torch.ones(1, dtype=torch.bool), rows, torch.zeros(1, 4))
