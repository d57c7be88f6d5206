"""What finished rounds took and gave: learnt for the choice of how much to draft, and told to who observes.

Nobody's tokens wait for it, so it is taken in plain numbers that stay true until then. Knows neither stages
nor callers.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddtree import events
from ddtree.live import Live
from ddtree.resident import ResidentRound, ResidentRounds
from ddtree.round_cost import FinishedRound, RoundCost


class RoundAccounts:
    """Takes rounds one after another."""

    def __init__(self, cost: RoundCost, resident: ResidentRounds | None, observe: events.Observe) -> None:
        self._cost = cost
        self._resident = resident
        self._observe = observe

    def note(
        self,
        batch: Sequence[Live],
        drafting: Sequence[Live],
        counts: Sequence[int],
        emitted: int,
        commit_ms: float,
        watch: events.StopWatch,
    ) -> None:
        """A round of calls: `[S]` draft nodes verified, tokens emitted in all, and milliseconds."""
        nodes, ms = sum(counts), watch.ms
        plain_ms = self._cost.plain_ms(len(batch)) + ms["commit"]
        self._cost.observe(
            FinishedRound(
                len(batch),
                len(drafting),
                nodes,
                draft_ms=ms["draft"],
                build_ms=ms["build_tree"],
                verify_ms=ms["verify"],
            )
        )
        record = events.RoundRecord(len(batch), nodes, emitted, commit_ms, plain_ms, ms, watch.started_s)
        self._observe(events.RoundDone(batch, drafting, counts, record))

    def note_resident(
        self,
        batch: Sequence[Live],
        done: ResidentRound,
        counts: Sequence[int],
        emitted: int,
        watch: events.StopWatch,
    ) -> None:
        """A round on one device."""
        assert self._resident is not None, "somebody ran it"
        plain_ms = self._resident.choice.plain_ms(len(batch)) + watch.ms["commit"]
        stage_ms = {**done.stage_ms(watch.ms["verify"]), "commit": watch.ms["commit"]}
        record = events.RoundRecord(
            len(batch), sum(counts), emitted, 0.0, plain_ms, stage_ms, watch.started_s, is_whole=True
        )
        self._observe(events.RoundDone(batch, done.drafting, counts, record))
