"""Products of a few rows with a large weight, as kernels in the Triton language.

A step multiplies 1 to 256 rows with every weight of the model, so its time is that of reading the weights.
Here the weight's rows are the tall side of the product and the step's rows the narrow one, which lets tensor
cores take tiles as narrow as 16, and a program keeps several tiles of weight under way:

    weight [N, K]         rows [M, K]           outputs [M, N]
    ┌──────────────┐      ┌──────────────┐      a program: `block_n` rows of the weight with all rows of
    │ ▓▓▓▓▓▓░░░░░░ │ n    │ ▓▓▓▓▓▓░░░░░░ │ m    the step (up to 144), summed over K `block_k` at a time,
    └──────────────┘      └──────────────┘      with the loads of `stages` blocks in flight

Where N gives too few programs, K is split: each part leaves its sums in float32 and a second kernel adds them
in a fixed order, so the same input gives the same bits every time. For one row there is a form without tensor
cores. Sums are in float32 throughout, and roundings are where PyTorch's eager mode has them.

A gated product is `silu(rows @ gate^T) * (rows @ up^T)` with both weights in one, gate first. Their rows take
turns in a tile (gate 0, up 0, gate 1, …), so that one program holds what belongs together.

Not imported unless it is used: the CPU build of PyTorch comes without Triton. This module knows tensors; it
does not know which form is fast for which shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ddtree.device.matmul_candidates import Config

_COMBINED = 256  # weight rows that one program of the second kernel adds up
_WIDEST = 128  # rows of the step in one tile, besides a narrow tile at its side


@triton.jit
def _weight_rows(first_column, num_outputs, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """The weight's row for each lane; lanes past the end read the last row and are not stored."""
    lane = tl.arange(0, BLOCK_N)
    if GATED:
        row = tl.minimum(first_column + lane // 2, num_outputs - 1) + lane % 2 * num_outputs
    else:
        row = tl.minimum(first_column + lane, num_outputs - 1)
    return row


@triton.jit
def _put(
    sums, row, first_column, bias, residual, outputs, num_rows, num_outputs, residual_stride,
    BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Round sums `[BLOCK_N, WIDTH]` and store what the layer puts out for rows `[WIDTH]`."""
    if bias is not None:
        weight_row = _weight_rows(first_column, num_outputs, BLOCK_N, GATED)
        sums += tl.load(bias + weight_row).to(tl.float32)[:, None]
    product = sums.to(outputs.dtype.element_ty)
    if GATED:
        pairs = tl.permute(tl.reshape(product, (BLOCK_N // 2, 2, WIDTH)), (0, 2, 1))
        gate, up = tl.split(pairs)
        gate = gate.to(tl.float32)
        opened = (gate / (1.0 + tl.exp(-gate))).to(outputs.dtype.element_ty)
        product = (opened.to(tl.float32) * up.to(tl.float32)).to(outputs.dtype.element_ty)
        column = first_column + tl.arange(0, BLOCK_N // 2)
    else:
        column = first_column + tl.arange(0, BLOCK_N)
    mask = (column < num_outputs)[:, None] & (row < num_rows)[None, :]
    if residual is not None:
        kept = tl.load(residual + row[None, :] * residual_stride + column[:, None], mask=mask, other=0.0)
        product = (product.to(tl.float32) + kept.to(tl.float32)).to(outputs.dtype.element_ty)
    tl.store(outputs + row[None, :] * num_outputs + column[:, None], product, mask=mask)


@triton.jit
def _finish(
    sums, first_row, first_column, bias, residual, outputs, partials,
    num_rows, num_outputs, residual_stride,
    BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Store one tile of sums, as outputs or as a part of them."""
    row = (first_row + tl.arange(0, WIDTH)).to(tl.int64)
    if SPLIT:
        scale: tl.constexpr = 2 if GATED else 1
        lane = first_column * scale + tl.arange(0, BLOCK_N)
        at = (tl.program_id(1) * num_rows + row) * (num_outputs * scale)
        mask = (lane < num_outputs * scale)[:, None] & (row < num_rows)[None, :]
        tl.store(partials + at[None, :] + lane[:, None], sums, mask=mask)
    else:
        _put(
            sums, row, first_column, bias, residual, outputs, num_rows, num_outputs, residual_stride,
            BLOCK_N, WIDTH, GATED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "splits"])
def _dot_kernel(
    rows, weight, bias, residual, outputs, partials,
    num_rows, num_outputs, size, row_stride, residual_stride, splits,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, BESIDE: tl.constexpr,
    EVEN_K: tl.constexpr, SPLIT: tl.constexpr, GATED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    # Row tiles count fastest: programs that read the same weights run at the same time and find them in L2.
    tiles = tl.cdiv(num_rows, WIDTH + BESIDE)
    first_row = tl.program_id(0) % tiles * (WIDTH + BESIDE)
    first_column = tl.program_id(0) // tiles * (BLOCK_N // 2 if GATED else BLOCK_N)
    blocks = tl.cdiv(size, BLOCK_K)
    share = tl.cdiv(blocks, splits)
    first = tl.program_id(1) * share
    inner = tl.arange(0, BLOCK_K)
    weight_row = _weight_rows(first_column, num_outputs, BLOCK_N, GATED).to(tl.int64)
    weight_at = weight + weight_row[:, None] * size + inner[None, :]
    # Rows that do not exist are masked, not repeated: a masked load costs no traffic.
    row = first_row + tl.arange(0, WIDTH)
    is_row = (row < num_rows)[None, :]
    rows_at = rows + row.to(tl.int64)[None, :] * row_stride + inner[:, None]
    sums = tl.zeros((BLOCK_N, WIDTH), dtype=tl.float32)
    if BESIDE > 0:
        row_beside = first_row + WIDTH + tl.arange(0, BESIDE)
        is_beside = (row_beside < num_rows)[None, :]
        beside_at = rows + row_beside.to(tl.int64)[None, :] * row_stride + inner[:, None]
        sums_beside = tl.zeros((BLOCK_N, BESIDE), dtype=tl.float32)
    for block in range(first, tl.minimum(first + share, blocks)):
        at = block * BLOCK_K
        inside = inner < size - at
        if EVEN_K:
            weights = tl.load(weight_at + at, eviction_policy="evict_first")
        else:
            weights = tl.load(weight_at + at, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        narrow = tl.load(rows_at + at, mask=is_row if EVEN_K else is_row & inside[:, None], other=0.0)
        if WIDEN:  # the interpreter takes the bits of bfloat16 for whole numbers in a product
            weights, narrow = weights.to(tl.float32), narrow.to(tl.float32)
        sums = tl.dot(weights, narrow, sums, input_precision="ieee")
        if BESIDE > 0:
            mask = is_beside if EVEN_K else is_beside & inside[:, None]
            beside = tl.load(beside_at + at, mask=mask, other=0.0)
            if WIDEN:
                beside = beside.to(tl.float32)
            sums_beside = tl.dot(weights, beside, sums_beside, input_precision="ieee")
    _finish(
        sums, first_row, first_column, bias, residual, outputs, partials, num_rows, num_outputs,
        residual_stride, BLOCK_N, WIDTH, SPLIT, GATED,
    )  # fmt: skip
    if BESIDE > 0:
        _finish(
            sums_beside, first_row + WIDTH, first_column, bias, residual, outputs, partials, num_rows,
            num_outputs, residual_stride, BLOCK_N, BESIDE, SPLIT, GATED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _combine_kernel(
    partials, bias, residual, outputs, num_rows, num_outputs, residual_stride,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    scale: tl.constexpr = 2 if GATED else 1
    num_lanes = num_outputs * scale
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1) + tl.arange(0, 1).to(tl.int64)
    at = row[None, :] * num_lanes + lane[:, None]
    is_lane = (lane < num_lanes)[:, None]
    sums = tl.zeros((BLOCK, 1), dtype=tl.float32)
    for part in tl.static_range(SPLITS):
        own = partials + tl.cast(part, tl.int64) * num_rows * num_lanes
        sums += tl.load(own + at, mask=is_lane, other=0.0)
    _put(
        sums, row, tl.program_id(0) * (BLOCK // scale), bias, residual, outputs, num_rows, num_outputs,
        residual_stride, BLOCK, 1, GATED,
    )  # fmt: skip


@triton.jit
def _row_kernel(
    rows, weight, bias, residual, outputs, num_outputs, size,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, GATED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    first_column = tl.program_id(0) * (BLOCK_N // 2 if GATED else BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    weight_row = _weight_rows(first_column, num_outputs, BLOCK_N, GATED).to(tl.int64)
    weight_at = weight + weight_row[:, None] * size + inner[None, :]
    rows_at = rows + inner[None, :]
    # Products are kept apart until the end: adding across threads in every turn would hold up the loads.
    products = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for block in tl.range(0, tl.cdiv(size, BLOCK_K), num_stages=STAGES):
        at = block * BLOCK_K
        if EVEN_K:
            weights = tl.load(weight_at + at, eviction_policy="evict_first")
            narrow = tl.load(rows_at + at)
        else:
            inside = (inner < size - at)[None, :]
            weights = tl.load(weight_at + at, mask=inside, other=0.0, eviction_policy="evict_first")
            narrow = tl.load(rows_at + at, mask=inside, other=0.0)
        products += weights.to(tl.float32) * narrow.to(tl.float32)
    sums = tl.sum(products, axis=1)[:, None]
    row = tl.arange(0, 1)
    _put(sums, row, first_column, bias, residual, outputs, 1, num_outputs, 0, BLOCK_N, 1, GATED)


@dataclass(frozen=True)
class RowTile:
    """Rows of the step that a program takes: a wide tile and, for the odd root, a narrow one beside it."""

    width: int
    beside: int  # 0: none

    @classmethod
    def of(cls, rows: int) -> RowTile:
        """The least that holds `rows`; of several tiles when there are more than 144."""
        width = min(max(16, int(triton.next_power_of_2(rows))), _WIDEST)
        for wide in (64, 128):  # a full tree and its root: 65 or 129 rows
            if wide < rows <= wide + 16:
                return cls(wide, 16)
        return cls(width, 0)

    @property
    def rows(self) -> int:
        """Rows of both."""
        return self.width + self.beside


def multiply(
    rows: torch.Tensor,  # [M, K], columns contiguous
    weight: torch.Tensor,  # [N, K] contiguous; [2 * N, K] when gated
    config: Config,
    bias: torch.Tensor | None = None,  # [N] or [2 * N]
    residual: torch.Tensor | None = None,  # [M, N], columns contiguous
    *,
    gated: bool = False,
) -> torch.Tensor:
    """The product `rows @ weight^T + bias`, rounded, plus the residual: `[M, N]` in the rows' dtype."""
    (num_rows, size), num_outputs = rows.shape, weight.shape[0] // (2 if gated else 1)
    assert (weight.shape[1], weight.dtype) == (size, rows.dtype), "weight and rows fit each other"
    assert rows.stride(1) == 1, "columns of rows lie side by side"
    assert weight.is_contiguous(), "and those of the weight, row after row"
    assert config.kind == "dot" or num_rows == 1, "without tensor cores there is one row"
    assert bias is None or bias.shape == weight.shape[:1], "one bias for each row of the weight"
    if residual is not None:
        assert residual.shape == (num_rows, num_outputs), "one residual for each output"
        assert (residual.stride(1), residual.dtype) == (1, rows.dtype), "a residual is like the rows"
    outputs = torch.empty((num_rows, num_outputs), dtype=rows.dtype, device=rows.device)
    even = size % config.block_k == 0
    columns = config.block_n // (2 if gated else 1)
    if config.kind == "gemv":
        _row_kernel[(triton.cdiv(num_outputs, columns),)](
            rows, weight, bias, residual, outputs, num_outputs, size,
            BLOCK_N=config.block_n, BLOCK_K=config.block_k, EVEN_K=even, GATED=gated,
            STAGES=config.stages, num_warps=config.warps,
        )  # fmt: skip
        return outputs
    tile, is_split = RowTile.of(num_rows), config.split_k > 1
    residual_stride = 0 if residual is None else residual.stride(0)
    shape = (config.split_k, num_rows, weight.shape[0])
    partials = torch.empty(shape, dtype=torch.float32, device=rows.device) if is_split else None
    grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_outputs, columns), config.split_k)
    _dot_kernel[grid](
        rows, weight, bias, residual, outputs, partials,
        num_rows, num_outputs, size, rows.stride(0), residual_stride, config.split_k,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, WIDTH=tile.width, BESIDE=tile.beside,
        EVEN_K=even, SPLIT=is_split, GATED=gated, WIDEN=rows.device.type == "cpu",
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if is_split:
        _combine_kernel[(triton.cdiv(weight.shape[0], _COMBINED), num_rows)](
            partials, bias, residual, outputs, num_rows, num_outputs, residual_stride,
            SPLITS=config.split_k, BLOCK=_COMBINED, GATED=gated, num_warps=2,
        )  # fmt: skip
    return outputs
