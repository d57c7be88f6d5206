"""What the engine asks of stages that do a whole round on one device, and what they answer.

Nothing here crosses a process: host tensors, packed over `S` sequences. This module knows no device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddtree.types import SessionBatch

NO_DRAFTER = -1  # in place of a drafter's epoch: the sequence has no session there


@dataclass(frozen=True)
class RoundRequest:
    """One round of sequences whose most probable token is wanted; drafter and verifier are in step."""

    sessions: SessionBatch  # in the verifier
    draft_epochs: torch.Tensor  # [S] int32 of the drafter's sessions, of the same lengths; or NO_DRAFTER
    root_tokens: torch.Tensor  # [S] int32
    budgets: torch.Tensor  # [S] int32, most draft nodes; 0 without a drafter
    depths: torch.Tensor  # [S] int32, deepest draft position that may still be emitted
    is_chain: torch.Tensor  # [S] bool
    nodes: int  # a size from `RoundSizes` that holds every budget


@dataclass(frozen=True)
class RoundResult:
    """The accepted paths, committed in both caches."""

    status: torch.Tensor  # [S] int32, of the verifier
    draft_status: torch.Tensor  # [S] int32, of the drafter; OK where none was asked for
    accepted_tokens: torch.Tensor  # [S, D] int32, zeros behind the path
    accepted_counts: torch.Tensor  # [S] int32
    bonus_tokens: torch.Tensor  # [S] int32
    node_counts: torch.Tensor  # [S] int32
    path_log_probs: torch.Tensor  # [S, N] float32 of the nodes, best first; -inf behind them
    stage_ms: dict[str, float]  # draft, build_tree, verify: what each took on the device


@dataclass(frozen=True)
class RoundSizes:
    """The sizes of rounds that the stages have prepared, and what one takes."""

    places: tuple[int, ...]  # sequences, ascending
    nodes: tuple[int, ...]  # draft nodes of each sequence, ascending from 0
    ms: dict[tuple[int, int], float]  # by (places, nodes), for every pair that is prepared

    def places_for(self, sequences: int) -> int | None:
        """The fewest places that hold so many sequences; None: there are none."""
        return next((places for places in self.places if places >= sequences), None)

    def prepared(self, places: int | None) -> list[int]:
        """Draft nodes of the sizes that are prepared with so many places, ascending."""
        return [nodes for nodes in self.nodes if (places, nodes) in self.ms]

    def nodes_for(self, sequences: int, budget: int) -> int | None:
        """The smallest prepared tree of at least `budget` nodes; None: there is none."""
        prepared = self.prepared(self.places_for(sequences))
        return next((nodes for nodes in prepared if nodes >= budget), None)
