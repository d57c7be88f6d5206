# ruff: noqa: ANN001, ANN202, N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, attr-defined"
# A kernel's parameters are what `triton.jit` makes of them: no annotation but constexpr has a meaning there.
"""A kernel that reads a buffer as fast as the memory gives it, and keeps one number per program.

Programs stride over the buffer together, so that at any moment the chip reads one run of addresses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 8192  # int32 values of one program's load: four loads of 16 bytes each in flight per thread
_WARPS = 16
_PROGRAMS_PER_PROCESSOR = 4


@triton.jit
def _sum_blocks(source, sums, blocks, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for block in range(program, blocks, tl.num_programs(0)):
        total += tl.load(source + block * BLOCK + offsets)
    tl.store(sums + program, tl.sum(total, axis=0))


def sum_all(source: torch.Tensor, sums: torch.Tensor) -> None:
    """Read all of `source` into one wrapping sum per program.

    Args:
        source: int32, whole blocks of 8192 values, fewer than 2^31 of them.
        sums: int32, an element per program, see `programs_for`.
    """
    assert source.numel() % _BLOCK == 0, "the buffer must consist of whole blocks"
    _sum_blocks[(sums.numel(),)](source, sums, source.numel() // _BLOCK, BLOCK=_BLOCK, num_warps=_WARPS)


def programs_for(device: torch.device) -> int:
    """How many programs keep the device's memory busy."""
    if device.type != "cuda":
        return 3
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * _PROGRAMS_PER_PROCESSOR
