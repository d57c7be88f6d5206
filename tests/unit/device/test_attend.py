"""Device attention behind transformers' interface against the reference of all attention, `sdpa`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddtree.attention import sdpa
from ddtree.attention.plan import Segment, StepPlan
from ddtree.device.attend import attend
from ddtree.device.plan import DevicePlan
from ddtree.device.rows import DeviceRows, Sight
from ddtree.kv_cache import CacheShape, KvPool
from ddtree.recurrent.state_pool import PoolSize, StatePool, StateShape
from tests.fakes.device import DEVICE
from tests.fakes.random_trees import depths_of, sees_of

HEADS, KV_HEADS, SIZE, ROWS, PAGE = 4, 2, 8, 4, 16
LENGTHS, PARENTS = (12, 3), ([0, 0, 1], [0])  # the second place has two rows of padding
REAL = torch.tensor([0, 1, 2, 3, 4, 5])  # its rows among the eight


class Attention(nn.Module):
    layer_idx = 1


def normal(*sizes: int, seed: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def make_pools() -> tuple[KvPool, KvPool]:
    shape = CacheShape(2, KV_HEADS, SIZE, dtype=torch.float32)
    budget = 4 * PAGE * shape.bytes_per_slot
    pools = [KvPool(shape, budget_bytes=budget, page_size=PAGE, device=DEVICE) for _ in range(2)]
    for pool in pools:
        pool.keys_values.copy_(normal(*pool.keys_values.shape, seed=0))
    return pools[0], pools[1]


def make_step(pool: KvPool, *, is_causal: bool) -> tuple[DeviceRows, tuple[Segment, ...]]:
    rows = DeviceRows.empty(2, ROWS, 1, PAGE, DEVICE)
    segments, start = [], 0
    for place, (length, parents) in enumerate(zip(LENGTHS, PARENTS, strict=True)):
        pages, count = pool.reserve(PAGE), len(parents) + 1
        assert pages is not None
        sees = torch.ones(count, count, dtype=torch.bool).tril() if is_causal else sees_of(parents)
        depths = torch.arange(count) if is_causal else torch.tensor(depths_of(parents))
        rows.page_table[place] = pages.indices[0]
        rows.lengths[place], rows.counts[place] = length, count
        rows.depths[place, :count] = depths
        rows.bits[place, :count, 0] = (sees.long() << torch.arange(count)).sum(1)
        rows.slots[place, :count] = pages.slots[length : length + count]
        segments.append(Segment(start, count, pages, length, depths.to(DEVICE), sees.to(DEVICE)))
        start += count
    return rows, tuple(segments)


@pytest.mark.parametrize(
    "asks",
    [
        {},
        {"scaling": 0.2, "sliding_window": 6},
        {"softcap": 1.5},
        {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    ],
    ids=["nothing", "a window", "a cap", "sinks"],
)
@pytest.mark.parametrize("sight", [Sight.TREE, Sight.CAUSAL])
def test_a_layer_gets_what_the_reference_gives(asks: dict[str, Any], sight: Sight) -> None:
    own, other = make_pools()
    rows, segments = make_step(own, is_causal=sight == Sight.CAUSAL)
    if sight == Sight.CAUSAL:
        rows.bits.fill_(-1)  # which nobody reads then
    asks = {name: value.to(DEVICE) if name == "s_aux" else value for name, value in asks.items()}
    # As a layer has them: heads before rows in name, rows before heads in memory.
    query, key, value = (
        normal(1, 2 * ROWS, heads, SIZE, seed=heads + index).transpose(1, 2)
        for index, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    )
    real = REAL.to(DEVICE)
    plan = StepPlan.build(own, segments)
    expected, _ = sdpa.tree_attention(
        Attention(), query[:, :, real], key[:, :, real], value[:, :, real], None, ddtree_plan=plan, **asks
    )
    found = attend(Attention(), query, key, value, DevicePlan(rows, other, sight), **asks)
    assert found.shape == (1, 2 * ROWS, HEADS, SIZE)
    assert found.isfinite().all()
    torch.testing.assert_close(found[:, real], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(own.keys_values, other.keys_values), "staged where the plan says and nowhere else"


def test_dims_that_do_not_lie_side_by_side_are_laid_so() -> None:
    pool, other = make_pools()
    rows, _ = make_step(pool, is_causal=False)
    parts = [normal(1, heads, 2 * ROWS, SIZE, seed=heads) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    strange = [part.transpose(2, 3).contiguous().transpose(2, 3) for part in parts]
    found = attend(Attention(), strange[0], strange[1], strange[2], DevicePlan(rows, pool))
    expected = attend(Attention(), parts[0], parts[1], parts[2], DevicePlan(rows, other))
    assert torch.equal(found, expected)


def test_a_layer_finds_its_pages_among_recurrent_layers() -> None:
    pool, _ = make_pools()
    rows, _ = make_step(pool, is_causal=False)
    shape = StateShape((0, 2), key_heads=1, value_heads=1, key_dim=8, value_dim=8, kernel=4)
    plan = DevicePlan(rows, pool)
    assert plan.keys(1).data_ptr() == pool.keys_values[1, 0].data_ptr()
    pool.states = StatePool(shape, PoolSize(1, 1), DEVICE)
    for layer, page_layer in ((1, 0), (3, 1)):
        assert plan.keys(layer).data_ptr() == pool.keys_values[page_layer, 0].data_ptr()
        assert plan.values(layer).data_ptr() == pool.keys_values[page_layer, 1].data_ptr()
