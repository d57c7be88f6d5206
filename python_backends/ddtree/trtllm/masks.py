"""Draft trees as TensorRT-LLM's attention takes them: packed mask rows of 32-bit words, and depth offsets.

The tree with the nodes 1 and 2 under the root and 3 under 1, padded to five rows:

    row            sees              word       offset
    0  root        0                 0b00001    0
    1              0 1               0b00011    1
    2              0 2               0b00101    1
    3              0 1 3             0b01011    2
    4  padding     0 4               0b10001    1

Bit j % 32 of word j // 32 of row i says that row i sees row j; the kernel adds that all see the committed
tokens. Every request of a batch has the same number of rows, so smaller trees get padding rows that no other
row sees and that are never accepted. This module knows neither the engine nor tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ddtree.attention.plan import Segment

WORD_BITS = 32


@dataclass(frozen=True)
class PackedTrees:
    """The trees of one batch, root included."""

    mask: torch.Tensor  # [S, N, ceil(N / 32)] int32; bit 31 makes a word negative
    offsets: torch.Tensor  # [S, N] int32, depth of each row

    @property
    def width(self) -> int:
        """Rows of every tree."""
        return int(self.offsets.shape[1])


def pack(segments: Sequence[Segment], width: int) -> PackedTrees:
    """Pack what the segments of a step plan see.

    Args:
        segments: trees or, where `sees` is None, chains; each of at most `width` rows.
        width: rows of every packed tree.
    """
    sees = torch.stack([_padded(segment, width) for segment in segments])
    offsets = torch.stack(
        [functional.pad(s.depths, (0, width - s.count), value=1).to(torch.int32) for s in segments]
    )
    return PackedTrees(pack_rows(sees), offsets)


def pack_rows(
    sees: torch.Tensor,  # [..., N] bool
) -> torch.Tensor:
    """Give bit rows `[..., ceil(N / 32)]` int32, lowest bit first."""
    words = -(-sees.shape[-1] // WORD_BITS)
    padded = functional.pad(sees, (0, words * WORD_BITS - sees.shape[-1]))
    bits = padded.unflatten(-1, (words, WORD_BITS)).long()
    values = (bits << torch.arange(WORD_BITS, device=sees.device)).sum(-1)
    # As two's complement: from 2^31 on the value is written as the negative number with the same bits.
    signed: torch.Tensor = values - (values >> (WORD_BITS - 1) << WORD_BITS)
    return signed.to(torch.int32)


def _padded(segment: Segment, width: int) -> torch.Tensor:
    """Who sees whom, `[width, width]` bool, with padding rows that see the root and themselves."""
    device = segment.depths.device
    rows = torch.eye(width, dtype=torch.bool, device=device)
    rows[segment.count :, 0] = True
    if segment.sees is None:
        chain = torch.ones((segment.count, segment.count), dtype=torch.bool, device=device).tril()
        rows[: segment.count, : segment.count] = chain
    else:
        rows[: segment.count, : segment.count] = segment.sees
    return rows
