"""All kernels of Gated DeltaNet in the Triton language, and of them what commits and a plain convolution.

For a CUDA device; the tests run them in Triton's interpreter. They compute what `gated_delta` and `step` do
with PyTorch, on rows as they stand in the packed step: nothing is padded or copied, states are read where
they are kept, and whatever depends on values (row counts, paths, which state) is read from the device. So a
launch needs no look at the host, allocates by shape alone and can be captured into a graph.

Not imported unless it is used: the CPU build of PyTorch comes without Triton. This module knows tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ddtree.device.kernels.delta_stage import StageKernels, width_of
from ddtree.device.kernels.gated_delta import LayerKernels, along_path

_TAIL_CHANNELS = 256  # of a program
_ROWS = 4  # that share the convolution's weights


@triton.jit
def _commit_kernel(
    matrices, keys, updates, decays, states, rows, lengths,
    sequences, num_states, num_rows, heads, groups, key_dim, value_dim, longest,
    KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    place, head, slice_ = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    layer, sequence = (place // sequences).to(tl.int64), place % sequences
    length = tl.load(lengths + sequence)
    in_key, column = tl.arange(0, KEY), slice_ * VALUE + tl.arange(0, VALUE)
    is_key, is_column = in_key < key_dim, column < value_dim
    state = layer * num_states + tl.load(states + sequence)
    at = (state * heads + head) * key_dim * value_dim + in_key[:, None] * value_dim + column[None, :]
    mask = is_key[:, None] & is_column[None, :]
    key_heads = heads // groups
    if length > 0:
        path = rows + sequence * longest
        end = layer * num_rows + tl.load(path + length - 1)
        last = tl.load(decays + end * heads + head)
        matrix = tl.load(matrices + at, mask=mask, other=0.0) * tl.exp(last)
        for step in range(length):
            row = layer * num_rows + tl.load(path + step)
            fading = tl.exp(last - tl.load(decays + row * heads + head))
            at_key = (row * key_heads + head // groups) * key_dim + in_key
            key = tl.load(keys + at_key, mask=is_key, other=0.0)
            at_update = (row * heads + head) * value_dim + column
            update = tl.load(updates + at_update, mask=is_column, other=0.0)
            matrix += key[:, None] * (fading * update)[None, :]
        tl.store(matrices + at, matrix, mask=mask)


@triton.jit
def _tails_kernel(
    tails, inputs, states, rows, lengths, sequences, num_states, num_rows, channels, longest,
    SIZE: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place, slice_ = tl.program_id(0), tl.program_id(1)
    layer, sequence = (place // sequences).to(tl.int64), place % sequences
    length = tl.load(lengths + sequence)
    position, channel = tl.arange(0, PLACES), slice_ * BLOCK + tl.arange(0, BLOCK)
    source = length + position  # in (tail, path)
    moves = (position < SIZE) & (length > 0)
    in_tail = source < SIZE
    is_channel = (channel < channels)[None, :]
    own = tails + (layer * num_states + tl.load(states + sequence)) * SIZE * channels
    from_tail = source[:, None] * channels + channel[None, :]
    row = tl.load(rows + sequence * longest + source - SIZE, mask=moves & (source >= SIZE), other=0)
    from_rows = (layer * num_rows + row)[:, None] * channels + channel[None, :]
    old = tl.load(own + from_tail, mask=(moves & in_tail)[:, None] & is_channel, other=0.0)
    new = tl.load(inputs + from_rows, mask=(moves & (source >= SIZE))[:, None] & is_channel, other=0.0)
    # What one thread overwrites another has to read first.
    tl.debug_barrier()
    at = position[:, None] * channels + channel[None, :]
    tl.store(own + at, tl.where(in_tail[:, None], old, new), mask=moves[:, None] & is_channel)


@triton.jit
def _convolve_kernel(
    inputs, tails, weight, windows, states, outputs, count, num_tails, channels,
    KERNEL: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row, is_channel = row < count, channel < channels
    total = along_path(
        inputs, tails, weight, windows, states, row, is_row, channel, is_channel, num_tails, channels,
        channels, KERNEL, PLACES,
    )  # fmt: skip
    at = (row * channels)[:, None] + channel[None, :]
    tl.store(outputs + at, total, mask=is_row[:, None] & is_channel[None, :])


@dataclass(frozen=True)
class TreeKernels(StageKernels, LayerKernels):
    """Launches the kernels. Tensors are contiguous and on one device; shapes are those of `step`."""

    channel_slice: int = 256

    def commit(
        self,
        matrices: torch.Tensor,  # [L, states, Hv, dk, dv] float32, changed
        keys: torch.Tensor,  # [L, rows, Hk, dk] float32
        updates: torch.Tensor,  # [L, rows, Hv, dv] float32
        decays: torch.Tensor,  # [L, rows, Hv] float32
        states: torch.Tensor,  # [S] int64
        rows: torch.Tensor,  # [S, J] int64
        lengths: torch.Tensor,  # [S] int64
    ) -> None:
        """Move every layer's states along the paths."""
        layers, num_states, heads, key_dim, value_dim = matrices.shape
        grid = (layers * len(states), heads, triton.cdiv(value_dim, self.value_slice))
        _commit_kernel[grid](
            matrices, keys, updates, decays, states, rows.contiguous(), lengths, len(states), num_states,
            keys.shape[1], heads, heads // keys.shape[2], key_dim, value_dim, rows.shape[1],
            KEY=width_of(key_dim), VALUE=self.value_slice,
        )  # fmt: skip

    def move_tails(
        self,
        tails: torch.Tensor,  # [L, states, kernel - 1, channels], changed
        inputs: torch.Tensor,  # [L, rows, channels]
        states: torch.Tensor,  # [S] int64
        rows: torch.Tensor,  # [S, J] int64
        lengths: torch.Tensor,  # [S] int64; 0 leaves a tail as it is
    ) -> None:
        """Make the last inputs of (tail, path) the tails, in all layers."""
        layers, num_states, size, channels = tails.shape
        _tails_kernel[(layers * len(states), triton.cdiv(channels, _TAIL_CHANNELS))](
            tails, inputs, states, rows.contiguous(), lengths, len(states), num_states, inputs.shape[1],
            channels, rows.shape[1],
            SIZE=size, PLACES=triton.next_power_of_2(size), BLOCK=_TAIL_CHANNELS,
        )  # fmt: skip

    def convolve(
        self,
        inputs: torch.Tensor,  # [n, channels]
        tails: torch.Tensor,  # [states, kernel - 1, channels], of one layer
        weight: torch.Tensor,  # [channels, kernel]
        windows: torch.Tensor,  # [n, kernel] int64
        states: torch.Tensor,  # [S] int64
    ) -> torch.Tensor:
        """Convolve every row with its ancestors, `[n, channels]` float32."""
        channels, kernel = weight.shape
        outputs = torch.empty(inputs.shape, dtype=torch.float32, device=inputs.device)
        grid = (triton.cdiv(len(inputs), _ROWS), triton.cdiv(channels, self.channel_slice))
        _convolve_kernel[grid](
            inputs, tails, weight.contiguous(), windows, states, outputs, len(inputs),
            len(states) * (kernel - 1), channels, KERNEL=kernel, PLACES=triton.next_power_of_2(kernel),
            ROWS=_ROWS, BLOCK=self.channel_slice,
        )  # fmt: skip
        return outputs
