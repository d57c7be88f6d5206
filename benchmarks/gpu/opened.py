"""Stage objects over a pair of random weights, with sessions that are as long as a place says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.placement import Placement
from benchmarks.gpu.shapes import RandomPair
from ddtree.draft import Drafter, DrafterLimits
from ddtree.kv_cache import KvPool
from ddtree.sessions import Session, SessionTable
from ddtree.tree import build_trees
from ddtree.types import SessionBatch, TreeBatch, TreeRequest
from ddtree.verify import TargetVerifier, VerifierLimits

WIDTH = 64  # candidates per draft position
ROOT = 1  # every sequence's root token
_PAGE_SIZE = 64
_FOREVER_S = 1e9
_BEST_PROBABILITY, _FALL = 0.6, 0.35  # of a made-up position's first candidate, and from one to the next


@dataclass(frozen=True)
class OpenedStages:
    """Both stages, and how much room a session has."""

    verifier: TargetVerifier
    drafter: Drafter
    slots: int

    @classmethod
    def over(cls, pair: RandomPair, place: Placement) -> OpenedStages:
        """Make the stages; their pools hold exactly the sessions of the place."""
        draft = pair.shape.draft
        slots = place.context + place.most_nodes + 1 + draft.block_size
        all_slots = place.batch * -(-slots // _PAGE_SIZE) * _PAGE_SIZE
        verifier_bytes = pair.target.cache_shape(draft.hidden_size).bytes_per_slot
        draft_bytes = 2 * len(draft.layers) * draft.num_kv_heads * draft.head_dim * pair.target.dtype.itemsize
        verifier = TargetVerifier(
            pair.target,
            pair.projection,
            VerifierLimits(
                all_slots * verifier_bytes, _PAGE_SIZE, place.most_nodes, _FOREVER_S, prefix_cache=False
            ),
            draft_hash="random",
            feature_size=draft.hidden_size,
        )
        drafter = Drafter(
            pair.draft,
            DrafterLimits(all_slots * draft_bytes, _PAGE_SIZE, _FOREVER_S, prefix_cache=False),
            embedding=pair.target.embedding,
            head=pair.target.head,
            draft_hash="random",
        )
        return cls(verifier, drafter, slots)

    def open(self, table: SessionTable, pool: KvPool, count: int, length: int) -> list[Session]:
        """Open sessions; what is cached of them is noise, the same each time."""
        noise = torch.Generator(pool.keys_values.device).manual_seed(0)
        pool.keys_values.normal_(generator=noise)
        opened = []
        for session_id in range(count):
            session = table.open(session_id, 0, self.slots)
            assert session is not None, "the pool was made for these sessions"
            session.length = length
            opened.append(session)
        return opened


def made_up_trees(pair: RandomPair, batch: int, nodes: int) -> TreeBatch:
    """Trees such as a drafter that is often right leads to, the same for every sequence; on the CPU."""
    depth, width = pair.shape.draft.draft_positions, min(WIDTH, pair.target.vocab_size)
    per_rank = torch.log(_BEST_PROBABILITY * _FALL ** torch.arange(width, dtype=torch.float64)).float()
    ids = torch.arange(width, dtype=torch.int32)
    shape = (batch, depth, width)
    return build_trees(tree_request(ids.expand(shape), per_rank.expand(shape), nodes))


def tree_request(top_ids: torch.Tensor, top_log_probs: torch.Tensor, nodes: int) -> TreeRequest:
    """Ask for trees of `nodes` nodes."""
    batch = len(top_ids)
    return TreeRequest(
        top_ids, top_log_probs, ints(batch, nodes), torch.zeros(batch, dtype=torch.bool), torch.zeros(0)
    )


def batch_of(count: int, length: int) -> SessionBatch:
    """The sessions that `OpenedStages.open` opens."""
    return SessionBatch(torch.arange(count), ints(count, 0), ints(count, length))


def rewind(sessions: Sequence[Session], length: int) -> None:
    """Forget what sessions have committed beyond a length."""
    for session in sessions:
        session.length = length


def ints(count: int, value: int) -> torch.Tensor:
    """`[count]` int32, all the same."""
    return torch.full((count,), value, dtype=torch.int32)
