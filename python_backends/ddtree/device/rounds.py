"""A whole round on one device: draft, build trees, verify, walk, commit, and one look at the host at the end.

    sent: roots, lengths, pages, budgets                               fetched: paths, bonus tokens
      │                                                                            ▲
      └─▶ draft ─▶ build ─▶ target ─▶ walk ─▶ move rows ─▶ features ─▶ drafter's context

Each part is captured once per size of step and played back; nothing in between depends on a value that the
host knows. Drafter and verifier are in step before a round and after it: what is committed in one is in the
other, since features go from the target's taps into the drafter's cache without leaving the device.

This module knows sessions and the stages' caches; neither requests nor how tree sizes are chosen.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ddtree import verify_batch
from ddtree.device.buffers import StepSize, TreeWish
from ddtree.device.graphs import GraphMaker
from ddtree.device.laps import Laps
from ddtree.device.messages import NO_DRAFTER, RoundRequest, RoundResult, RoundSizes
from ddtree.device.round_parts import RoundParts, RoundStages
from ddtree.device.steps import TargetSteps
from ddtree.device.trees import DeviceAcceptance
from ddtree.draft import Drafter
from ddtree.sessions import Session
from ddtree.types import Status
from ddtree.verify import TargetVerifier

_COST_LENGTH = 256  # committed tokens behind which rounds are timed


@dataclass(frozen=True)
class _Taking:
    """One sequence of a round that is served."""

    index: int  # in the request
    session: Session
    draft: Session | None  # None: it drafts nothing


class DeviceRounds:
    """Rounds over the sessions of a verifier and a drafter that share a device. One at a time."""

    def __init__(
        self,
        verifier: TargetVerifier,
        drafter: Drafter,
        steps: TargetSteps,
        maker: GraphMaker,
    ) -> None:
        """Take the stages; `prepare` comes before the first round.

        Args:
            verifier: whose sessions and target are used.
            drafter: whose sessions and pass are used.
            steps: the target's steps, over the verifier's pool.
            maker: captures on their device.
        """
        self._verifier, self._drafter, self._steps, self._maker = verifier, drafter, steps, maker
        self._stages = RoundStages(
            drafter.on_device(),
            drafter.block_size,
            verifier.projection,
            verifier.pool,
            lambda buffers: steps.captured(buffers.size),
        )
        self._laps = Laps(verifier.target.device)
        self._parts: dict[StepSize, RoundParts] = {}
        places = sorted({size.places for size in steps.sizes})
        nodes = sorted({size.nodes for size in steps.sizes})
        self.sizes = RoundSizes(tuple(places), tuple(nodes), {})

    def prepare(self, on_progress: Callable[[StepSize], None] | None = None, repeats: int = 5) -> None:
        """Capture every size and time a round of it; the target's steps are captured already."""
        for size in sorted(self._steps.sizes, key=lambda size: -size.rows):
            self._parts[size] = RoundParts(self._steps.buffers[size], self._stages, self._maker)
            self.sizes.ms[(size.places, size.nodes)] = self._time(size, repeats)
            if on_progress is not None:
                on_progress(size)

    @torch.inference_mode()
    def run(self, request: RoundRequest) -> RoundResult:
        """Do one round; sequences whose sessions are gone take no part in it."""
        self._verifier.sessions.expire()
        self._drafter.sessions.expire()
        result = _nothing(request, min(self._stages.block_size - 1, request.nodes))
        taking = self._find(request, result)
        if not taking:
            return result
        size = self._steps.size_for(len(taking), request.nodes)
        assert size is not None, "a round has one of the sizes that `sizes` tells"
        self._fill(size, request, taking)
        parts = self._parts[size]
        parts.play(self._laps)
        self._keep(result, request, taking, parts)
        result.stage_ms.update(self._laps.ms())
        return result

    def _find(self, request: RoundRequest, result: RoundResult) -> list[_Taking]:
        taking = []
        rows, epochs = verify_batch.session_rows(request.sessions), request.draft_epochs.tolist()
        for index, (row, epoch) in enumerate(zip(rows, epochs, strict=True)):
            session = self._verifier.sessions.find(*row)
            if session is None:
                result.status[index] = Status.SESSION_LOST
                continue
            assert session.sampler is None, "only the largest logit decides here"
            draft = None
            if epoch != NO_DRAFTER:
                draft = self._drafter.sessions.find(row[0], epoch, row[2])
                result.draft_status[index] = Status.SESSION_LOST if draft is None else Status.OK
            taking.append(_Taking(index, session, draft))
        return taking

    def _fill(self, size: StepSize, request: RoundRequest, taking: Sequence[_Taking]) -> None:
        buffers = self._steps.buffers[size]
        buffers.clear()
        roots, budgets = request.root_tokens.tolist(), request.budgets.tolist()
        limits, is_chain = request.depths.tolist(), request.is_chain.tolist()
        for place, one in enumerate(taking):
            buffers.put(place, one.session, roots[one.index])
            if one.draft is not None:
                wish = TreeWish(budgets[one.index], limits[one.index], is_chain[one.index])
                buffers.put_drafter(place, one.draft, wish)

    def _keep(
        self, result: RoundResult, request: RoundRequest, taking: Sequence[_Taking], parts: RoundParts
    ) -> None:
        """Note what the round committed in both session tables, and put it into the result."""
        host = parts.outbox.host
        paths = torch.from_numpy(host["paths"])
        accepted = DeviceAcceptance.over(paths, len(host["counts"]), parts.depth)
        index, count = torch.tensor([one.index for one in taking]), len(taking)
        result.accepted_counts[index] = accepted.accepted_counts[:count]
        result.bonus_tokens[index] = accepted.bonus_tokens[:count]
        result.accepted_tokens[index] = accepted.accepted_tokens[:count]
        result.node_counts[index] = torch.from_numpy(host["counts"][:count])
        result.path_log_probs[index] = torch.from_numpy(host["log_probs"][:count])
        # As lists at once: taking numbers out of a tensor one by one is most of what this costs.
        roots, counts = request.root_tokens.tolist(), accepted.accepted_counts.tolist()
        for one, length, tokens in zip(taking, counts, accepted.accepted_tokens.tolist(), strict=False):
            ids = [roots[one.index], *tokens[:length]]
            result.status[one.index] = self._verifier.sessions.commit(one.session, ids)
            if one.draft is not None:
                self._drafter.sessions.commit(one.draft, ids)

    def _time(self, size: StepSize, repeats: int) -> float:
        """Milliseconds of a round of sequences of some length, all of the same pages: nothing is kept."""
        pools = (self._verifier.pool, self._drafter.pool)
        buffers = self._steps.buffers[size]
        beyond = size.nodes + self._stages.block_size + 1
        length = max(0, min(_COST_LENGTH, buffers.reach - beyond))
        held = [pool.reserve(length + beyond) for pool in pools]
        target, draft = (
            Session(0, 0, pages, length) if pages is not None else Session(0, 0) for pages in held
        )
        buffers.clear()
        for place in range(size.places):
            buffers.put(place, target, 0)
            buffers.put_drafter(place, draft, TreeWish(size.nodes, self._stages.block_size - 1, False))
        samples = []
        for _ in range(repeats + 1):
            self._parts[size].play(self._laps)
            samples.append(sum(self._laps.ms().values()))
        for pool, pages in zip(pools, held, strict=True):
            if pages is not None:
                pool.release(pages)
        return statistics.median(samples[1:])


def _nothing(request: RoundRequest, depth: int) -> RoundResult:
    """The result of a round in which nothing was done yet."""
    count = len(request.sessions)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros((count, *shape), dtype=torch.int32)

    return RoundResult(
        status=zeros(),
        draft_status=zeros(),
        accepted_tokens=zeros(depth),
        accepted_counts=zeros(),
        bonus_tokens=zeros(),
        node_counts=zeros(),
        path_log_probs=torch.full((count, request.nodes), -torch.inf),
        stage_ms={"draft": 0.0, "build_tree": 0.0, "verify": 0.0},
    )
