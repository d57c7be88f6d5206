"""Calls of the kernels of recurrent layers, as `kernel_calls` has them of the others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from ddtree.device.kernels.centred_norm import centred_norm
from ddtree.device.kernels.layer import Heads, add_norm, open_gates, turn
from ddtree.recurrent.kernels import TreeKernels
from ddtree.recurrent.layer import LayerInputs, LayerWeights
from ddtree.recurrent.state_pool import Stash
from tests.fakes.kernel_calls import Call, longs, tensor


def recurrent_calls(count: int, sequences: int, key_dim: int = 128) -> Iterator[Call]:
    """Gated DeltaNet, 16 key heads and 48 value heads."""
    kernels, floats, key_heads, heads, layers = TreeKernels(), torch.float32, 16, 48, 3
    total, channels = count * sequences, (2 * key_heads + heads) * key_dim
    matrices = tensor(layers, 8, heads, key_dim, key_dim, dtype=floats)
    states = longs(sequences)

    def stage(rows: int) -> None:
        total = rows * sequences
        keys = tensor(total, key_heads, key_dim, dtype=floats)
        values, decays = tensor(total, heads, key_dim), tensor(total, heads, dtype=floats)
        sees = tensor(sequences, rows, rows, dtype=torch.bool)
        updates = tensor(total, heads, key_dim, dtype=floats)
        own = (states, longs(sequences), longs(sequences))
        kernels.stage(
            keys, keys, values, tensor(total, heads), decays, sees, matrices[0], *own, updates, rows
        )

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
    yield Call(f"stage {case}", partial(stage, count))
    yield Call(f"stage single rows, {case}", partial(stage, 1))
    yield Call(f"recurrent commit {case}", commit)
    yield Call(f"recurrent convolve {case}", convolve_rows)
    yield from _layer_calls(kernels, count, sequences, key_dim)


def _layer_calls(kernels: TreeKernels, count: int, sequences: int, key_dim: int) -> Iterator[Call]:
    """What stands around the tree form."""
    floats, key_heads, heads, layers = torch.float32, 16, 48, 3
    total, channels = count * sequences, (2 * key_heads + heads) * key_dim
    states, keys = longs(sequences), tensor(total, key_heads, key_dim, dtype=floats)
    weight = tensor(channels, 4)

    def sight() -> None:
        bits = tensor(sequences, count, -(-count // 64), dtype=torch.int64)
        kernels.sight(bits, tensor(sequences, count, dtype=torch.int32), 4)

    def normalise() -> None:
        for shape in ((total, 40 * key_dim), (total, heads, key_dim)):
            centred_norm(tensor(*shape), tensor(shape[-1]), 1e-6)

    def attend() -> None:
        norm, cos = tensor(2 * key_dim), tensor(total, key_dim // 2)
        gated = Heads(24, 4, 2 * key_dim, norm, norm, 1e-6, is_centred=True, is_gated=True)
        packed, pool = tensor(total, gated.width), tensor(2, 64, gated.keys, gated.size)
        turn(packed, cos, cos, gated, pool[0], pool[1], longs(total))
        open_gates(tensor(total, gated.queries * gated.size), packed, gated)
        add_norm(tensor(total, 40 * key_dim), tensor(total, 40 * key_dim), tensor(40 * key_dim), 1e-6, True)

    def open_rows() -> None:
        tails, updates = tensor(8, 3, channels), tensor(total, heads, key_dim, dtype=floats)
        parts = channels, heads * key_dim, heads, heads
        mixed, gates, betas, steps = tensor(total, sum(parts)).split(parts, dim=1)
        rows = LayerInputs(mixed, gates.unflatten(1, (heads, key_dim)), betas, steps)
        weights = LayerWeights(weight, tensor(heads), tensor(heads), tensor(key_dim), 1e-6)
        stash = Stash(keys, updates, tensor(total, heads, dtype=floats), tensor(total, channels))
        sees = tensor(sequences, count, count, dtype=torch.bool)
        own = (states, sees, longs(sequences), longs(sequences))
        kernels.open_rows(rows, weights, tails, longs(total, 4), *own, stash)

    def gate() -> None:
        outputs = tensor(total, heads, key_dim, dtype=floats)
        kernels.gate(outputs, tensor(*outputs.shape), tensor(key_dim), 1e-6)

    def move_tails() -> None:
        tails, staged = tensor(layers, 8, 3, channels), tensor(layers, total, channels)
        kernels.move_tails(tails, staged, states, longs(sequences, 16), longs(sequences))

    case = f"{sequences} x {count} rows of {key_dim}"
    yield Call(f"recurrent sight {case}", sight)
    yield Call(f"centred norms {case}", normalise)
    yield Call(f"gated attention {case}", attend)
    yield Call(f"recurrent rows {case}", open_rows)
    yield Call(f"recurrent gate {case}", gate)
    yield Call(f"recurrent tails {case}", move_tails)
