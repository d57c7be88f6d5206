"""What stands around the tree form in a Gated DeltaNet layer, as kernels in the Triton language.

Before it: convolution, activation and norm of every head, decays summed along paths, shares, all at once.
After it: the gated norm. One operation at a time these are forty launches a layer, which take longer than the
tree form itself. They round where the model's own forward rounds.

Like the tree form's kernels they look at nothing on the host, and are not imported unless they are used. This
module knows tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from ddtree.recurrent.layer import LayerInputs, LayerWeights
    from ddtree.recurrent.state_pool import Stash

_FEW_ROWS, _MANY_ROWS = 16, 64  # whose decays are summed at a time
_HEADS_AT_ONCE = 4  # of a program that sums decays: its other rows are for the threads
_ROWS_TOGETHER = 4  # of a head in one program: they share the convolution's weights
_NORM_EPS = 1e-6  # of `gated_delta.unit`


@triton.jit
def along_path(  # noqa: ANN201 - kernels have no types of Python's
    inputs, tails, weight, windows, states, row, is_row, channel, inside, num_tails, channels, input_row,
    KERNEL: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Rows' convolution over themselves, their nearest ancestors and the tail, `[rows, channels]` float32.

    All places at once, `[places, rows, channels]`: one after another each would wait for its own row's
    number, its state and its inputs.
    """
    position = tl.arange(0, PLACES)
    is_place = (position < KERNEL)[:, None] & is_row[None, :]
    source = tl.load(windows + (row * KERNEL)[None, :] + position[:, None], mask=is_place, other=0).to(
        tl.int32
    )
    in_tail = source < num_tails
    state = tl.load(states + source // (KERNEL - 1), mask=is_place & in_tail, other=0)
    tail = (state * (KERNEL - 1) + source % (KERNEL - 1)) * channels
    other = (source - num_tails).to(tl.int64) * input_row
    # Where a place's channels begin, in either tensor: they are of one type.
    begin = tl.where(in_tail, tails + tail, inputs + other)
    mask = is_place[:, :, None] & inside[None, None, :]
    value = tl.load(begin[:, :, None] + channel[None, None, :], mask=mask, other=0.0)
    is_factor = (position < KERNEL)[:, None] & inside[None, :]
    factor = tl.load(weight + position[:, None] + (channel * KERNEL)[None, :], mask=is_factor, other=0.0)
    return tl.sum(value.to(tl.float32) * factor.to(tl.float32)[:, None, :], axis=0)


@triton.jit
def _head(
    inputs, tails, weight, windows, states, queries, keys, values, kept, row, is_row, head,
    num_tails, channels, input_row, key_heads, key_dim, value_heads, value_dim, scale, eps,
    KERNEL: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One head of some rows, of queries, keys or values."""
    is_value = head >= 2 * key_heads
    size = tl.where(is_value, value_dim, key_dim)
    value_first = 2 * key_heads * key_dim + (head - 2 * key_heads) * value_dim
    lane = tl.arange(0, WIDTH)
    inside = lane < size
    # Four channels a thread: a warp then spans a head of 128, and its threads share no work.
    channel = tl.max_contiguous(tl.where(is_value, value_first, head * key_dim) + lane, 4)
    total = along_path(
        inputs, tails, weight, windows, states, row, is_row, channel, inside, num_tails, channels, input_row,
        KERNEL, PLACES,
    )  # fmt: skip
    mask = is_row[:, None] & inside[None, :]
    own = tl.load(inputs + (row * input_row)[:, None] + channel[None, :], mask=mask, other=0.0)
    tl.store(kept + (row * channels)[:, None] + channel[None, :], own, mask=mask)
    convolved = total.to(inputs.dtype.element_ty).to(tl.float32)
    active = (convolved * tl.sigmoid(convolved)).to(inputs.dtype.element_ty)
    if head >= 2 * key_heads:
        at_value = ((row * value_heads + head - 2 * key_heads) * value_dim)[:, None] + lane[None, :]
        tl.store(values + at_value, active, mask=mask)
    else:
        full = active.to(tl.float32)
        unit = full * tl.rsqrt(tl.sum(full * full, axis=1) + eps)[:, None]
        at_key = ((row * key_heads + head % key_heads) * key_dim)[:, None] + lane[None, :]
        tl.store(queries + at_key, unit * scale, mask=mask & (head < key_heads))
        tl.store(keys + at_key, unit, mask=mask & (head >= key_heads))


@triton.jit
def _decays(
    steps, betas, rates, bias, sees, decays, shares, start, node, first_head, heads, step_row, beta_row,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some heads of one row: decays summed over the rows that it sees, and its shares."""
    lane, head = tl.arange(0, BLOCK), first_head + tl.arange(0, HEADS)
    is_head = head < heads
    rate = tl.exp(tl.load(rates + head, mask=is_head, other=0.0).to(tl.float32))
    shift = tl.load(bias + head, mask=is_head, other=0.0).to(tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    # Ancestors precede.
    for first in range(0, node + 1, BLOCK):
        other = first + lane
        is_other = other <= node
        is_seen = tl.load(sees + other, mask=is_other, other=0)
        mask = is_other[:, None] & is_head[None, :]
        step = tl.load(steps + (start + other)[:, None] * step_row + head[None, :], mask=mask, other=0.0)
        step = step.to(tl.float32) + shift[None, :]
        # log(1 + e^x), exact for small e^x too
        grown = tl.exp(tl.minimum(step, 20.0))
        more = 1.0 + grown
        soft = tl.where(more == 1.0, grown, tl.log(more) * (grown / tl.where(more == 1.0, 1.0, more - 1.0)))
        soft = tl.where(step > 20.0, step, soft)
        total -= tl.sum(tl.where((is_seen != 0)[:, None], rate[None, :] * soft, 0.0), axis=0)
    at = (start + node) * heads + head
    tl.store(decays + at, total, mask=is_head)
    beta = tl.load(betas + (start + node) * beta_row + head, mask=is_head, other=0.0).to(tl.float32)
    tl.store(shares + at, tl.sigmoid(beta).to(shares.dtype.element_ty), mask=is_head)


@triton.jit
def _open_kernel(
    inputs, tails, weight, windows, states, queries, keys, values, kept,
    steps, betas, rates, bias, sees, starts, counts, decays, shares,
    sequences, widest, count, num_tails, channels, input_row, step_row, beta_row,
    key_heads, key_dim, value_heads, value_dim, scale, eps,
    KERNEL: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    task, slices = tl.program_id(0), tl.cdiv(value_heads, HEADS)
    # The sums take longest, so they come first.
    if task < sequences * widest * slices:
        place, slice_ = task // slices, task % slices
        sequence, node = place // widest, place % widest
        if node < tl.load(counts + sequence):
            _decays(
                steps, betas, rates, bias, sees + place.to(tl.int64) * widest, decays, shares,
                tl.load(starts + sequence), node, slice_ * HEADS, value_heads, step_row, beta_row,
                HEADS, BLOCK,
            )  # fmt: skip
    else:
        task -= sequences * widest * slices
        heads = 2 * key_heads + value_heads
        row = (task // heads).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        _head(
            inputs, tails, weight, windows, states, queries, keys, values, kept, row, row < count,
            task % heads, num_tails, channels, input_row,
            key_heads, key_dim, value_heads, value_dim, scale, eps, KERNEL, PLACES, WIDTH,
        )  # fmt: skip


@triton.jit
def _gate_kernel(outputs, gates, weight, gated, heads, value_dim, gate_row, eps, WIDTH: tl.constexpr):
    row, head, lane = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
    inside, at = lane < value_dim, (row * heads + head) * value_dim + lane
    kind = gated.dtype.element_ty
    output = tl.load(outputs + at, mask=inside, other=0.0).to(kind).to(tl.float32)
    mean = tl.sum(output * output, axis=0) / value_dim
    normed = (output * tl.rsqrt(mean + eps)).to(kind).to(tl.float32)
    factor = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    at_gate = row * gate_row + head * value_dim + lane
    gate = tl.load(gates + at_gate, mask=inside, other=0.0).to(tl.float32)
    scaled = (factor * normed).to(kind).to(tl.float32)
    tl.store(gated + at, scaled * (gate * tl.sigmoid(gate)), mask=inside)


@triton.jit
def _sight_kernel(
    bits, depths, sees, windows, sequences, rows, words, KERNEL: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0)
    sequence, other = (row // rows).to(tl.int64), tl.arange(0, ROWS)
    inside = other < rows
    word = tl.load(bits + row * words + other // 64, mask=inside, other=0)
    is_seen = (((word >> (other % 64).to(tl.int64)) & 1) != 0) & inside
    tl.store(sees + row * rows + other, is_seen.to(tl.uint8), mask=inside)
    depth = tl.load(depths + row)
    above = tl.load(depths + sequence * rows + other, mask=inside, other=-1)
    for position in tl.static_range(KERNEL):
        wanted = depth - (KERNEL - 1 - position)
        # A row sees one row of each depth above it; padding sees the root and itself, and takes itself.
        ancestor = tl.max(tl.where(is_seen & (above == wanted), other, 0), axis=0)
        in_rows = sequences * (KERNEL - 1) + sequence * rows + ancestor
        in_tail = (sequence + 1) * (KERNEL - 1) + wanted
        tl.store(windows + row * KERNEL + position, tl.where(wanted >= 0, in_rows, in_tail))


@dataclass(frozen=True)
class OpenedRows:
    """What the tree form reads of a layer's rows, beside what is in the stash."""

    queries: torch.Tensor  # [n, Hk, dk] float32, normalised and scaled
    values: torch.Tensor  # [n, Hv, dv] in the inputs' dtype
    shares: torch.Tensor  # [n, Hv] that updates are written with


class LayerKernels:
    """Launches them. Tensors are on one device; shapes are those of `step`."""

    def sight(
        self,
        bits: torch.Tensor,  # [S, N, W] int64 ancestor bits
        depths: torch.Tensor,  # [S, N] int32
        kernel: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Who sees whom, `[S, N, N]` bool, and what `windows_of` gives, `[S * N, kernel]` int64."""
        sequences, rows, words = bits.shape
        sees = torch.empty((sequences, rows, rows), dtype=torch.uint8, device=bits.device)
        windows = torch.empty((sequences * rows, kernel), dtype=torch.int64, device=bits.device)
        _sight_kernel[(sequences * rows,)](
            bits, depths, sees, windows, sequences, rows, words,
            KERNEL=kernel, ROWS=triton.next_power_of_2(rows), num_warps=1,
        )  # fmt: skip
        return sees.view(torch.bool), windows

    def open_rows(
        self,
        inputs: LayerInputs,  # maybe columns of wider rows
        weights: LayerWeights,
        tails: torch.Tensor,  # [states, kernel - 1, channels], of one layer
        windows: torch.Tensor,  # [n, kernel] int64
        states: torch.Tensor,  # [S] int64
        sees: torch.Tensor,  # [S, N, N] bool
        starts: torch.Tensor,  # [S] int64
        counts: torch.Tensor,  # [S] int64
        stash: Stash,  # of the layer; keys, decays and inputs are written
    ) -> OpenedRows:
        """Convolve with ancestors, activate (SiLU) and normalise; sum the decays along paths."""
        mixed, steps, betas = map(_side_by_side, (inputs.mixed, inputs.steps, inputs.betas))
        count, channels = mixed.shape
        key_heads, key_dim = stash.keys.shape[1:]
        value_heads, value_dim = stash.updates.shape[1:]
        sequences, widest, kernel = len(states), sees.shape[1], windows.shape[1]
        opened = OpenedRows(
            torch.empty((count, key_heads, key_dim), dtype=torch.float32, device=mixed.device),
            torch.empty((count, value_heads, value_dim), dtype=mixed.dtype, device=mixed.device),
            torch.empty((count, value_heads), dtype=betas.dtype, device=mixed.device),
        )
        heads_together = min(_HEADS_AT_ONCE, triton.next_power_of_2(value_heads))
        rows_together = _ROWS_TOGETHER if count >= _FEW_ROWS else 1
        sums = sequences * widest * triton.cdiv(value_heads, heads_together)
        tiles = triton.cdiv(count, rows_together) * (2 * key_heads + value_heads)
        _open_kernel[(sums + tiles,)](
            mixed, tails, weights.convolution.contiguous(), windows, states, opened.queries, stash.keys,
            opened.values, stash.inputs, steps, betas, weights.rates, weights.bias, sees.view(torch.uint8),
            starts, counts, stash.decays, opened.shares, sequences, widest, count, sequences * (kernel - 1),
            channels, mixed.stride(0), steps.stride(0), betas.stride(0), key_heads, key_dim, value_heads,
            value_dim, key_dim**-0.5, _NORM_EPS,
            KERNEL=kernel, PLACES=triton.next_power_of_2(kernel),
            WIDTH=triton.next_power_of_2(max(key_dim, value_dim)), ROWS=rows_together, HEADS=heads_together,
            BLOCK=min(max(triton.next_power_of_2(widest), _FEW_ROWS), _MANY_ROWS), num_warps=1,
        )  # fmt: skip
        return opened

    def gate(
        self,
        outputs: torch.Tensor,  # [n, Hv, dv] float32
        gates: torch.Tensor,  # [n, Hv, dv], maybe columns of wider rows
        weight: torch.Tensor,  # [dv] of the norm
        eps: float,
    ) -> torch.Tensor:
        """Normalise every head and gate it (SiLU); gives `[n, Hv, dv]` in the gates' dtype."""
        count, value_heads, value_dim = outputs.shape
        gated = torch.empty(outputs.shape, dtype=gates.dtype, device=gates.device)
        gates = _side_by_side(gates)
        _gate_kernel[(count, value_heads)](
            outputs, gates, weight, gated, value_heads, value_dim, gates.stride(0), eps,
            WIDTH=triton.next_power_of_2(value_dim), num_warps=1,
        )  # fmt: skip
        return gated


def _side_by_side(rows: torch.Tensor) -> torch.Tensor:
    """Rows that may stand apart from each other; copied where a row's own values do."""
    return rows if rows[0].is_contiguous() else rows.contiguous()
