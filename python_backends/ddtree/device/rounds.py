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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddtree import verify_batch
from ddtree.device.buffers import StepSize, TreeWishes
from ddtree.device.graphs import GraphMaker
from ddtree.device.keeping import TargetCache
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


@dataclass
class _Taking:
    """The sequences of a round that are served, in their places."""

    indices: list[int] = field(default_factory=list)  # in the request
    sessions: list[Session] = field(default_factory=list)
    drafts: list[Session | None] = field(default_factory=list)  # None: it drafts nothing

    def among(self, values: torch.Tensor) -> NDArray[Any]:
        """What belongs to these sequences of `[S]` values of the request."""
        array = values.numpy()
        return array if len(self.indices) == len(array) else array[self.indices]

    def spread(self, values: NDArray[Any], size: int, absent: float = 0) -> torch.Tensor:
        """Copy the first places' values to where the sequences stand in a request of `size`."""
        values = values[: len(self.indices)]
        if len(self.indices) == size:
            return torch.from_numpy(values.copy())
        wide = np.full((size, *values.shape[1:]), absent, dtype=values.dtype)
        wide[self.indices] = values
        return torch.from_numpy(wide)


@dataclass(frozen=True)
class _Outcome:
    """What a round leaves in its outbox, on the host, seen by place."""

    accepted_counts: NDArray[np.int32]  # [places]
    bonus_tokens: NDArray[np.int32]  # [places]
    accepted_tokens: NDArray[np.int32]  # [places, D]
    node_counts: NDArray[np.int32]  # [places]
    log_probs: NDArray[np.float32]  # [places, N]

    @classmethod
    def of(cls, parts: RoundParts, places: int) -> _Outcome:
        """See the outbox of a size, which stays where it is."""
        host = parts.outbox.host
        paths = DeviceAcceptance.over(torch.from_numpy(host["paths"]), places, parts.depth)
        return cls(
            paths.accepted_counts.numpy(),
            paths.bonus_tokens.numpy(),
            paths.accepted_tokens.numpy(),
            host["counts"],
            host["log_probs"],
        )


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
            TargetCache(verifier.pool, verifier.projection),
            lambda buffers: steps.captured(buffers.size),
        )
        self._laps = Laps(verifier.target.device)
        self._parts: dict[StepSize, RoundParts] = {}
        self._outcomes: dict[StepSize, _Outcome] = {}
        places = sorted({size.places for size in steps.sizes})
        nodes = sorted({size.nodes for size in steps.sizes})
        self.sizes = RoundSizes(tuple(places), tuple(nodes), {})

    def prepare(self, on_progress: Callable[[StepSize], None] | None = None, repeats: int = 5) -> None:
        """Capture every size and time a round of it; the target's steps are captured already."""
        for size in sorted(self._steps.sizes, key=lambda size: -size.rows):
            parts = RoundParts(self._steps.buffers[size], self._stages, self._maker)
            self._parts[size], self._outcomes[size] = parts, _Outcome.of(parts, size.places)
            self.sizes.ms[(size.places, size.nodes)] = self._time(size, repeats)
            if on_progress is not None:
                on_progress(size)

    @torch.inference_mode()
    def run(self, request: RoundRequest) -> RoundResult:
        """Do one round; sequences whose sessions are gone take no part in it."""
        self._verifier.sessions.expire()
        self._drafter.sessions.expire()
        status, draft_status = np.zeros((2, len(request.sessions)), dtype=np.int32)
        taking = self._find(request, status, draft_status)
        if not taking.sessions:
            return _nothing(request, status, min(self._stages.block_size - 1, request.nodes))
        size = self._steps.size_for(len(taking.sessions), request.nodes)
        assert size is not None, "a round has one of the sizes that `sizes` tells"
        roots = taking.among(request.root_tokens).tolist()
        self._fill(size, request, taking, roots)
        self._parts[size].play(self._laps)
        outcome = self._outcomes[size]
        self._commit(taking, roots, outcome, status)
        count = len(status)
        return RoundResult(
            status=torch.from_numpy(status),
            draft_status=torch.from_numpy(draft_status),
            accepted_tokens=taking.spread(outcome.accepted_tokens, count),
            accepted_counts=taking.spread(outcome.accepted_counts, count),
            bonus_tokens=taking.spread(outcome.bonus_tokens, count),
            node_counts=taking.spread(outcome.node_counts, count),
            path_log_probs=taking.spread(outcome.log_probs, count, absent=-np.inf),
            stage_ms={"draft": 0.0, "build_tree": 0.0, **self._laps.ms()},
        )

    def _find(
        self, request: RoundRequest, status: NDArray[np.int32], draft_status: NDArray[np.int32]
    ) -> _Taking:
        """Look all sequences up; says in `status` and `draft_status`, `[S]`, whose sessions are gone."""
        taking = _Taking()
        rows, epochs = verify_batch.session_rows(request.sessions), request.draft_epochs.tolist()
        find, find_draft = self._verifier.sessions.find, self._drafter.sessions.find
        for index, (row, epoch) in enumerate(zip(rows, epochs, strict=True)):
            session = find(*row)
            if session is None:
                status[index] = Status.SESSION_LOST
                continue
            assert session.sampler is None, "only the largest logit decides here"
            draft = None
            if epoch != NO_DRAFTER:
                draft = find_draft(row[0], epoch, row[2])
                if draft is None:
                    draft_status[index] = Status.SESSION_LOST
            taking.indices.append(index)
            taking.sessions.append(session)
            taking.drafts.append(draft)
        return taking

    def _fill(self, size: StepSize, request: RoundRequest, taking: _Taking, roots: Sequence[int]) -> None:
        buffers = self._steps.buffers[size]
        buffers.clear()
        buffers.put(taking.sessions, roots)
        wishes = TreeWishes(
            *(taking.among(wish) for wish in (request.budgets, request.depths, request.is_chain))
        )
        buffers.put_drafters(taking.drafts, wishes)

    def _commit(
        self, taking: _Taking, roots: Sequence[int], outcome: _Outcome, status: NDArray[np.int32]
    ) -> None:
        """Note what the round committed in both session tables; says in `status` who could not take it."""
        commit, commit_draft = self._verifier.sessions.commit, self._drafter.sessions.commit
        # As lists at once: taking numbers out of an array one by one is most of what this costs.
        counts, tokens = outcome.accepted_counts.tolist(), outcome.accepted_tokens.tolist()
        for place, session in enumerate(taking.sessions):
            ids = [roots[place], *tokens[place][: counts[place]]]
            if (failed := commit(session, ids)) is not Status.OK:
                status[taking.indices[place]] = failed
            if (draft := taking.drafts[place]) is not None:
                commit_draft(draft, ids)

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
        everywhere = np.ones(size.places, dtype=np.int32)
        deepest = everywhere * (self._stages.block_size - 1)
        buffers.put([target] * size.places, [0] * size.places)
        buffers.put_drafters(
            [draft] * size.places, TreeWishes(everywhere * size.nodes, deepest, everywhere == 0)
        )
        samples = []
        for _ in range(repeats + 1):
            self._parts[size].play(self._laps)
            samples.append(sum(self._laps.ms().values()))
        for pool, pages in zip(pools, held, strict=True):
            if pages is not None:
                pool.release(pages)
        return statistics.median(samples[1:])


def _nothing(request: RoundRequest, status: NDArray[np.int32], depth: int) -> RoundResult:
    """The result of a round that nobody could take part in."""
    none = torch.zeros(len(status), dtype=torch.int32)
    return RoundResult(
        status=torch.from_numpy(status),
        draft_status=none,
        accepted_tokens=torch.zeros((len(status), depth), dtype=torch.int32),
        accepted_counts=none,
        bonus_tokens=none,
        node_counts=none,
        path_log_probs=torch.full((len(status), request.nodes), -torch.inf),
        stage_ms={"draft": 0.0, "build_tree": 0.0, "verify": 0.0},
    )
