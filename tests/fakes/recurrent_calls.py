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
        kernels.stage(keys, keys, values, tensor(total, heads), decays, sees, matrices[0], *own, updates,
                      room=count)  # fmt: skip

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

    def around() -> None:
        keys, kept = tensor(total, key_heads, key_dim, dtype=floats), tensor(total, channels)
        weight, windows = tensor(channels, 4), longs(total, 4)
        kernels.heads(kept, tensor(8, 3, channels), weight, windows, states, keys, kept, (heads, key_dim))
        per_head, sees = tensor(total, heads), tensor(sequences, count, count, dtype=torch.bool)
        decays = tensor(total, heads, dtype=floats)
        numbers = (tensor(heads), tensor(heads))
        kernels.sum_decays(per_head, per_head, *numbers, sees, longs(sequences), longs(sequences), decays)
        kernels.gate(
            tensor(total, heads, key_dim, dtype=floats), tensor(total, heads, key_dim), tensor(key_dim), 1e-6
        )
        tails, inputs = tensor(layers, 8, 3, channels), tensor(layers, total, channels)
        kernels.move_tails(tails, inputs, states, longs(sequences, 16), longs(sequences))

    case = f"{sequences} x {count} rows of {key_dim}"
    yield Call(f"stage {case}", stage)
    yield Call(f"recurrent commit {case}", commit)
    yield Call(f"recurrent convolve {case}", convolve_rows)
    yield Call(f"around the recurrence {case}", around)
