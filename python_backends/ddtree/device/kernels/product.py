"""Matrix products of float32 on tensor cores, to full precision. This module knows numbers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _coarse(factor):
    """Factors rounded to the ten bits that tensor cores take; what is left is one subtraction away."""
    return ((factor.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def product(left, right, total):  # noqa: ANN201 - kernels have no types of Python's
    """Add a product in full float32, as three of tensor cores.

    Triton's own `tf32x3` does so too, and takes three times the instructions to take factors apart: it looks
    at every one for what is no number. Kernels of small products are all such instructions.
    """
    coarse_left, coarse_right = _coarse(left), _coarse(right)
    total = tl.dot(left - coarse_left, coarse_right, total, input_precision="tf32")
    total = tl.dot(coarse_left, right - coarse_right, total, input_precision="tf32")
    return tl.dot(coarse_left, coarse_right, total, input_precision="tf32")
