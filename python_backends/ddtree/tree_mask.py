"""Says which node of a draft tree sees which: every node sees itself and its ancestors, the root included.

A tree with the nodes 1 and 2 under the root and 3 under 1 (parents 0, 0, 1):

          sees  0  1  2  3
    0  root     T  F  F  F          root
    1           T  T  F  F          ├── 1
    2           T  F  T  F          │   └── 3
    3           T  T  F  T          └── 2

Row 3 as a bit row is 0b1011: bit j is set when the row's node sees node j. Only this square is ever stored:
every row sees the whole committed prefix, so nothing needs to be said about that. This module knows neither
tokens nor attention kernels.
"""

from __future__ import annotations

import torch

# All 64 bits of a word are used. Bit 63 makes the word negative, which does no harm as long as a bit is read
# by shifting right and taking the lowest bit: an arithmetic shift only adds copies of the sign above it.
WORD_BITS = 64


def ancestor_bits(
    parents: torch.Tensor,  # [S, N] node index of each node's parent, 0 = root
    counts: torch.Tensor,  # [S] nodes of each tree; later columns are padding, whatever they hold
) -> torch.Tensor:
    """Give bit rows `[S, N + 1, W]` int64 with W = ⌈(N + 1) / 64⌉; row 0 is the root.

    Bit j of row i (bit j % 64 of word j // 64) is set when node j is node i or an ancestor of it. A padding
    row has its own bit and the root's, so that its softmax stays finite, and no other row has a padding row's
    bit. Needs no look at the values on the host: the number of steps depends on N only.
    """
    num_sequences, num_nodes = parents.shape
    rows = torch.arange(num_nodes + 1, device=parents.device)
    own = parents.new_zeros(num_nodes + 1, num_nodes // WORD_BITS + 1, dtype=torch.int64)
    own[rows, rows // WORD_BITS] = torch.ones_like(rows) << rows % WORD_BITS
    bits = own.expand(num_sequences, -1, -1)
    jump = parents_from_root(parents, counts)
    # Pointer doubling: after k steps a row holds its nearest 2^k nodes upwards, and `jump` leads past them.
    for _ in range(num_nodes.bit_length()):
        bits = bits | bits.gather(1, jump.unsqueeze(-1).expand_as(bits))
        jump = jump.gather(1, jump)
    return bits.contiguous()


def parents_from_root(
    parents: torch.Tensor,  # [S, N]
    counts: torch.Tensor,  # [S]
) -> torch.Tensor:
    """Give `[S, N + 1]` int64 parents with the root in column 0, the root and padding under the root."""
    columns = torch.arange(parents.shape[1], device=parents.device)
    inside = parents.long().masked_fill(columns >= counts.unsqueeze(1), 0)
    return torch.nn.functional.pad(inside, (1, 0))


def expand(
    bits: torch.Tensor,  # [S, N + 1, W] int64
) -> torch.Tensor:
    """Spread bit rows into `[S, N + 1, N + 1]` bool: `[s, i, j]` says whether row i sees row j."""
    columns = torch.arange(bits.shape[1], device=bits.device)
    return (bits[:, :, columns // WORD_BITS] >> columns % WORD_BITS & 1).bool()
