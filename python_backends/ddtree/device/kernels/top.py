"""The best candidates of each row of logits, in one reading of them and two launches.

The vocabulary is cut into chunks, one program each. A program reads its chunk once and keeps two things: its
part of the logsumexp, and its best candidates. These must lie in the groups of neighbouring lanes whose
largest members are best, as many groups as candidates are wanted, so only the groups' best are sorted, and
then the members of the chosen ones: 1,536 keys instead of 8,192. A second launch merges the chunks' lists.

      chunk     ▁▃▁▁│▁▁█▁│▁▂▁▁│▅▁▁▇│▁▁▁▂      largest of each group
                  3    8    2    7    2       the best 2 groups hold the best 2 candidates
                       ▁▁█▁      ▅▁▁▇         sort these

Keys are whole numbers: a value's bits, in an order that integers share, above its place counted from the
end. So no two are alike, equal logits come in the order of their ids, and a key says its value and place.

Not imported unless it is used: the CPU build of PyTorch comes without Triton. This module knows logits,
neither drafts nor trees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_LAST = tl.constexpr(0x7FFFFFFF)  # places of wide keys are counted from here
_NARROW_LAST = tl.constexpr(0x7FFF)
_LOWEST = tl.constexpr(-(1 << 63))  # below the key of any logit
_NARROW_LOWEST = tl.constexpr(-(1 << 31))


@dataclass(frozen=True)
class Best:
    """Candidates of each row, best first."""

    ids: torch.Tensor  # [R, K] int64 places in the row
    log_probs: torch.Tensor  # [R, K] float32, normalised over the whole row


TopChoice = Callable[[torch.Tensor, int], Best]  # logits [R, V] and K; `top_candidates`, or one like it


@triton.jit
def _exchange(x, flip, bit: tl.constexpr, DIMS: tl.constexpr):
    """Order the pairs of lanes that differ in one bit of their number."""
    other = tl.sum(x, axis=DIMS - 1 - bit, keep_dims=True) - x
    side = tl.reshape(tl.arange(0, 2), [1] * (DIMS - 1 - bit) + [2] + [1] * bit)
    return tl.where((x > other) != ((flip ^ side) != 0), other, x)


@triton.jit
def _order(x, LOG_RUN: tl.constexpr, DIMS: tl.constexpr):
    """Sort runs that rise and then fall, by turns up and down; a single run falls."""
    if LOG_RUN < DIMS:
        flip = tl.reshape(tl.arange(0, 2), [1] * (DIMS - 1 - LOG_RUN) + [2] + [1] * LOG_RUN)
    else:
        flip = tl.full([1] * DIMS, 1, tl.int32)
    for step in tl.static_range(LOG_RUN):
        x = _exchange(x, flip, LOG_RUN - 1 - step, DIMS)
    return x


@triton.jit
def _best(keys, LOG_N: tl.constexpr, LOG_K: tl.constexpr, IS_SORTED: tl.constexpr):
    """The largest `2^LOG_K` of `2^LOG_N` keys, falling: a bitonic sort that drops the lesser of each two.

    `IS_SORTED`: runs of `2^LOG_K` keys are sorted already, by turns up and down. A lane has one dimension for
    each bit of its number, so that a step is a shuffle between threads wherever the bit is a thread's.
    """
    x = tl.reshape(keys, [2] * LOG_N)
    if not IS_SORTED:
        for log_run in tl.static_range(1, LOG_K + 1):
            x = _order(x, log_run, LOG_N)
    for step in tl.static_range(LOG_N - LOG_K):
        x = tl.max(x, axis=LOG_N - 1 - step - LOG_K)
        x = _order(x, LOG_K, LOG_N - 1 - step)
    return tl.reshape(x, [2**LOG_K])


@triton.jit
def _ordered(value):
    """Whole numbers in the order of float32 values. Both zeros are one; what is no number is the least."""
    is_number = value == value
    number = tl.where(is_number, value, float("-inf"))
    bits = tl.where(number == 0.0, 0.0, number).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _key(ordered, place, IS_NARROW: tl.constexpr):
    """Join value and place. Of a bf16 value 16 bits are enough, and sorting half as wide is twice as fast."""
    if IS_NARROW:
        key = ((ordered >> 16) << 15) | (place ^ _NARROW_LAST)
    else:
        key = (ordered.to(tl.int64) << 32) | (place ^ _LAST).to(tl.int64)
    return key


@triton.jit
def _place(key, IS_NARROW: tl.constexpr):
    last: tl.constexpr = _NARROW_LAST if IS_NARROW else _LAST
    return (key & last).to(tl.int32) ^ last


@triton.jit
def _scan_kernel(
    logits, keys, peaks, sums, row_stride, vocabulary,
    LOG_GROUPS: tl.constexpr, LOG_GROUP: tl.constexpr, LOG_K: tl.constexpr, IS_NARROW: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1)
    groups: tl.constexpr = 1 << LOG_GROUPS
    size: tl.constexpr = 1 << LOG_GROUP
    kept: tl.constexpr = 1 << LOG_K
    first = chunk * (groups * size)
    source = logits + row.to(tl.int64) * row_stride
    group, member = tl.arange(0, groups), tl.arange(0, size)
    at = first + group[:, None] * size + member[None, :]
    value = tl.load(source + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
    is_number = value == value
    largest = tl.max(tl.where(is_number, value, float("-inf")), axis=1)
    peak = tl.max(largest, axis=0)
    base = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    total = tl.sum(tl.sum(tl.exp(value - base), axis=1), axis=0)
    partial = row * tl.num_programs(0) + chunk
    tl.store(peaks + partial, peak)
    tl.store(sums + partial, total)

    chosen = _place(_best(_key(_ordered(largest), group, IS_NARROW), LOG_GROUPS, LOG_K, False), IS_NARROW)
    place = chosen[:, None] * size + member[None, :]
    is_there = first + place < vocabulary
    again = tl.load(source + first + place, mask=is_there, other=float("-inf")).to(tl.float32)
    lowest: tl.constexpr = _NARROW_LOWEST if IS_NARROW else _LOWEST
    key = tl.where(is_there, _key(_ordered(again), place, IS_NARROW), lowest)
    best = _best(tl.reshape(key, [kept * size]), LOG_K + LOG_GROUP, LOG_K, False)
    if IS_NARROW:
        high = best >> 15
        ordered = (high << 16) | tl.where(high < 0, 0xFFFF, 0)
        wide = _key(ordered, first + _place(best, True), False)
    else:
        wide = best - first.to(tl.int64)  # a place further on is a lesser key
    wide = tl.where(best == lowest, _LOWEST, wide)
    tl.store(keys + partial.to(tl.int64) * kept + tl.arange(0, kept), wide)


@triton.jit
def _merge_kernel(
    keys, peaks, sums, ids, log_probs, chunks, width,
    LOG_CHUNKS: tl.constexpr, LOG_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    kept: tl.constexpr = 1 << LOG_K
    part = tl.arange(0, 1 << LOG_CHUNKS)
    is_part = part < chunks
    peak = tl.load(peaks + row * chunks + part, mask=is_part, other=float("-inf"))
    total = tl.load(sums + row * chunks + part, mask=is_part, other=0.0)
    highest = tl.max(peak, axis=0)
    base = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)
    norm = base + tl.log(tl.sum(total * tl.exp(peak - base), axis=0))

    lane = tl.arange(0, 1 << (LOG_CHUNKS + LOG_K))
    source, rank = lane // kept, lane % kept
    if LOG_CHUNKS > 0:
        rank = tl.where(source % 2 == 0, kept - 1 - rank, rank)  # by turns up and down
    at = (row * chunks + source).to(tl.int64) * kept + rank
    key = tl.load(keys + at, mask=source < chunks, other=_LOWEST)
    best = _best(key, LOG_CHUNKS + LOG_K, LOG_K, True)
    ordered = (best >> 32).to(tl.int32)
    value = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)
    column = tl.arange(0, kept)
    at = row.to(tl.int64) * width + column
    tl.store(ids + at, _place(best, False).to(tl.int64), mask=column < width)
    tl.store(log_probs + at, value - norm, mask=column < width)


@dataclass(frozen=True)
class TopKernels:
    """Launches the kernels; sizes are powers of two."""

    groups: int = 512  # of a chunk
    group: int = 16  # lanes of a group: 32 bytes of bf16, the least that memory hands out
    warps: int = 8  # of a program
    most_width: int = 128  # candidates beyond which sorting everything is no worse

    def top(
        self,
        logits: torch.Tensor,  # [R, V] float32, bf16 or fp16; rows may lie apart
        width: int,
    ) -> Best:
        """The `width` largest logits of each row; equal ones in the order of their ids.

        NaN counts as the least logit, and makes the row's log-probabilities NaN. Rows of -inf alone give ids
        from 0 on. Nothing looks at the host.

        Raises:
            ValueError: more candidates than logits, or than the kernel can sort.
        """
        rows, vocabulary = logits.shape
        log_k = max(1, _log(width))
        most = min(vocabulary, self.most_width, self.groups)
        if not 1 <= width <= most:
            raise ValueError(f"width must be between 1 and {most} for {vocabulary} logits a row, got {width}")
        chunks = triton.cdiv(vocabulary, self.groups * self.group)
        device, is_narrow = logits.device, logits.dtype is torch.bfloat16
        assert logits.stride(1) == 1, "the logits of a row lie side by side"
        assert not is_narrow or self.groups * self.group <= 1 << 15, "a narrow key has 15 bits for a place"
        keys = torch.empty((rows, chunks, 1 << log_k), dtype=torch.int64, device=device)
        peaks = torch.empty((rows, chunks), dtype=torch.float32, device=device)
        sums = torch.empty_like(peaks)
        best = Best(
            torch.empty((rows, width), dtype=torch.int64, device=device),
            torch.empty((rows, width), dtype=torch.float32, device=device),
        )
        _scan_kernel[(chunks, rows)](
            logits, keys, peaks, sums, logits.stride(0), vocabulary,
            LOG_GROUPS=_log(self.groups), LOG_GROUP=_log(self.group), LOG_K=log_k, IS_NARROW=is_narrow,
            num_warps=self.warps,
        )  # fmt: skip
        _merge_kernel[(rows,)](
            keys, peaks, sums, best.ids, best.log_probs, chunks, width,
            LOG_CHUNKS=_log(chunks), LOG_K=log_k, num_warps=self.warps,
        )  # fmt: skip
        return best


def top_candidates(logits: torch.Tensor, width: int) -> Best:
    """The best candidates by whichever way can give so many, see `TopKernels.top` and `top_by_torch`."""
    kernels = TopKernels()
    return kernels.top(logits, width) if width <= kernels.most_width else top_by_torch(logits, width)


def top_by_torch(logits: torch.Tensor, width: int) -> Best:
    """The same with PyTorch's own operators; equal logits come in any order."""
    rows = logits.float()
    top, ids = rows.topk(width, dim=-1)
    return Best(ids, top - rows.logsumexp(dim=-1, keepdim=True))


def _log(size: int) -> int:
    """Bits that number `size` lanes, rounded up."""
    return (size - 1).bit_length()
