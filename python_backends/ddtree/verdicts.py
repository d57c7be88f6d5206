"""What a sequence does with what the verifier said of it: go on, start again, wait, or end.

Knows sequences and the scheduler; no stage is called from here.
"""

from __future__ import annotations

import logging

import torch

from ddtree import events
from ddtree.departures import Departures
from ddtree.errors import DDTreeError, InvalidArgument, Unavailable
from ddtree.live import Live
from ddtree.log_probs import read
from ddtree.scheduler import Scheduler
from ddtree.stages.base import TARGET_VERIFIER
from ddtree.types import Status

_LOG = logging.getLogger(__name__)
_MAX_RECOVERIES = 3


class Verdicts:
    """Applies a verdict to one sequence at a time; what fails ends that sequence and no other."""

    def __init__(self, scheduler: Scheduler, departures: Departures, observe: events.Observe) -> None:
        self._scheduler = scheduler
        self._departures = departures
        self._observe = observe

    def is_held(self, live: Live, status: int) -> bool:
        """Whether the verifier has the sequence's session; if not, the sequence starts again or ends."""
        if status == Status.OK:
            return True
        try:
            if status == Status.POOL_FULL:
                self._scheduler.postpone(live, others_ended=self._departures.hold_pages)
                self._observe(events.Preempted(live))
            elif status == Status.GRAMMAR_FAILED:
                raise InvalidArgument("the grammar became too complex to follow; bound its repetitions")
            elif status == Status.SAMPLER_FAILED:
                raise Unavailable("the next token could not be chosen; the log of target_verifier says why")
            elif status == Status.UNSUPPORTED:
                raise InvalidArgument(
                    "penalties, logit_bias, bad_words, min_p, min_tokens, log-probs and grammars need the "
                    "tree verifier, which does not run with the installed TensorRT-LLM; leave them out"
                )
            elif live.recoveries == _MAX_RECOVERIES:
                raise Unavailable(
                    f"the verifier lost the session {_MAX_RECOVERIES + 1} times in a row; "
                    f"{self._scheduler.retry_hint()}"
                )
            else:
                _LOG.warning("a session was lost by the verifier, opening it again", extra=live.log_fields)
                live.reopen()
                self._observe(events.SessionLost(live, TARGET_VERIFIER))
        except DDTreeError as error:
            self._departures.fail([live], error)
        return False

    def append(self, live: Live, tokens: list[int], draft_tokens: int | None, log_probs: torch.Tensor) -> int:
        """Add a round's tokens and what is known of them, `[tokens or 0, width]`; gives how many it kept."""
        try:
            entries = read(log_probs, live.sequence.params.sampling)
            delta = live.sequence.append(tokens, draft_tokens, entries)
        except Exception as error:  # noqa: BLE001 - one sequence's text must not touch the others
            self._departures.fail_one(live, error)
            return 0
        self._departures.emit(live, delta)
        return len(delta.token_ids)
