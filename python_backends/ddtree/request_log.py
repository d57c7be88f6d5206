"""One log line for every request at its end: how it ended and what it took. No text, no token ids."""

from __future__ import annotations

import logging
import time

from ddtree.events import Emitted, Event, RequestArrived, RequestEnded, RequestWatch, SequenceQueued
from ddtree.live import Live

_LOG = logging.getLogger(__name__)
_LEVELS = {
    "unavailable": logging.WARNING,
    "overloaded": logging.WARNING,
    "failed": logging.ERROR,
    "stop_order": logging.DEBUG,  # a watchdog sends one every two seconds; who was stopped has a line anyway
}


class RequestLog:
    """Hears events, writes the log."""

    def __init__(self) -> None:
        self._rows: dict[RequestWatch, list[Live]] = {}
        self._first_token_s: dict[RequestWatch, float] = {}

    def __call__(self, event: Event) -> None:
        """Note an event."""
        if isinstance(event, Emitted):
            if event.delta.token_ids and event.live.request in self._rows:
                self._first_token_s.setdefault(event.live.request, time.perf_counter())
        elif isinstance(event, RequestArrived):
            self._rows[event.request] = []
        elif isinstance(event, SequenceQueued):
            self._rows[event.live.request].append(event.live)
        elif isinstance(event, RequestEnded):
            self._write(event)

    def _write(self, event: RequestEnded) -> None:
        request = event.request
        stats = [live.sequence.stats for live in self._rows.pop(request)]
        first_s = self._first_token_s.pop(request, None)
        fields = {
            "request_id": request.request_id,
            "outcome": event.outcome,
            "cause": event.cause or "",
            "reason": event.error,
            "seconds": round(time.perf_counter() - request.arrived_s, 4),
            "first_token_seconds": "" if first_s is None else round(first_s - request.arrived_s, 4),
            "sequences": len(stats),
            "prompt_tokens": sum(each.prompt_tokens for each in stats),
            "output_tokens": sum(each.emitted_tokens for each in stats),
            "rounds": sum(each.rounds for each in stats),
            "draft_tokens": sum(each.draft_tokens for each in stats),
            "accepted_tokens": sum(each.accepted_tokens for each in stats),
        }
        _LOG.log(_LEVELS.get(event.outcome, logging.INFO), "a request ended", extra=fields)
