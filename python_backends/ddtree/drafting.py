"""The engine's dealings with the drafter: feed it context, take candidates, open lost sessions again.

The drafter is never needed for a right answer. Whatever it loses, the sequence decodes without drafts for a
round, or for good when it keeps failing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ddtree.deferred import DeferredWork
from ddtree.draft_choice import DraftChoice
from ddtree.events import FellBack, Observe, SessionLost, ignore
from ddtree.live import Live
from ddtree.planner import RoundPlanner, spread_trees
from ddtree.promise import Promise
from ddtree.stages.base import DRAFTER, Stages
from ddtree.types import DraftRequest, DraftResult, Status, TreeBatch, TreeRequest, VerifyResult

_LOG = logging.getLogger(__name__)
_MAX_DRAFT_LOSSES = 3
_MOST_READ_BACK = 1024  # tokens whose features are read back in one step


@dataclass(frozen=True)
class _Promised:
    drafting: Sequence[Live]
    places: list[int]  # of those in the round's batch
    promise: Promise


class DraftingLoop:
    """Everything between a batch of sequences and its draft trees."""

    def __init__(
        self,
        stages: Stages,
        planner: RoundPlanner,
        deferred: DeferredWork,
        *,
        feed_chunk: int,
        observe: Observe = ignore,
    ) -> None:
        """Take the stages; `feed_chunk` is the most context tokens sent in one message when restoring."""
        self._stages = stages
        self._planner = planner
        self._deferred = deferred
        self._feed_chunk = feed_chunk
        self._choice = DraftChoice(planner.cost)
        self._promised: _Promised | None = None  # of the round under way
        self._observe = observe

    async def draft(self, batch: Sequence[Live]) -> tuple[list[Live], DraftResult | None]:
        """Candidates for the sequences of `batch` that can have any: (those sequences, their candidates)."""
        able = [live for live in batch if live.draft.is_wanted and live.sequence.remaining_tokens > 1]
        wanting = self._choose(able, len(batch))
        await self._catch_up(wanting)
        _let_mixed_rows_be_read_back(wanting)
        wanting = [live for live in wanting if live.draft.is_ready]
        if not wanting:
            return [], None
        result = await self._ask(wanting, partial(self._planner.draft, context_only=False))
        if result is None:
            return [], None
        kept = [index for index, live in enumerate(wanting) if self._settle(live, int(result.status[index]))]
        for index in kept:
            wanting[index].draft.drafts += 1
        if len(kept) < len(wanting):
            result = result.select(torch.tensor(kept, dtype=torch.int64))
            wanting = [wanting[index] for index in kept]
        return wanting, self._planner.corrected(wanting, result)

    async def build_trees(
        self, batch: Sequence[Live], drafting: Sequence[Live], drafts: DraftResult | None
    ) -> TreeBatch:
        """One tree per sequence of `batch`; empty for those that did not draft."""
        self._promised = None
        if drafts is None or not drafting:
            return TreeBatch.empty(len(batch))
        try:
            request = self._planner.trees(drafting, drafts, len(batch))
            trees = await self._deferred.during(self._stages.build_tree(request))
        except Exception as error:  # noqa: BLE001 - whatever broke, a plain round gives the right answer
            _LOG.warning("a round without trees: %s", error)
            return TreeBatch.empty(len(batch))
        places = {id(live): place for place, live in enumerate(batch)}
        drafters = [places[id(live)] for live in drafting]
        self._deferred.defer(partial(self._note_promise, drafting, drafters, trees, request))
        return spread_trees(trees, drafters, len(batch))

    def _note_promise(
        self, drafting: Sequence[Live], places: list[int], trees: TreeBatch, request: TreeRequest
    ) -> None:
        promise = Promise.of(trees, request)
        self._promised = _Promised(drafting, places, promise)
        deepest = trees.depths.cpu().numpy().max(axis=1, initial=0).tolist()
        counts = trees.counts.tolist()
        for live, tokens, nodes, depth in zip(drafting, promise.tokens(), counts, deepest, strict=True):
            self._choice.learn(live.outlook, tokens, nodes)
            live.outlook.reached(depth)

    @property
    def promise(self) -> Promise | None:
        """What the trees of the round under way promise, a row per drafting sequence; None without trees."""
        return None if self._promised is None else self._promised.promise

    def learn(self, verdict: VerifyResult) -> None:
        """Compare what became of the round's trees with what was promised of them."""
        if self._promised is None:
            return
        drafting, places, promise = self._promised.drafting, self._promised.places, self._promised.promise
        self._promised = None
        accepted, counts, status = (
            field.cpu().numpy()[places].astype(np.int64)
            for field in (verdict.accepted_tokens, verdict.accepted_counts, verdict.status)
        )
        is_held = (status == Status.OK).tolist()
        surprises, promised = promise.surprise(accepted, counts)
        for index, live in enumerate(drafting):
            if is_held[index]:
                self._choice.note_surprise(live.outlook, float(surprises[index]), float(promised[index]))

    def _choose(self, able: Sequence[Live], sequences: int) -> list[Live]:
        """Those of the sequences that draft in this round: all that were asked to, the others if it pays."""
        free = [live for live in able if live.is_budget_open]
        fixed = [live.outlook for live in able if not live.is_budget_open]
        rested = sum(live.outlook.is_resting for live in free)
        chosen = self._choice.choose([live.outlook for live in free], fixed, sequences)
        for _ in range(sum(live.outlook.is_resting for live in free) - rested):
            self._observe(FellBack("not_paying"))
        drafting = {id(live) for live, is_chosen in zip(free, chosen, strict=True) if is_chosen}
        return [live for live in able if id(live) in drafting or not live.is_budget_open]

    async def feed(self, batch: Sequence[Live]) -> None:
        """Deliver owed context without asking for candidates."""
        await self._catch_up([live for live in batch if live.draft.is_behind])
        await self._deliver([live for live in batch if not live.draft.is_behind])

    async def bring_up(self, batch: Sequence[Live]) -> None:
        """Give the drafter all it lacks of these sequences; nobody drafts."""
        wanting = [live for live in batch if live.draft.is_wanted]
        await self._catch_up([live for live in wanting if live.draft.is_lost or live.draft.is_behind])
        await self._deliver([live for live in wanting if not live.draft.is_behind])

    async def _deliver(self, batch: Sequence[Live]) -> None:
        _let_mixed_rows_be_read_back(batch)
        owing = [
            live
            for live in batch
            if live.draft.is_wanted and live.draft.pending_ids and not live.draft.is_lost
        ]
        if not owing:
            return
        result = await self._ask(owing, partial(self._planner.draft, context_only=True))
        if result is not None:
            for index, live in enumerate(owing):
                self._settle(live, int(result.status[index]))

    async def _ask(
        self, lives: Sequence[Live], plan: Callable[[Sequence[Live]], DraftRequest]
    ) -> DraftResult | None:
        """Call the drafter; when it fails it counts as having lost these sequences: none of them ends."""
        try:
            return await self._deferred.during(self._stages.draft(plan(lives)))
        except Exception as error:  # noqa: BLE001 - whatever broke, a plain round gives the right answer
            _LOG.warning("a round without drafts: %s", error)
            for live in lives:
                self._settle(live, Status.SESSION_LOST)
            return None

    def lost(self, live: Live) -> None:
        """Note that the drafter did not have a sequence; one that it keeps losing drafts no more."""
        self._settle(live, Status.SESSION_LOST)

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

    async def _catch_up(self, batch: Sequence[Live]) -> None:
        """Give the drafter what it lacks: of sessions it lost, and of prompts that the verifier had cached.

        It opens them with what it has cached itself. The rest it reads of the features that the verifier
        keeps, so the target never runs again. A long one takes several steps: nobody waits for it longer.
        """
        for live in batch:
            if live.draft.is_lost:
                live.draft.begin_behind(live.committed)
                self._observe(SessionLost(live, DRAFTER))
        if opening := [live for live in batch if live.draft.is_behind and not live.draft.length]:
            await self._open(opening)
        left = _MOST_READ_BACK
        for live in batch:
            if live.draft.is_behind and left > 0:
                left -= await self._read_back(live, left)

    async def _open(self, batch: Sequence[Live]) -> None:
        result = await self._ask(batch, self._planner.open_drafts)
        if result is None:
            return
        reused = result.reused.tolist() or [0] * len(batch)
        for live, status, length in zip(batch, result.status.tolist(), reused, strict=True):
            if status == Status.OK:
                live.draft.length = length
            else:
                self._settle(live, status)

    async def _read_back(self, live: Live, most: int) -> int:
        """Read at most so many tokens of what the drafter lacks, before what is owed; gives how many."""
        draft, ids, begun = live.draft, live.sequence.all_ids, live.draft.length
        later_ids, later_features = draft.pending_ids, draft.pending_features
        draft.pending_ids, draft.pending_features = [], []
        stop = min(draft.behind_until, begun + most)
        for start in range(begun, stop, self._feed_chunk):
            count = min(self._feed_chunk, stop - start)
            try:
                request = self._planner.features(live, start, count)
                result = await self._deferred.during(self._stages.read_features(request))
            except Exception as error:  # noqa: BLE001 - whatever broke, a plain round gives the right answer
                _LOG.warning("features cannot be read back: %s", error, extra=live.log_fields)
                self._settle(live, Status.SESSION_LOST)
                return most  # nobody else waits for the same in this step
            if int(result.status[0]) != Status.OK:
                draft.lose()  # the verifier lost it too: its own recovery comes with this round's verify
                return start - begun
            draft.owe(ids[start : start + count], result.features)
            if start + count == draft.behind_until:
                draft.behind_until = draft.length  # the rest is at hand, and goes with what is owed
            else:
                await self._deliver([live])
            if draft.is_lost or not draft.is_wanted:
                return start + count - begun
        draft.pending_ids += later_ids
        draft.pending_features += later_features
        return stop - begun


def _let_mixed_rows_be_read_back(batch: Sequence[Live]) -> None:
    """Context features by value and by reference cannot be joined: after a change of ways all come anew."""
    if len({piece.shape[1] for live in batch for piece in live.draft.pending_features}) > 1:
        for live in batch:
            if live.draft.pending_features:
                live.draft.fall_behind(live.committed)
