"""The pool of recurrent states: what it costs, who owns what, and that a new sequence starts from nothing."""

from __future__ import annotations

import pytest
import torch

from ddtree.errors import ConfigError
from ddtree.recurrent.state_pool import PoolSize, StateBudget, StatePool, StateShape

MIB = 1 << 20
SMALL = StateShape((0, 2), key_heads=1, value_heads=2, key_dim=4, value_dim=3, kernel=4, dtype=torch.float32)
# Qwen3.6-27B: three of four layers are recurrent.
LARGE = StateShape(
    tuple(layer for layer in range(64) if layer % 4 != 3),
    key_heads=16, value_heads=48, key_dim=128, value_dim=128, kernel=4,
)  # fmt: skip


def make_pool(states: int = 3) -> StatePool:
    return StatePool(SMALL, PoolSize(states, 8), torch.device("cpu"))


def test_the_bytes_are_those_of_the_tensors() -> None:
    pool = make_pool()
    held = pool.matrices.nbytes + pool.tails.nbytes
    stash = pool.stash
    assert held == 3 * SMALL.bytes_per_state
    stashed = sum(tensor.nbytes for tensor in (stash.keys, stash.updates, stash.decays, stash.inputs))
    assert stashed == 8 * SMALL.bytes_per_row


def test_a_27b_target_needs_147_mib_a_sequence_and_2_4_mib_a_node() -> None:
    assert LARGE.channels == 10240
    assert round(LARGE.bytes_per_state / MIB, 1) == 146.8
    assert round(LARGE.bytes_per_row / MIB, 2) == 2.45


def test_a_budget_is_divided_and_kept() -> None:
    size = PoolSize.of(LARGE, StateBudget(8192 * MIB, 64))
    assert size.rows * LARGE.bytes_per_row + size.states * LARGE.bytes_per_state <= 8192 * MIB
    assert size == PoolSize(46, 544), "a whole step fits"
    assert PoolSize.of(LARGE, StateBudget(4096 * MIB, 64)) == PoolSize(20, 418), "a quarter is the stash"
    assert PoolSize.of(LARGE, StateBudget(1024 * MIB, 256)) == PoolSize(2, 257)


def test_a_budget_too_small_for_one_sequence_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"state_cache_mib must .* 257 staged rows .* 776 MiB .*512; raise"):
        PoolSize.of(LARGE, StateBudget(512 * MIB, 256))


def test_states_are_taken_given_back_and_empty_when_taken_again() -> None:
    pool = make_pool(2)
    first, second = pool.reserve(), pool.reserve()
    assert first is not None
    assert second is not None
    assert pool.reserve() is None
    assert len(pool) == 2
    pool.check_integrity([first, second])
    pool.matrices[:, first], pool.tails[:, first] = 5.0, 6.0
    pool.copy(first, second)
    assert torch.equal(pool.matrices[:, second], torch.full_like(pool.matrices[:, second], 5.0))
    assert torch.equal(pool.tails[:, second], torch.full_like(pool.tails[:, second], 6.0))
    pool.release(first)
    pool.check_integrity([second])
    assert pool.reserve() == first
    assert not pool.matrices[:, first].any()
    assert not pool.tails[:, first].any()
    assert pool.tails[:, second].any(), "the neighbour keeps what it has"


def test_what_is_wrong_with_ownership_is_seen() -> None:
    pool = make_pool()
    state = pool.reserve()
    assert state is not None
    with pytest.raises(AssertionError, match="two owners"):
        pool.check_integrity([state, state])
    with pytest.raises(AssertionError, match="are owned and"):
        pool.check_integrity([])
    pool.release(state)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.release(state)
