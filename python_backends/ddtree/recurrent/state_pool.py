"""A fixed pool of recurrent states: what the recurrent layers of a target keep of each session.

A session of a target with such layers owns one *state*: per layer the matrix of every head, and the last
inputs of the layer's convolution (its *tail*). Attention's pages grow with the sequence, a state does not.
A step that verifies trees also writes a *stash*: per layer and row what a commit of any path through that
row needs. The stash belongs to the step and is overwritten by the next one, so it exists once, with room for
the rows of one step.

Everything is allocated once, from one budget of bytes; when no state is free a session has to wait, as for
pages. This module knows nothing of sessions' ids, trees or models.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ddtree.errors import ConfigError

if TYPE_CHECKING:
    from ddtree.recurrent.kernels import TreeKernels

_FLOAT32_BYTES = 4
_MIB = 1 << 20
_MOST_STATES = 4096  # more sequences and snapshots than any machine decodes; only tiny models have room


@dataclass(frozen=True)
class StateShape:
    """What the recurrent layers of a target keep."""

    layers: tuple[int, ...]  # decoder layers that are recurrent, ascending
    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int
    value_dim: int
    kernel: int  # positions that the convolution sees, the row itself included
    dtype: torch.dtype = torch.bfloat16  # of the convolution's inputs; the state is always float32

    @property
    def channels(self) -> int:
        """Width of the convolution's input: queries, keys and values side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def others_before(self, layer: int) -> int:
        """How many of the decoder layers before `layer` are not recurrent."""
        return layer - sum(own < layer for own in self.layers)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one session, however long it is."""
        matrix = self.value_heads * self.key_dim * self.value_dim * _FLOAT32_BYTES
        return len(self.layers) * (matrix + (self.kernel - 1) * self.channels * self.dtype.itemsize)

    @property
    def bytes_per_row(self) -> int:
        """Bytes of the stash per root or draft node of a step."""
        values = self.key_heads * self.key_dim + self.value_heads * (self.value_dim + 1)
        return len(self.layers) * (values * _FLOAT32_BYTES + self.channels * self.dtype.itemsize)


@dataclass(frozen=True)
class StateBudget:
    """What a deployment allows."""

    budget_bytes: int = 512 * _MIB  # of states and stash together
    max_nodes: int = 256  # of one sequence's tree, root not counted
    most_rows: int = 544  # of all trees and roots of a step


@dataclass(frozen=True)
class PoolSize:
    """How a budget of bytes is spent."""

    states: int
    rows: int  # of the stash: the most rows one step may stage

    @classmethod
    def of(cls, shape: StateShape, budget: StateBudget) -> PoolSize:
        """Divide a budget: states get what the stash leaves.

        The stash has room for the largest step, but takes no more than a quarter unless one tree needs it:
        without states nobody is served, without room in the stash a step is done in several.

        Raises:
            ConfigError: not even one sequence fits.
        """
        budget_bytes, least_rows = budget.budget_bytes, budget.max_nodes + 1
        rows = max(least_rows, min(budget.most_rows, budget_bytes // 4 // shape.bytes_per_row))
        states = (budget_bytes - rows * shape.bytes_per_row) // shape.bytes_per_state
        if states < 1:
            needed = shape.bytes_per_state + least_rows * shape.bytes_per_row
            raise ConfigError(
                f"state_cache_mib must hold the state of one sequence ({shape.bytes_per_state} bytes) and "
                f"{least_rows} staged rows ({shape.bytes_per_row} bytes each), {-(-needed // _MIB)} MiB in "
                f"all, got {budget_bytes / _MIB:g}; raise state_cache_mib or lower max_nodes"
            )
        return cls(min(states, _MOST_STATES), rows)


@dataclass(frozen=True)
class Stash:
    """What a step leaves for its commit; of one layer when it has no first axis `L`."""

    keys: torch.Tensor  # [L, rows, Hk, dk] float32
    updates: torch.Tensor  # [L, rows, Hv, dv] float32
    decays: torch.Tensor  # [L, rows, Hv] float32
    inputs: torch.Tensor  # [L, rows, channels] of the convolution

    def layer(self, place: int) -> Stash:
        """A view of one layer."""
        return Stash(self.keys[place], self.updates[place], self.decays[place], self.inputs[place])


class StatePool:
    """States with a free list, and the stash. Not thread-safe: one stage owns it."""

    def __init__(
        self, shape: StateShape, size: PoolSize, device: torch.device, kernels: TreeKernels | None = None
    ) -> None:
        """Allocate everything; steps over the pool use `kernels` where there are any."""
        self.kernels = kernels
        self.shape = shape
        self.size = size
        layers, heads = len(shape.layers), (shape.key_heads, shape.value_heads)
        self._places = {layer: place for place, layer in enumerate(shape.layers)}

        def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros((layers, *sizes), dtype=dtype, device=device)

        self.matrices = zeros(size.states, heads[1], shape.key_dim, shape.value_dim)
        self.tails = zeros(size.states, shape.kernel - 1, shape.channels, dtype=shape.dtype)
        self.stash = Stash(
            zeros(size.rows, heads[0], shape.key_dim),
            zeros(size.rows, heads[1], shape.value_dim),
            zeros(size.rows, heads[1]),
            zeros(size.rows, shape.channels, dtype=shape.dtype),
        )
        self._free = list(reversed(range(size.states)))

    def __len__(self) -> int:
        """States that are taken."""
        return self.size.states - len(self._free)

    def place(self, layer: int) -> int:
        """Where a decoder layer stands on the first axis."""
        return self._places[layer]

    def reserve(self) -> int | None:
        """Take a state and make it that of an empty sequence; None when all are taken."""
        if not self._free:
            return None
        state = self._free.pop()
        self.matrices[:, state] = 0
        self.tails[:, state] = 0
        return state

    def release(self, state: int) -> None:
        """Give a state back; giving it back twice is a bug."""
        assert state not in self._free, f"state {state} was given back twice"
        self._free.append(state)

    def copy(self, source: int, destination: int) -> None:
        """Make one state equal to another."""
        self.matrices[:, destination] = self.matrices[:, source]
        self.tails[:, destination] = self.tails[:, source]

    def check_integrity(self, owners: Iterable[int]) -> None:
        """Assert that every state is either free or owned exactly once."""
        owned = list(owners)
        assert len(owned) == len(set(owned)), "a state has two owners"
        assert sorted(owned + self._free) == list(range(self.size.states)), (
            f"{owned} are owned and {self._free} are free of {self.size.states} states"
        )
