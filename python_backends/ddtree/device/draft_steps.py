"""The drafter's pass over its sessions, captured for a few numbers of places: new context, then candidates.

    sent: roots, lengths, pages    features ─┐           fetched: candidates
      │                                      ▼                        ▲
      └──────────────────────────────▶ add context ─▶ draft ──────────┘

Knows no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ddtree.device.buffers import CacheSize
from ddtree.device.drafting import DeviceCandidates, DeviceDraft
from ddtree.device.graphs import Captured, GraphMaker
from ddtree.device.mailbox import Mailbox, Section
from ddtree.device.rows import DeviceRows
from ddtree.fresh_context import FreshContext
from ddtree.sessions import Session


@dataclass(frozen=True)
class _Step:
    """One captured pass, what it reads and where it leaves what it found."""

    places: int
    box: Mailbox
    features: torch.Tensor  # [places, B, H]
    run: Captured[None]
    outbox: Mailbox


class DraftSteps:
    """Passes for batches of up to the largest number of places; larger ones have none."""

    def __init__(
        self,
        draft: DeviceDraft,
        places: Sequence[int],
        cache: CacheSize,
        *,
        block_size: int,
        width: int,
        maker: GraphMaker,
    ) -> None:
        """Capture.

        Args:
            draft: the pass.
            places: sequences of each size, ascending.
            cache: how far a sequence's pages reach.
            block_size: rows of a sequence, and most new context that a pass takes for one.
            width: candidates per position that every pass picks.
            maker: captures on the drafter's device.
        """
        self.width = draft.width(width)
        self._block_size = block_size
        largest_first = sorted(places, reverse=True)
        self._steps = [self._capture(draft, size, cache, maker) for size in largest_first][::-1]

    def takes(self, sequences: int, width: int) -> bool:
        """Whether a pass does it: so many sequences, and candidates per position."""
        return width <= self.width and sequences <= self._steps[-1].places

    def candidates(
        self, sessions: Sequence[Session], roots: torch.Tensor, fresh: FreshContext
    ) -> DeviceCandidates:
        """Add new context to the cache and draft behind it, `[S, D, K]` on the host.

        Valid until the next call.

        Args:
            sessions: as many as `takes` allows; they get the first places, and stay as long as they are.
            roots: `[S]` root tokens, on the host.
            fresh: what comes behind what the sessions have, a block each at most.
        """
        count, counts = len(sessions), fresh.counts
        assert max(counts) <= self._block_size, "a pass takes a block of new context at most"
        step = next(step for step in self._steps if step.places >= count)
        host = step.box.host
        host["counts"][...] = 0
        host["fresh"][...] = 0
        host["counts"][:count] = self._block_size
        host["fresh"][:count] = counts
        host["roots"][:count] = roots.numpy()
        for place, session in enumerate(sessions):
            pages = session.pages.indices
            host["page_table"][place, : len(pages)] = np.asarray(pages, dtype=np.int32)
            host["begun"][place] = session.length
        host["lengths"][...] = host["begun"] + host["fresh"]
        step.box.send()
        assert not sum(counts) or fresh.features.shape[1:] == step.features.shape[2:], "features are rows [H]"
        start = 0
        for place, new in enumerate(counts):
            if new:
                step.features[place, :new].copy_(fresh.features[start : start + new], non_blocking=True)
            start += new
        step.run()
        step.outbox.fetch()
        found = step.outbox.host
        ids, log_probs = (torch.from_numpy(found[name][:count]) for name in ("ids", "log_probs"))
        edges = torch.from_numpy(found["edges"][:count]) if "edges" in found else None
        return DeviceCandidates(ids, log_probs, edges)

    def _capture(self, draft: DeviceDraft, places: int, cache: CacheSize, maker: GraphMaker) -> _Step:
        size, width = self._block_size, self.width
        box = Mailbox(
            {
                "roots": Section((places,), torch.int64),
                "lengths": Section((places,)),
                "begun": Section((places,)),  # what the cache has of a sequence, without the new context
                "fresh": Section((places,)),
                "counts": Section((places,)),
                "page_table": Section((places, cache.pages)),
            },
            draft.device,
        )
        sections = {
            "ids": Section((places, size - 1, width)),
            "log_probs": Section((places, size - 1, width), torch.float32),
        }
        if draft.has_edges:
            sections["edges"] = Section((places, size - 1, width, width), torch.float32)
        outbox, views = Mailbox(sections, draft.device), box.device
        begun = DeviceRows.blocks(views["page_table"], views["begun"], size, cache.page_size)
        blocks = DeviceRows.blocks(views["page_table"], views["lengths"], size, cache.page_size)
        rows = replace(blocks, counts=views["counts"])
        features = draft.room_for_features(places, size)

        def work() -> None:
            draft.extend(features, views["fresh"], begun)
            best = draft.draft(views["roots"], rows, width)
            outbox.device["ids"].copy_(best.ids)
            outbox.device["log_probs"].copy_(best.log_probs)
            if best.edge_log_probs is not None:
                outbox.device["edges"].copy_(best.edge_log_probs)

        return _Step(places, box, features, maker.capture(work), outbox)
