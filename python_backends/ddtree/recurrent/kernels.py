"""All kernels of Gated DeltaNet in the Triton language, and of them the commit and a plain convolution.

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
def _convolve_kernel(
    inputs, tails, weight, windows, states, outputs, num_tails, channels,
    KERNEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < channels
    total = along_path(
        inputs, tails, weight, windows, states, row, channel, is_channel, num_tails, channels, channels,
        KERNEL,
    )  # fmt: skip
    tl.store(outputs + row * channels + channel, total, mask=is_channel)


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
        grid = (len(inputs), triton.cdiv(channels, self.channel_slice))
        _convolve_kernel[grid](
            inputs, tails, weight.contiguous(), windows, states, outputs, len(states) * (kernel - 1),
            channels, KERNEL=kernel, BLOCK=self.channel_slice,
        )  # fmt: skip
        return outputs
