"""What a step of one size reads: filled on the host for every place, sent as one copy, at fixed addresses.

This module knows sessions' pages and lengths; not what is computed with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from ddtree.device.mailbox import Mailbox, Section
from ddtree.device.rows import DeviceRows
from ddtree.device.trees import DeviceTrees
from ddtree.kv_cache import Pages
from ddtree.sessions import Session
from ddtree.types import TreeBatch


@dataclass(frozen=True)
class StepSize:
    """Room for `places` sequences of `nodes` draft nodes each, and their roots."""

    places: int
    nodes: int

    @property
    def rows(self) -> int:
        """Rows of the whole step."""
        return self.places * (self.nodes + 1)


@dataclass(frozen=True)
class CacheSize:
    """How far a sequence's pages reach in one pool."""

    pages: int  # most of one sequence
    page_size: int


@dataclass(frozen=True)
class TreeWishes:
    """What trees sequences are to get."""

    budgets: NDArray[np.int32]  # [S] most draft nodes
    depths: NDArray[np.int32]  # [S] deepest useful draft position
    is_chain: NDArray[np.bool_]  # [S]


class StepBuffers:
    """Inputs of one size of step, of the target alone and of whole rounds."""

    def __init__(
        self,
        size: StepSize,
        target: CacheSize,
        draft: CacheSize,
        device: torch.device,
        state_of: Callable[[Pages], int | None],  # the recurrent state beside a sequence's pages
    ) -> None:
        self.size = size
        self._state_of = state_of
        self.draft_page_size = draft.page_size
        self.reach = min(cache.pages * cache.page_size for cache in (target, draft))  # slots of a sequence
        places, nodes = size.places, size.nodes
        one, tree = Section((places,)), Section((places, nodes))
        self.box = Mailbox(
            {
                "lengths": one,
                "roots": Section((places,), torch.int64),
                "active": Section((places,), torch.bool),
                "states": Section((places,), torch.int64),
                "page_table": Section((places, target.pages)),
                "draft_table": Section((places, draft.pages)),
                "has_drafter": Section((places,), torch.bool),
                "budgets": one,
                "limits": one,  # deepest useful draft position
                "is_chain": Section((places,), torch.bool),
                "tokens": tree,
                "parents": tree,
                "depths": tree,
                "counts": one,
            },
            device,
        )
        views = self.box.device
        self.trees = DeviceTrees(
            views["tokens"],
            views["parents"],
            views["depths"],
            views["counts"],
            torch.zeros((places, nodes), dtype=torch.float32, device=device),
        )
        made = DeviceRows.empty(places, nodes + 1, 1, target.page_size, device)
        self.rows = replace(made, page_table=views["page_table"], lengths=views["lengths"])
        self.token_ids = torch.zeros((places, nodes + 1), dtype=torch.int64, device=device)
        self._room = np.zeros(places, dtype=np.int64)  # slots of each place's session
        # Whose pages stand where: a table is long, and most sequences stay in their places.
        self._held: dict[str, list[Pages | None]] = {
            table: [None] * places for table in ("page_table", "draft_table")
        }

    def clear(self) -> None:
        """Begin a step without sequences."""
        host = self.box.host
        for name in ("active", "has_drafter", "lengths", "budgets", "limits", "is_chain", "counts"):
            host[name][...] = 0

    def fill(self, sessions: Sequence[Session], roots: Sequence[int], trees: TreeBatch) -> None:
        """Be a step over trees that were built on the host, and of nobody else."""
        self.clear()
        self.put(sessions, roots)
        self.put_trees(trees)

    def put(self, sessions: Sequence[Session], roots: Sequence[int]) -> None:
        """Give sequences of the target the first places, in this order."""
        # All places of a tensor at once: an assignment of one number costs what one of a row does.
        host, places = self.box.host, slice(0, len(sessions))
        host["active"][places] = True
        host["lengths"][places] = [session.length for session in sessions]
        host["roots"][places] = roots
        self._room[places] = [session.pages.capacity for session in sessions]
        for place, session in enumerate(sessions):
            if self._put_pages("page_table", place, session.pages) and session.pages.indices:
                host["states"][place] = self._state_of(session.pages) or 0

    def put_drafters(self, sessions: Sequence[Session | None], wishes: TreeWishes) -> None:
        """Let the first places draft, but those without a session; the context is as long as the target's."""
        host, places = self.box.host, slice(0, len(sessions))
        can_draft = [session is not None for session in sessions]
        host["has_drafter"][places] = can_draft
        host["budgets"][places] = wishes.budgets * can_draft
        host["limits"][places] = wishes.depths
        host["is_chain"][places] = wishes.is_chain
        for place, session in enumerate(sessions):
            if session is not None:
                self._put_pages("draft_table", place, session.pages)

    def put_trees(self, trees: TreeBatch) -> None:
        """Give the first places trees that were built on the host."""
        host, (count, nodes) = self.box.host, trees.tokens.shape
        for name in ("tokens", "parents", "depths"):
            host[name][:count, :nodes] = getattr(trees, name).cpu().numpy()
        host["counts"][:count] = trees.counts.cpu().numpy()
        ends = host["lengths"][:count] + host["counts"][:count] + 1
        assert (ends <= self._room[:count]).all(), "a tree overruns its session's pages"

    def _put_pages(self, table: str, place: int, pages: Pages) -> bool:
        """Write a sequence's pages, unless they stand there; gives whether they had to be written."""
        held = self._held[table]
        if held[place] is pages:
            return False
        self.box.host[table][place, : len(pages.indices)] = np.asarray(pages.indices, dtype=np.int32)
        held[place] = pages
        return True
