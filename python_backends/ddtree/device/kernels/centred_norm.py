"""The RMS norm of Qwen3-Next, Qwen3.5 and Qwen3.6 in one launch: its weight is what differs from one.

Unlike Llama's it is rounded once, behind the weight. This module knows tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WIDE = 2048  # values of a row, from which on a program has eight warps


@triton.jit
def _centred_norm_kernel(values, weight, normed, size, eps, WIDTH: tl.constexpr):
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = lane < size
    value = tl.load(values + row * size + lane, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value * value, axis=0) / size
    factor = 1.0 + tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * size + lane, value * tl.rsqrt(mean + eps) * factor, mask=inside)


def centred_norm(
    values: torch.Tensor,  # [..., d]
    weight: torch.Tensor,  # [d], zero where nothing is scaled
    eps: float,
) -> torch.Tensor:
    """Normalise along the last dimension and scale by one plus the weight, in the values' dtype."""
    size = values.shape[-1]
    values = values.contiguous()
    normed = torch.empty_like(values)
    width = triton.next_power_of_2(size)
    _centred_norm_kernel[(values.numel() // size,)](
        values, weight, normed, size, eps, WIDTH=width, num_warps=8 if width >= _WIDE else 1
    )
    return normed
