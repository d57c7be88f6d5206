"""Spans of requests over a real engine, kept in memory, and how tracing is switched on and off."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

from ddtree.engine import Engine
from ddtree.errors import ConfigError
from ddtree.events import Event, Outcome, RequestArrived, RequestEnded, RequestWatch, SessionLost, StageCalled
from ddtree.params import GenerationParams
from ddtree.tracing import Tracing, open_tracing
from tests.fakes.collecting_sink import CollectingSink
from tests.fakes.pipeline import make_oracle, make_verifier, running_engine
from tests.fakes.tiny_models import make_target

STAGES = {"queue", "prefill", "draft", "build_tree", "verify", "commit"}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


class _Spans:
    """Tracing whose spans stay here."""

    def __init__(self, **options: object) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(**options)  # type: ignore[arg-type]
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(provider)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def children(self, parent: ReadableSpan) -> dict[str, ReadableSpan]:
        assert parent.context is not None
        return {
            span.name.removeprefix("ddtree."): span
            for span in self.exporter.get_finished_spans()
            if span.parent is not None and span.parent.span_id == parent.context.span_id
        }


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


async def _request(
    engine: Engine, observe: Tracing, watch: RequestWatch, rows: int = 1, max_tokens: int = 24
) -> list[CollectingSink]:
    observe(RequestArrived(watch))
    sinks = [CollectingSink() for _ in range(rows)]
    params = [
        GenerationParams((row + 1, 2, 3), max_tokens=max_tokens, tree_budget=8, ignore_eos=True)
        for row in range(rows)
    ]
    await asyncio.gather(
        *(engine.generate(each, sink, watch) for each, sink in zip(params, sinks, strict=True))
    )
    observe(RequestEnded(watch, "completed"))
    return sinks


async def test_one_span_a_request_and_a_child_a_stage(target: Path) -> None:
    spans = _Spans()
    watches = [RequestWatch("a", {"traceparent": f"00-{TRACE}-{PARENT}-01"}), RequestWatch("b")]
    async with running_engine(
        make_verifier(target), make_oracle(target, noise=0.5), target, observe=spans.tracing
    ) as engine:
        (sinks_a, sinks_b) = await asyncio.gather(
            _request(engine, spans.tracing, watches[0]), _request(engine, spans.tracing, watches[1], rows=2)
        )
    requests = {
        str((span.attributes or {})["ddtree.request_id"]): span for span in spans.named("ddtree.request")
    }
    assert set(requests) == {"a", "b"}
    for name, sinks in (("a", sinks_a), ("b", sinks_b)):
        span = requests[name]
        children = spans.children(span)
        assert set(children) == STAGES
        stats = [sink.stats for sink in sinks if sink.stats is not None]
        attributes = span.attributes or {}
        assert attributes["ddtree.outcome"] == "completed"
        assert attributes["ddtree.output_tokens"] == 24 * len(sinks)
        assert attributes["ddtree.rounds"] == sum(each.rounds for each in stats)
        assert attributes["ddtree.accepted_tokens"] == sum(each.accepted_tokens for each in stats)
        assert span.start_time is not None
        assert span.end_time is not None
        length_ms = (span.end_time - span.start_time) / 1e6
        busy_ms = 0.0
        for stage, child in children.items():
            assert child.start_time is not None
            assert child.end_time is not None
            assert span.start_time <= child.start_time <= child.end_time <= span.end_time, stage
            busy_ms += float((child.attributes or {})["ddtree.busy_ms"])  # type: ignore[arg-type]
        # The stages of a round follow one another, so together they cannot be longer than the request.
        assert 0 < busy_ms <= length_ms
        calls = {stage: str((child.attributes or {})["ddtree.calls"]) for stage, child in children.items()}
        assert calls["verify"] == calls["draft"] == calls["commit"]
        assert int(calls["verify"]) >= max(each.rounds for each in stats)
        assert calls["queue"] == "1"
    parent, context = requests["a"].parent, requests["a"].context
    assert parent is not None
    assert context is not None
    assert (format(context.trace_id, "032x"), format(parent.span_id, "016x")) == (TRACE, PARENT)
    assert requests["b"].parent is None
    assert not spans.tracing._open


async def test_no_text_and_no_ids_of_tokens_in_a_span(target: Path) -> None:
    spans = _Spans()
    async with running_engine(
        make_verifier(target), make_oracle(target, noise=0.5), target, observe=spans.tracing
    ) as engine:
        await _request(engine, spans.tracing, RequestWatch("a"))
    for span in spans.exporter.get_finished_spans():
        assert all(isinstance(value, int | float | str) for value in (span.attributes or {}).values())
        words = {key: value for key, value in (span.attributes or {}).items() if isinstance(value, str)}
        assert words == ({"ddtree.request_id": "a", "ddtree.outcome": "completed"} if not span.parent else {})


async def test_a_lost_session_is_noted_in_the_span(target: Path) -> None:
    spans = _Spans()
    verifier = make_verifier(target)

    def observe(event: Event) -> None:
        spans.tracing(event)
        if isinstance(event, StageCalled) and event.operation == "build_tree" and not losses:
            losses.append(1)
            verifier.release([session.session_id for session in verifier.sessions])

    losses: list[int] = []
    async with running_engine(verifier, make_oracle(target, noise=0.5), target, observe=observe) as engine:
        await _request(engine, spans.tracing, RequestWatch("a"))
    (span,) = spans.named("ddtree.request")
    assert [(event.name, (event.attributes or {})["ddtree.stage"]) for event in span.events] == [
        ("session lost", "target_verifier")
    ]


def test_a_failure_is_an_error_and_a_refusal_is_not() -> None:
    spans = _Spans()
    outcomes: tuple[Outcome, ...] = ("unavailable", "invalid")
    for outcome in outcomes:
        watch = RequestWatch(outcome)
        spans.tracing(RequestArrived(watch))
        spans.tracing(RequestEnded(watch, outcome, error="gone" * (outcome == "unavailable")))
    failed, refused = spans.named("ddtree.request")
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "gone")
    assert refused.status.status_code == StatusCode.UNSET


async def test_what_the_sampler_leaves_out_costs_nothing(target: Path) -> None:
    spans = _Spans(sampler=ALWAYS_OFF)
    async with running_engine(
        make_verifier(target), make_oracle(target, noise=0.5), target, observe=spans.tracing
    ) as engine:
        await _request(engine, spans.tracing, RequestWatch("a"))
    assert not spans.exporter.get_finished_spans()
    spans.tracing(RequestArrived(RequestWatch("b")))
    assert not spans.tracing._open


@pytest.mark.parametrize("value", ["", "off", " Off "])
def test_off_imports_nothing(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    assert open_tracing({"DDTREE_TRACING": value}) is None
    assert not [name for name in sys.modules if name.startswith("opentelemetry")]


def test_an_unknown_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="DDTREE_TRACING must be one of off, otlp, got 'jaeger'"):
        open_tracing({"DDTREE_TRACING": "jaeger"})


def test_a_missing_package_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"install ddtree-serving\[tracing\]"):
        open_tracing({"DDTREE_TRACING": "otlp"})


def test_on_sends_where_opentelemetry_says() -> None:
    tracing = open_tracing({"DDTREE_TRACING": "otlp"})
    assert tracing is not None
    assert isinstance(tracing, Tracing)
    tracing.close()


def test_events_of_requests_that_are_not_traced_are_passed_over() -> None:
    spans = _Spans()
    watch = RequestWatch()
    spans.tracing(RequestEnded(watch, "completed"))
    spans.tracing(SessionLost(_Unknown(watch), "drafter"))  # type: ignore[arg-type]
    assert not spans.exporter.get_finished_spans()


class _Unknown:
    def __init__(self, request: RequestWatch) -> None:
        self.request = request
