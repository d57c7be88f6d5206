"""The commit on the device: what moves, what stays, and how a sequence goes on."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.device.kernels.move import commit_rows, gather_rows, keep_rows
from ddtree.device.rows import DeviceRows
from ddtree.device.trees import DeviceAcceptance
from ddtree.kv_cache import CacheShape, KvPool
from tests.fakes.device import DEVICE
from tests.fakes.random_trees import path_to, random_parents

few = settings(deadline=None, max_examples=25)
PAGE = 4


@dataclass(frozen=True)
class Sequence:
    """A place of a step: what is committed, its tree and the node where the accepted path ends."""

    length: int
    parents: list[int]
    last: int
    is_empty: bool = False

    @property
    def path(self) -> list[int]:
        """Rows from the root on."""
        return path_to(self.parents, self.last)


def acceptance_of(sequences: list[Sequence], depth: int) -> DeviceAcceptance:
    """As the walk would leave it, poisoned in empty places; the bonus of place s is 900 + s."""
    acceptance = DeviceAcceptance.unwritten(len(sequences), depth, DEVICE)
    acceptance.packed.zero_()
    for place, sequence in enumerate(sequences):
        length = len(sequence.path)
        acceptance.accepted_counts[place] = depth if sequence.is_empty else length - 1
        acceptance.bonus_tokens[place] = 900 + place
        acceptance.path_rows[place, :length] = torch.tensor(sequence.path)
    return acceptance


def rows_of(sequences: list[Sequence], rows: int, slots: list[torch.Tensor]) -> DeviceRows:
    """As the layout would leave it, except that empty places keep an old tree's slots."""
    laid = DeviceRows.empty(len(sequences), rows, 1, PAGE, DEVICE)
    for place, sequence in enumerate(sequences):
        count = len(sequence.parents) + 1
        laid.lengths[place] = sequence.length
        laid.counts[place] = 0 if sequence.is_empty else count
        laid.slots[place, :count] = slots[place][sequence.length : sequence.length + count]
    return laid


def check(sequences: list[Sequence], rows: int, depth: int, shape: CacheShape) -> None:
    """Compare the whole pool with one in which the host moves the paths; pages are scattered."""
    slots_needed = sum(sequence.length + rows + PAGE for sequence in sequences) + PAGE
    pools = [
        KvPool(shape, budget_bytes=shape.bytes_per_slot * slots_needed, page_size=PAGE, device=DEVICE)
        for _ in range(2)
    ]
    values = torch.randn(pools[0].keys_values.shape, generator=torch.Generator().manual_seed(0))
    for pool in pools:
        pool.keys_values.copy_(values)
    pages = torch.randperm(pools[0].num_pages, generator=torch.Generator().manual_seed(1)).tolist()
    slots = []
    for sequence in sequences:
        held = [pages.pop() for _ in range(-(-(sequence.length + rows) // PAGE))]
        slots.append(torch.tensor([page * PAGE + offset for page in held for offset in range(PAGE)]))

    commit_rows(pools[0].keys_values, rows_of(sequences, rows, slots), acceptance_of(sequences, depth))
    for sequence, own in zip(sequences, slots, strict=True):
        if not sequence.is_empty:
            staged = own[sequence.length :].to(DEVICE)
            path = torch.tensor(sequence.path, device=DEVICE)
            pools[1].move(staged[path], staged[: len(path)])
    assert torch.equal(pools[0].keys_values, pools[1].keys_values)


def random_sequence(source: random.Random, most: int) -> Sequence:
    parents = random_parents(source, source.randint(0, most), reach=source.choice([None, 2]))
    return Sequence(
        source.randint(0, 9), parents, source.randint(0, len(parents)), is_empty=source.random() < 0.2
    )


@few
@given(st.integers(0, 10_000), st.integers(1, 4))
def test_the_pool_afterwards_is_the_hosts(seed: int, places: int) -> None:
    source = random.Random(seed)
    sequences = [random_sequence(source, 9) for _ in range(places)]
    check(sequences, 10, 9, CacheShape(2, kv_heads=2, head_dim=3, dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_a_real_size_that_overlap(dtype: torch.dtype) -> None:
    """Each second node of a chain of nodes with a sibling: every row moves, most onto another's."""
    parents = [0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12]
    sequences = [Sequence(70, parents, 14), Sequence(0, parents, 13), Sequence(3, parents, 6, is_empty=True)]
    check(sequences, 15, 7, CacheShape(2, kv_heads=2, head_dim=160, dtype=dtype))


def test_a_path_of_the_first_rows_stands_where_it_belongs() -> None:
    pool = torch.randn(1, 2, 8, 1, 4).to(DEVICE)
    before = pool.clone()
    chain = Sequence(0, [0, 1, 2], 3)
    rows = rows_of([chain], 4, [torch.arange(8)])
    commit_rows(pool, rows, acceptance_of([chain], 3))
    assert torch.equal(pool, before)


def test_a_row_that_is_staged_nowhere_is_moved_nowhere() -> None:
    pool = torch.randn(1, 2, 8, 1, 4).to(DEVICE)
    before = pool.clone()
    tree = Sequence(0, [0, 0, 2], 3)
    rows = rows_of([tree], 4, [torch.arange(8)])
    rows.slots[0, 2:] = -1
    commit_rows(pool, rows, acceptance_of([tree], 2))
    assert torch.equal(pool, before)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 5), (torch.bfloat16, 1100), (torch.float16, 64)])
def test_rows_of_the_path_are_gathered(dtype: torch.dtype, size: int) -> None:
    """Rows off the path hold NaN, which must not show behind a path's end."""
    sequences = [Sequence(0, [0, 0, 2], 3), Sequence(0, [], 0), Sequence(0, [0, 1, 2], 3)]
    values = torch.full((3, 4, size), torch.nan).to(dtype)
    expected = torch.zeros(3, 4, size).to(dtype)
    for place, sequence in enumerate(sequences):
        for step, row in enumerate(sequence.path):
            expected[place, step] = values[place, row] = torch.randn(size).to(dtype)
    gathered = gather_rows(values.reshape(12, size).to(DEVICE), acceptance_of(sequences, 3))
    assert gathered.dtype == dtype
    assert torch.equal(gathered.cpu(), expected)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 5), (torch.bfloat16, 1100)])
def test_rows_of_the_path_are_kept_beside_their_slots(dtype: torch.dtype, size: int) -> None:
    """An empty place keeps nothing, nor does a row without a slot; the rest of the pool stays."""
    sequences = [
        Sequence(1, [0, 0, 2], 3),
        Sequence(0, [0], 1, is_empty=True),
        Sequence(2, [], 0),
        Sequence(0, [0, 1], 2),
    ]
    slots = [torch.arange(8) + 8 * place for place in range(4)]
    rows = rows_of(sequences, 4, slots)
    rows.slots[3, 2:] = -1
    pool = torch.randn(32, size).to(dtype).to(DEVICE)
    values = torch.randn(4, 4, size).to(dtype)
    expected = pool.clone()
    for place, kept in ((0, [1, 2, 3]), (2, [18]), (3, [24, 25])):
        expected[kept] = values[place, : len(kept)].to(DEVICE)
    keep_rows(values.to(DEVICE), pool, rows, acceptance_of(sequences, 3))
    assert torch.equal(pool, expected)
