"""The engine's dealings with the drafter: feed it context, take candidates, open lost sessions again.

The drafter is never needed for a right answer. Whatever it loses, the sequence decodes without drafts for a
round, or for good when it keeps failing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ddtree.events import FellBack, Observe, SessionLost, ignore
from ddtree.live import Live
from ddtree.planner import RoundPlanner, spread_trees
from ddtree.stages.base import DRAFTER, Stages
from ddtree.types import DraftResult, Status, TreeBatch

_LOG = logging.getLogger(__name__)
_MAX_DRAFT_LOSSES = 3


class DraftingLoop:
    """Everything between a batch of sequences and its draft trees."""

    def __init__(
        self, stages: Stages, planner: RoundPlanner, *, feed_chunk: int, observe: Observe = ignore
    ) -> None:
        """Take the stages; `feed_chunk` is the most context tokens sent in one message when restoring."""
        self._stages = stages
        self._planner = planner
        self._feed_chunk = feed_chunk
        self._observe = observe

    async def draft(self, batch: Sequence[Live]) -> tuple[list[Live], DraftResult | None]:
        """Candidates for the sequences of `batch` that can have any: (those sequences, their candidates)."""
        is_paused = not self._planner.cost.should_draft()
        wanting = [
            live
            for live in batch
            if live.draft.is_wanted
            and live.sequence.remaining_tokens > 1
            and not (is_paused and live.is_budget_open)
        ]
        for live in [live for live in wanting if live.draft.is_lost]:
            await self._restore(live)
        wanting = [live for live in wanting if live.draft.is_wanted and not live.draft.is_lost]
        if not wanting:
            return [], None
        result = await self._ask(wanting, context_only=False)
        if result is None:
            return [], None
        kept = [index for index, live in enumerate(wanting) if self._settle(live, int(result.status[index]))]
        for index in kept:
            wanting[index].draft.drafts += 1
        if len(kept) == len(wanting):
            return wanting, result
        rows = torch.tensor(kept, dtype=torch.int64)
        return [wanting[index] for index in kept], result.select(rows)

    async def build_trees(
        self, batch: Sequence[Live], drafting: Sequence[Live], drafts: DraftResult | None
    ) -> TreeBatch:
        """One tree per sequence of `batch`; empty for those that did not draft."""
        if drafts is None or not drafting:
            return TreeBatch.empty(len(batch))
        try:
            trees = await self._stages.build_tree(self._planner.trees(drafting, drafts))
        except Exception as error:  # noqa: BLE001 - whatever broke, a plain round gives the right answer
            _LOG.warning("a round without trees: %s", error)
            return TreeBatch.empty(len(batch))
        places = {id(live): place for place, live in enumerate(batch)}
        return spread_trees(trees, [places[id(live)] for live in drafting], len(batch))

    async def feed(self, batch: Sequence[Live]) -> None:
        """Deliver owed context without asking for candidates."""
        owing = [
            live
            for live in batch
            if live.draft.is_wanted and live.draft.pending_ids and not live.draft.is_lost
        ]
        if not owing:
            return
        result = await self._ask(owing, context_only=True)
        if result is not None:
            for index, live in enumerate(owing):
                self._settle(live, int(result.status[index]))

    async def _ask(self, lives: Sequence[Live], *, context_only: bool) -> DraftResult | None:
        """Call the drafter; when it fails it counts as having lost these sequences: none of them ends."""
        try:
            return await self._stages.draft(self._planner.draft(lives, context_only=context_only))
        except Exception as error:  # noqa: BLE001 - whatever broke, a plain round gives the right answer
            _LOG.warning("a round without drafts: %s", error)
            for live in lives:
                self._settle(live, Status.SESSION_LOST)
            return None

    def _settle(self, live: Live, status: int) -> bool:
        """Note what became of a delivery; gives whether the drafter has the sequence."""
        if status == Status.OK:
            live.draft.delivered()
            return True
        if status == Status.POOL_FULL:
            _LOG.info("no drafts from now on: the drafter's pool is full", extra=live.log_fields)
            live.draft.give_up()
            self._observe(FellBack("drafter_full"))
        else:
            live.draft.lose()
            if live.draft.losses > _MAX_DRAFT_LOSSES:
                _LOG.warning("no drafts from now on: the drafter keeps losing it", extra=live.log_fields)
                live.draft.give_up()
                self._observe(FellBack("drafter_lost"))
        return False

    async def _restore(self, live: Live) -> None:
        """Open the drafter's session again from the features that the verifier keeps."""
        live.draft.forget()
        self._observe(SessionLost(live, DRAFTER))
        ids = live.sequence.all_ids
        for start in range(0, live.committed, self._feed_chunk):
            count = min(self._feed_chunk, live.committed - start)
            result = await self._stages.read_features(self._planner.features(live, start, count))
            if int(result.status[0]) != Status.OK:
                live.draft.lose()  # the verifier lost it too: its own recovery comes with this round's verify
                return
            live.draft.owe(ids[start : start + count], result.features)
            if start + count < live.committed:
                await self.feed([live])
                if live.draft.is_lost or not live.draft.is_wanted:
                    return
