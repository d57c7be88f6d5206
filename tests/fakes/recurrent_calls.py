"""Calls of the kernels of recurrent layers, as `kernel_calls` has them of the others."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ddtree.recurrent.kernels import TreeKernels
from tests.fakes.kernel_calls import Call, longs, tensor


def recurrent_calls(count: int, sequences: int, key_dim: int = 128) -> Iterator[Call]:
    """Gated DeltaNet, 16 key heads and 48 value heads."""
    kernels, floats, key_heads, heads, layers = TreeKernels(), torch.float32, 16, 48, 3
    total, channels = count * sequences, (2 * key_heads + heads) * key_dim
    matrices = tensor(layers, 8, heads, key_dim, key_dim, dtype=floats)
    states = longs(sequences)

    def stage() -> None:
        keys = tensor(total, key_heads, key_dim, dtype=floats)
        values, decays = tensor(total, heads, key_dim), tensor(total, heads, dtype=floats)
        sees = tensor(sequences, count, count, dtype=torch.bool)
        updates = tensor(total, heads, key_dim, dtype=floats)
        own = (states, longs(sequences), longs(sequences))
        kernels.stage(keys, keys, values, tensor(total, heads), decays, sees, matrices[0], *own, updates)

    def commit() -> None:
        keys = tensor(layers, total, key_heads, key_dim, dtype=floats)
        updates = tensor(layers, total, heads, key_dim, dtype=floats)
        decays = tensor(layers, total, heads, dtype=floats)
        kernels.commit(matrices, keys, updates, decays, states, longs(sequences, 16), longs(sequences))

    def convolve_rows() -> None:
        windows = longs(total, 4)
        kernels.convolve(
            tensor(total, channels), tensor(8, 3, channels), tensor(channels, 4), windows, states
        )

    case = f"{sequences} x {count} rows of {key_dim}"
    yield Call(f"stage {case}", stage)
    yield Call(f"recurrent commit {case}", commit)
    yield Call(f"recurrent convolve {case}", convolve_rows)
