"""The rows of one step as values on the device: which there are, where they stand, and what each sees.

A step has `S` places for sequences and `T` rows for each; row `t` of place `s` is row `s * T + t` of the
packed forward. Shapes alone decide what is launched, so a step can be captured into a graph and played back
with other trees, lengths and sequences:

      place 0, 3 of 4 rows      place 1, empty         place 2, 1 of 4 rows
    ┌────┬────┬────┬────┐    ┌────┬────┬────┬────┐   ┌────┬────┬────┬────┐
    │root│ n1 │ n2 │ ── │    │ ── │ ── │ ── │ ── │   │root│ ── │ ── │ ── │
    └────┴────┴────┴────┘    └────┴────┴────┴────┘   └────┴────┴────┴────┘

A padding row (`──`) computes finite values that nobody reads, and is stored nowhere: its slot is -1. This
module knows neither kernels nor sessions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import torch


class Sight(IntEnum):
    """What a row sees of its own sequence's rows; all of the committed prefix it sees in any case."""

    TREE = 0  # itself and its ancestors, by bit rows
    CAUSAL = 1  # itself and the rows before it
    BLOCK = 2  # all rows


@dataclass(frozen=True)
class DeviceRows:
    """One step's rows. All tensors are contiguous, on one device, and keep their addresses between steps."""

    page_table: torch.Tensor  # [S, P] int32, the pages of each sequence in order; behind its last: anything
    lengths: torch.Tensor  # [S] int32 committed slots
    counts: torch.Tensor  # [S] int32 rows that mean something, 0..T; 0: the place is empty
    depths: torch.Tensor  # [S, T] int32 position of a row after the committed prefix; 0 for the root
    bits: torch.Tensor  # [S, T, W] int64 ancestor bits, W = ceil(T / 64); see `tree_mask.ancestor_bits`
    slots: torch.Tensor  # [S, T] int64 pool slot where a row is staged; -1: nowhere
    page_size: int  # slots of a page

    @classmethod
    def empty(cls, places: int, rows: int, pages: int, page_size: int, device: torch.device) -> DeviceRows:
        """Rows without a sequence, to be filled in place."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            page_table=zeros(places, pages),
            lengths=zeros(places),
            counts=zeros(places),
            depths=zeros(places, rows),
            bits=zeros(places, rows, -(-rows // 64), dtype=torch.int64),
            slots=torch.full((places, rows), -1, dtype=torch.int64, device=device),
            page_size=page_size,
        )

    @classmethod
    def blocks(
        cls, page_table: torch.Tensor, lengths: torch.Tensor, block_size: int, page_size: int
    ) -> DeviceRows:
        """A drafter's block behind the context of each place; `counts` begin with zeros."""
        device = lengths.device
        made = cls.empty(len(lengths), block_size, 1, page_size, device)
        made.depths.copy_(torch.arange(block_size, device=device).expand(len(lengths), -1))
        return replace(made, page_table=page_table, lengths=lengths)

    @property
    def places(self) -> int:
        """S, sequences that the step has room for."""
        return int(self.depths.shape[0])

    @property
    def rows(self) -> int:
        """T, rows of each place."""
        return int(self.depths.shape[1])

    @property
    def positions(self) -> torch.Tensor:
        """Sequence position of each row, `[S, T]` int32."""
        return self.lengths[:, None] + self.depths
