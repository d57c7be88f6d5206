"""Traces: one OpenTelemetry span for a request and a child for each stage that worked for it.

A round serves many requests at once and a request takes hundreds of rounds, so a child stands for all the
time that a stage spent in the request's rounds: it begins with the first and ends with the last,
`ddtree.busy_ms` says how long it worked and `ddtree.calls` how often.

Off unless DDTREE_TRACING=otlp. Where spans go is then said by OpenTelemetry's own variables
(OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME, …). Only then is OpenTelemetry imported:
install ddtree-serving[tracing]. Knows requests and stages, not Triton.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddtree.errors import ConfigError
from ddtree.events import (
    Event,
    Prefilled,
    RequestArrived,
    RequestEnded,
    RequestWatch,
    RoundDone,
    SequenceQueued,
    SessionLost,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from ddtree.live import Live

_VARIABLE = "DDTREE_TRACING"
_CHOICES = ("off", "otlp")
_FAILED = frozenset({"overloaded", "unavailable", "failed"})


def open_tracing(environment: Mapping[str, str]) -> Tracing | None:
    """Tracing as the environment asks for it; None when it is off.

    Raises:
        ConfigError: the variable has another value, or OpenTelemetry is not installed.
    """
    choice = environment.get(_VARIABLE, "").strip().lower() or "off"
    if choice not in _CHOICES:
        raise ConfigError(f"{_VARIABLE} must be one of {', '.join(_CHOICES)}, got {choice!r}")
    if choice == "off":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"{_VARIABLE}=otlp needs OpenTelemetry, which is not installed ({error}); install "
            "ddtree-serving[tracing] into the interpreter of Triton's stub, or set it to off"
        ) from error
    provider = TracerProvider(
        resource=Resource.create({} if "OTEL_SERVICE_NAME" in environment else _SERVICE)
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)


_SERVICE = {"service.name": "ddtree"}


@dataclass
class _StageTime:
    """All the time a stage spent on a request."""

    first_s: float
    last_s: float = 0.0
    busy_s: float = 0.0
    calls: int = 0

    def add(self, started_s: float, seconds: float) -> None:
        self.last_s = max(self.last_s, started_s + seconds)
        self.busy_s += seconds
        self.calls += 1


@dataclass
class _Open:
    """A request whose span is open."""

    span: Span
    offset_ns: int  # from `perf_counter` to the epoch
    queued_s: float = 0.0
    rows: list[Live] = field(default_factory=list)
    stages: dict[str, _StageTime] = field(default_factory=dict)

    def at(self, seconds: float) -> int:
        """A moment of `perf_counter` as nanoseconds since the epoch."""
        return self.offset_ns + int(seconds * 1e9)

    def spend(self, stage: str, started_s: float, seconds: float) -> None:
        self.stages.setdefault(stage, _StageTime(started_s)).add(started_s, seconds)


class Tracing:
    """Hears events, makes spans."""

    def __init__(self, provider: TracerProvider) -> None:
        """Take the provider, whose exporter gets the spans."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("ddtree")
        self._propagator = TraceContextTextMapPropagator()
        self._open: dict[RequestWatch, _Open] = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            RequestArrived: self._arrived,
            SequenceQueued: self._queued,
            Prefilled: self._prefilled,
            RoundDone: self._round_done,
            SessionLost: self._lost,
            RequestEnded: self._ended,
        }

    def __call__(self, event: Event) -> None:
        """Note an event."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _arrived(self, event: RequestArrived) -> None:
        request = event.request
        offset_ns = time.time_ns() - time.perf_counter_ns()
        span = self._tracer.start_span(
            "ddtree.request",
            context=self._propagator.extract(dict(request.trace_context)),
            start_time=offset_ns + int(request.arrived_s * 1e9),
            attributes={"ddtree.request_id": request.request_id},
        )
        if span.is_recording():  # the others were left out by the sampler
            self._open[request] = _Open(span, offset_ns)

    def _queued(self, event: SequenceQueued) -> None:
        opened = self._open.get(event.live.request)
        if opened is not None:
            opened.rows.append(event.live)
            opened.queued_s = opened.queued_s or time.perf_counter()

    def _prefilled(self, event: Prefilled) -> None:
        for opened in self._requests_of(event.batch):
            if "queue" not in opened.stages:
                opened.spend("queue", opened.queued_s, event.started_s - opened.queued_s)
            opened.spend("prefill", event.started_s, event.seconds)

    def _round_done(self, event: RoundDone) -> None:
        for opened in self._requests_of(event.batch):
            started_s = event.record.started_s
            for stage, ms in event.record.stage_ms.items():
                opened.spend(stage, started_s, ms / 1e3)
                started_s += ms / 1e3

    def _lost(self, event: SessionLost) -> None:
        opened = self._open.get(event.live.request)
        if opened is not None:
            opened.span.add_event("session lost", {"ddtree.stage": event.stage})

    def _ended(self, event: RequestEnded) -> None:
        opened = self._open.pop(event.request, None)
        if opened is None:
            return
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        parent = set_span_in_context(opened.span)
        for stage, spent in opened.stages.items():
            child = self._tracer.start_span(
                f"ddtree.{stage}",
                context=parent,
                start_time=opened.at(spent.first_s),
                attributes={"ddtree.busy_ms": round(spent.busy_s * 1e3, 3), "ddtree.calls": spent.calls},
            )
            child.end(opened.at(spent.last_s))
        stats = [live.sequence.stats for live in opened.rows]
        opened.span.set_attributes(
            {
                "ddtree.outcome": event.outcome,
                "ddtree.sequences": len(stats),
                "ddtree.prompt_tokens": sum(each.prompt_tokens for each in stats),
                "ddtree.output_tokens": sum(each.emitted_tokens for each in stats),
                "ddtree.rounds": sum(each.rounds for each in stats),
                "ddtree.draft_tokens": sum(each.draft_tokens for each in stats),
                "ddtree.accepted_tokens": sum(each.accepted_tokens for each in stats),
            }
        )
        if event.outcome in _FAILED:
            opened.span.set_status(Status(StatusCode.ERROR, event.error))
        opened.span.end()

    def _requests_of(self, batch: Sequence[Live]) -> list[_Open]:
        """Open requests of a batch, each once however many rows it has there."""
        if not self._open:
            return []
        requests = dict.fromkeys(live.request for live in batch)
        return [opened for request in requests if (opened := self._open.get(request)) is not None]
