"""The drafter's pass over its sessions, captured for a few numbers of places. Knows no requests."""

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
from ddtree.sessions import Session


@dataclass(frozen=True)
class _Step:
    """One captured pass and what it reads."""

    places: int
    box: Mailbox
    run: Captured[DeviceCandidates]


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
            block_size: rows of a sequence.
            width: candidates per position that every pass picks.
            maker: captures on the drafter's device.
        """
        self.width = draft.width(width)
        self._block_size = block_size
        largest_first = sorted(places, reverse=True)
        self._steps = [self._capture(draft, size, cache, maker) for size in largest_first][::-1]

    def candidates(self, sessions: Sequence[Session], roots: torch.Tensor) -> DeviceCandidates | None:
        """Draft for these sessions, `[S, D, K]`; None where no size holds them. Valid until the next call.

        Args:
            sessions: with context; the first places are theirs.
            roots: `[S]` root tokens, on the host.
        """
        step = next((step for step in self._steps if step.places >= len(sessions)), None)
        if step is None:
            return None
        host, count = step.box.host, len(sessions)
        host["counts"][...] = 0
        host["counts"][:count] = self._block_size
        host["roots"][:count] = roots.numpy()
        for place, session in enumerate(sessions):
            pages = session.pages.indices
            host["page_table"][place, : len(pages)] = np.asarray(pages, dtype=np.int32)
            host["lengths"][place] = session.length
        step.box.send()
        best = step.run()
        edges = None if best.edge_log_probs is None else best.edge_log_probs[:count]
        return DeviceCandidates(best.ids[:count], best.log_probs[:count], edges)

    def _capture(self, draft: DeviceDraft, places: int, cache: CacheSize, maker: GraphMaker) -> _Step:
        box = Mailbox(
            {
                "roots": Section((places,), torch.int64),
                "lengths": Section((places,)),
                "counts": Section((places,)),
                "page_table": Section((places, cache.pages)),
            },
            draft.device,
        )
        views = box.device
        blocks = DeviceRows.blocks(views["page_table"], views["lengths"], self._block_size, cache.page_size)
        rows = replace(blocks, counts=views["counts"])
        return _Step(places, box, maker.capture(lambda: draft.draft(views["roots"], rows, self.width)))
