"""What stands around the tree form in a Gated DeltaNet layer, as kernels in the Triton language.

Before it: convolution, activation and norm of every head, decays summed along paths, shares, all at once.
After it: the gated norm. One operation at a time these are forty launches a layer, which take longer than the
tree form itself. They round where the model's own forward rounds. Behind a commit: the tails of all layers.

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

_ROWS_AT_ONCE = 16  # whose decays are summed at a time
_TAIL_CHANNELS = 256  # of a program
_NORM_EPS = 1e-6  # of `gated_delta.unit`


@triton.jit
def along_path(  # noqa: ANN201 - kernels have no types of Python's
    inputs, tails, weight, windows, states, row, channel, inside, num_tails, channels, input_row,
    KERNEL: tl.constexpr,
):  # fmt: skip
    """A row's convolution over itself, its nearest ancestors and the session's tail, float32 per channel."""
    total = tl.zeros(channel.shape, dtype=tl.float32)
    for position in tl.static_range(KERNEL):
        source = tl.load(windows + row * KERNEL + position)
        in_tail = source < num_tails
        state = tl.load(states + source // (KERNEL - 1), mask=in_tail, other=0)
        from_tail = (state * (KERNEL - 1) + source % (KERNEL - 1)) * channels + channel
        from_rows = (source - num_tails) * input_row + channel
        in_rows = source >= num_tails
        value = tl.load(tails + from_tail, mask=inside & in_tail, other=0.0).to(tl.float32)
        value += tl.load(inputs + from_rows, mask=inside & in_rows, other=0.0).to(tl.float32)
        factor = tl.load(weight + channel * KERNEL + position, mask=inside, other=0.0)
        total += value * factor.to(tl.float32)
    return total


@triton.jit
def _head(
    inputs, tails, weight, windows, states, queries, keys, values, kept, row, head,
    num_tails, channels, input_row, key_heads, key_dim, value_heads, value_dim, scale, eps,
    KERNEL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One head of one row, of queries, keys or values."""
    is_query, is_value = head < key_heads, head >= 2 * key_heads
    is_key = (head >= key_heads) & (head < 2 * key_heads)
    size = tl.where(is_value, value_dim, key_dim)
    value_first = 2 * key_heads * key_dim + (head - 2 * key_heads) * value_dim
    lane = tl.arange(0, WIDTH)
    inside = lane < size
    channel = tl.where(is_value, value_first, head * key_dim) + lane
    total = along_path(
        inputs, tails, weight, windows, states, row, channel, inside, num_tails, channels, input_row, KERNEL
    )  # fmt: skip
    own = tl.load(inputs + row * input_row + channel, mask=inside, other=0.0)
    tl.store(kept + row * channels + channel, own, mask=inside)
    convolved = total.to(inputs.dtype.element_ty).to(tl.float32)
    active = (convolved * tl.sigmoid(convolved)).to(inputs.dtype.element_ty)
    tl.store(
        values + (row * value_heads + head - 2 * key_heads) * value_dim + lane, active, mask=inside & is_value
    )
    active = active.to(tl.float32)
    unit = active * tl.rsqrt(tl.sum(active * active, axis=0) + eps)
    tl.store(queries + (row * key_heads + head) * key_dim + lane, unit * scale, mask=inside & is_query)
    tl.store(keys + (row * key_heads + head - key_heads) * key_dim + lane, unit, mask=inside & is_key)


@triton.jit
def _decays(
    steps, betas, rates, bias, sees, decays, shares, start, node, heads, step_row, beta_row,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All heads of one row: decays summed over the rows that it sees, and its shares."""
    lane, head = tl.arange(0, BLOCK), tl.arange(0, HEADS)
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
    sequences, widest, num_tails, channels, input_row, step_row, beta_row,
    key_heads, key_dim, value_heads, value_dim, scale, eps,
    KERNEL: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    task = tl.program_id(0)
    # The sums take longest, so they come first.
    if task < sequences * widest:
        sequence, node = task // widest, task % widest
        if node < tl.load(counts + sequence):
            _decays(
                steps, betas, rates, bias, sees + task.to(tl.int64) * widest, decays, shares,
                tl.load(starts + sequence), node, value_heads, step_row, beta_row, HEADS, BLOCK,
            )  # fmt: skip
    else:
        task -= sequences * widest
        heads = 2 * key_heads + value_heads
        _head(
            inputs, tails, weight, windows, states, queries, keys, values, kept,
            (task // heads).to(tl.int64), task % heads, num_tails, channels, input_row,
            key_heads, key_dim, value_heads, value_dim, scale, eps, KERNEL, WIDTH,
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
        _open_kernel[(sequences * widest + count * (2 * key_heads + value_heads),)](
            mixed, tails, weights.convolution.contiguous(), windows, states, opened.queries, stash.keys,
            opened.values, stash.inputs, steps, betas, weights.rates, weights.bias, sees.view(torch.uint8),
            starts, counts, stash.decays, opened.shares, sequences, widest, sequences * (kernel - 1),
            channels, mixed.stride(0), steps.stride(0), betas.stride(0), key_heads, key_dim, value_heads,
            value_dim, key_dim**-0.5, _NORM_EPS,
            KERNEL=kernel, WIDTH=triton.next_power_of_2(max(key_dim, value_dim)),
            HEADS=triton.next_power_of_2(value_heads), BLOCK=_ROWS_AT_ONCE, num_warps=1,
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


def _side_by_side(rows: torch.Tensor) -> torch.Tensor:
    """Rows that may stand apart from each other; copied where a row's own values do."""
    return rows if rows[0].is_contiguous() else rows.contiguous()
