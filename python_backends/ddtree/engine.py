"""The decode loop: draft, build the tree, verify, commit, for all live sequences at once.

One task runs steps while there is work; requests join between steps. The loop is written against `Stages`
and knows neither Triton nor models.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Batch

import torch

from ddtree import events
from ddtree.deferred import DeferredWork
from ddtree.departures import Departures, as_ours
from ddtree.detokenize import Decoder
from ddtree.device.messages import RoundResult
from ddtree.drafting import DraftingLoop
from ddtree.errors import Cancelled, DDTreeError
from ddtree.limits import Limits
from ddtree.live import DraftContext, Live, Sink
from ddtree.params import GenerationParams
from ddtree.planner import RoundPlanner
from ddtree.resident import ResidentRounds
from ddtree.round_cost import FinishedRound
from ddtree.round_trace import Verified, note_round
from ddtree.scheduler import Scheduler
from ddtree.sequence import Sequence, SequenceState
from ddtree.stages.base import Stages
from ddtree.types import VerifyResult
from ddtree.verdicts import Verdicts

_LOG = logging.getLogger(__name__)
_CANCEL_AGAIN_S = 0.5
_NOTHING_KNOWN = torch.zeros((0, 0))  # of the log-probabilities of a round's tokens


class Engine:
    """Runs sequences to their end over the given stages."""

    def __init__(
        self,
        stages: Stages,
        decoder: Decoder,
        *,
        scheduler: Scheduler,
        feed_chunk: int = 128,
        max_step_nodes: int = 512,
        timer: Callable[[], float] = time.perf_counter,
        observe: events.Observe = events.ignore,
    ) -> None:
        self._stages = stages
        self._decoder = decoder
        self._scheduler = scheduler
        self._observe = observe
        self._feed_chunk = feed_chunk
        self._max_step_nodes = max_step_nodes
        self._timer = timer  # of rounds
        self._planner: RoundPlanner | None = None
        self._drafting: DraftingLoop | None = None
        self._resident: ResidentRounds | None = None
        self._work = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._deferred = DeferredWork()
        self._departures = Departures(scheduler, stages, observe, self._deferred)
        self._verdicts = Verdicts(scheduler, self._departures, observe)
        self._next_session = secrets.randbits(62)

    async def start(self) -> None:
        """Ask the stages what they are and begin to take sequences.

        Raises:
            DDTreeError: a stage does not answer, or the stages do not fit each other.
        """
        info = await self._stages.describe()
        if info.verifier.fallback:
            _LOG.warning("no trees are verified, the engine decodes by itself: %s", info.verifier.fallback)
            self._observe(events.FellBack("native_chain"))
        self._deferred.is_on = not (info.verifier.takes_all_cores or info.drafter.takes_all_cores)
        self._planner = RoundPlanner(info, self._max_step_nodes)
        self._drafting = DraftingLoop(
            self._stages, self._planner, self._deferred, feed_chunk=self._feed_chunk, observe=self._observe
        )
        if info.rounds is not None:
            self._resident = ResidentRounds(
                info.rounds, self._planner, self._drafting.lost, self._timer, self._observe
            )
        if self._loop_task is None:
            self._loop_task = asyncio.get_running_loop().create_task(self._run(), name="ddtree-engine")

    @property
    def limits(self) -> Limits:
        """What requests are checked against."""
        return self._plan.limits

    @property
    def num_live(self) -> int:
        """Sequences running or waiting."""
        return self._scheduler.num_running + self._scheduler.num_waiting

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is left and the stages have been told of every one that ended."""
        return not self._scheduler and not self._departures.hold_pages

    async def generate(
        self, params: GenerationParams, sink: Sink, request: events.RequestWatch | None = None
    ) -> None:
        """Run one sequence, a row of `request`, to its end; every round's delta goes to `sink`.

        Raises:
            DDTreeError: the sequence could not be finished; nothing is emitted after it.
        """
        self._next_session = (self._next_session + 1) % 2**62
        request = request or events.RequestWatch()
        clock = self._scheduler.clock
        live = Live(
            sequence=Sequence(params, self._next_session, self._decoder, clock),
            sink=sink,
            done=asyncio.get_running_loop().create_future(),
            draft=DraftContext(is_wanted=self._plan.wants_drafts(params)),
            node_cap=self._plan.node_cap(params),
            settings=self._plan.settings(params),  # here, where what is wrong with them concerns nobody else
            request=request,
        )
        if params.deadline_ms:  # from arrival: reading the request took its time too
            spent_ns = int((time.perf_counter() - request.arrived_s) * 1e9)
            live.deadline_ns = clock() + params.deadline_ms * 1_000_000 - spent_ns
        self._scheduler.add(live)
        self._observe(events.SequenceQueued(live))
        self._work.set()
        await live.done

    async def stop(self) -> None:
        """End the loop and the stages; sequences still running fail as cancelled."""
        if self._loop_task is not None:
            while not self._loop_task.done():  # `wait_for` of Python 3.11 loses what comes with an answer
                self._loop_task.cancel()
                await asyncio.wait({self._loop_task}, timeout=_CANCEL_AGAIN_S)
            self._loop_task = None
        self._departures.fail(list(self._scheduler), Cancelled("the server is shutting down"))
        await self._departures.release()
        await self._stages.close()

    @property
    def _plan(self) -> RoundPlanner:
        assert self._planner is not None, "start comes before anything else"
        return self._planner

    @property
    def _drafts(self) -> DraftingLoop:
        assert self._drafting is not None, "start comes before anything else"
        return self._drafting

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            if self.is_idle:
                self._work.clear()
                continue
            try:
                await self._step()
            except Exception as error:  # noqa: BLE001 - the loop outlives whatever went wrong in a step
                _LOG.exception("a step failed: %s", error)
                self._departures.fail(list(self._scheduler), as_ours(error))

    async def _step(self) -> None:
        self._departures.drop_ended()
        await self._departures.release()  # before a waiting sequence asks for the pages of one that ended
        self._scheduler.admit()
        if prefilling := self._scheduler.prefill_batch():
            await self._guard([live for live, _ in prefilling], self._prefill(prefilling))
        if decoding := self._scheduler.decode_batch():
            await self._guard(decoding, self._round(decoding))
        await asyncio.sleep(0)  # let requests arrive even when no stage call had to wait

    async def _guard(self, batch: list[Live], work: Awaitable[None]) -> None:
        """Fail the sequences of a stage call that failed, and only those."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - whatever a stage raised, the others' calls go on
            if not isinstance(error, DDTreeError):
                _LOG.exception("a stage call failed: %s", error)
            running = self._scheduler.running  # without those who ended or were postponed in this step
            self._departures.fail([live for live in batch if live in running], as_ours(error))

    async def _prefill(self, batch: Batch[tuple[Live, int]]) -> None:
        started_s = time.perf_counter()
        result = await self._deferred.during(self._stages.prefill(self._plan.prefill(batch)))
        reused = result.reused.tolist() or [0] * len(batch)
        # After what was cached, less may be left than was asked for.
        counts = [
            min(count, live.to_commit - live.committed - cached)
            for (live, count), cached in zip(batch, reused, strict=True)
        ]
        features = result.features.split(counts)
        for index, ((live, _), count) in enumerate(zip(batch, counts, strict=True)):
            if not self._verdicts.is_held(live, int(result.status[index])):
                continue
            if reused[index]:
                live.committed += reused[index]
                live.draft.begin_behind(live.committed)
                self._observe(events.PrefixHit(reused[index]))
            live.draft.owe(live.sequence.all_ids[live.committed : live.committed + count], features[index])
            live.committed += count
            if live.committed == live.to_commit:
                live.sequence.state = SequenceState.DECODING
                if not live.sequence.output_ids:  # a reopened sequence knows its root token already
                    self._verdicts.append(
                        live, [int(result.next_tokens[index])], None, result.log_probs[index]
                    )
        lives = [live for live, _ in batch]
        self._observe(events.Prefilled(lives, started_s, time.perf_counter() - started_s))
        # An unfinished prompt's context goes to the drafter at once: no message grows with the prompt.
        await self._drafts.feed([live for live in lives if live.sequence.state is SequenceState.PREFILLING])

    async def _round(self, batch: Batch[Live]) -> None:
        if self._resident is not None and self._resident.takes(batch):
            await self._drafts.bring_up(batch)
            await self._resident_round(self._resident, batch)
            return
        watch = events.StopWatch(self._timer)
        drafting, drafts = await self._drafts.draft(batch)
        watch.lap("draft")
        trees = await self._drafts.build_trees(batch, drafting, drafts)
        watch.lap("build_tree")
        verdict = await self._deferred.during(self._stages.verify(self._plan.verify(batch, trees)))
        watch.lap("verify")
        self._deferred.run()  # what is left of it; a round never waits for more than one other
        note_round(batch, Verified(drafting, self._drafts.promise, trees, verdict, watch.ms))
        self._drafts.learn(verdict)
        emitted = self._commit(batch, verdict)
        watch.lap("commit")
        nodes = int(verdict.node_counts.sum())
        cost = self._plan.cost
        plain_ms = cost.plain_ms(len(batch)) + watch.ms["commit"]
        cost.observe(
            FinishedRound(
                len(batch),
                len(drafting),
                nodes,
                draft_ms=watch.ms["draft"],
                build_ms=watch.ms["build_tree"],
                verify_ms=watch.ms["verify"],
            )
        )
        record = events.RoundRecord(
            len(batch), nodes, emitted, verdict.commit_ms, plain_ms, watch.ms, watch.started_s
        )
        self._observe(events.RoundDone(batch, drafting, verdict.node_counts.tolist(), record))

    async def _resident_round(self, resident: ResidentRounds, batch: Batch[Live]) -> None:
        watch = events.StopWatch(self._timer)
        done = await self._deferred.during(resident.run(batch))
        watch.lap("verify")
        self._deferred.run()
        emitted = self._commit(batch, done.result)
        watch.lap("commit")
        nodes = done.result.node_counts.tolist()
        plain_ms = resident.choice.plain_ms(len(batch)) + watch.ms["commit"]
        stage_ms = {**done.stage_ms(watch.ms["verify"]), "commit": watch.ms["commit"]}
        record = events.RoundRecord(
            len(batch), sum(nodes), emitted, 0.0, plain_ms, stage_ms, watch.started_s, is_whole=True
        )
        self._observe(events.RoundDone(batch, done.drafting, nodes, record))

    def _commit(self, batch: Batch[Live], verdict: VerifyResult | RoundResult) -> int:
        """Append what was accepted to each sequence; gives how many tokens were emitted.

        The drafter is owed the features of what was committed, unless it was a whole round's part.
        """
        emitted = start = 0
        # As lists at once: taking numbers out of a tensor one by one is most of what this costs.
        nodes, status = verdict.node_counts.tolist(), verdict.status.tolist()
        counts, paths = verdict.accepted_counts.tolist(), verdict.accepted_tokens.tolist()
        bonus = verdict.bonus_tokens.tolist()
        for index, live in enumerate(batch):
            if not self._verdicts.is_held(live, status[index]):
                continue
            count = counts[index]
            accepted = paths[index][:count]
            known = _NOTHING_KNOWN
            if isinstance(verdict, VerifyResult):
                features = verdict.features[start : start + count + 1]
                live.draft.owe([live.sequence.root_token, *accepted], features)
                start += count + 1
                known = verdict.log_probs[index, : count + 1]
            live.committed += count + 1
            live.recoveries = 0
            tokens = [*accepted, bonus[index]]
            emitted += self._verdicts.append(live, tokens, nodes[index], known)
        return emitted
