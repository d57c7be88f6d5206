"""Spans of a real Triton at an OTLP receiver: the caller's trace, Triton's span, ours, and one a stage."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpc

from ddtree.text import TextCodec
from ddtree_local.server import LocalTriton
from tests.deploy.prometheus.collector import Collector, Span
from tests.triton.echo_server import Stream, flags, ints, text
from tests.triton.oracle_server import OracleServer, TinyPair, make_repository

pytestmark = pytest.mark.triton

REQUEST = "ddtree.request"
STAGES = {
    "ddtree.queue",
    "ddtree.prefill",
    "ddtree.draft",
    "ddtree.build_tree",
    "ddtree.verify",
    "ddtree.commit",
}
PATTERN = "--grpc-header-forward-pattern=traceparent|tracestate"


TRITON_REQUEST = "InferRequest"


def triton_tracing(url: str) -> tuple[str, ...]:
    return ("--trace-config", "mode=opentelemetry", "--trace-config", f"opentelemetry,url={url}/v1/traces",
            "--trace-config", "rate=1", "--trace-config", "level=TIMESTAMPS")  # fmt: skip


def ask(server: OracleServer) -> tuple[str, str]:
    """One request within a trace; gives its id and the caller's span."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    with grpc.InferenceServerClient(server.triton.grpc_url) as client:
        stream = Stream(client)
        stream.open(headers={"traceparent": f"00-{trace_id}-{span_id}-01"})
        tensors = {
            "text_input": text("ab"),
            "max_tokens": ints(24),
            "tree_budget": ints(8),
            "ignore_eos": flags(True),
        }
        stream.ask(tensors, request_id="traced")
        client.stop_stream()
    return trace_id, span_id


@pytest.mark.parametrize(
    "has_triton_tracing", [True, False], ids=["triton-opentelemetry", "forwarded-header"]
)
def test_a_request_is_one_span_of_its_callers_trace(
    has_triton_tracing: bool, tmp_path: Path, project_root: Path, observability_pair: TinyPair
) -> None:
    repository = make_repository(tmp_path / "models", project_root / "model_repository", "in_process")
    with Collector() as collector:
        environment = observability_pair.environment("in_process") | {
            "DDTREE_TRACING": "otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        arguments = triton_tracing(collector.url) if has_triton_tracing else (PATTERN,)
        with LocalTriton(
            repository,
            env=environment,
            log_path=tmp_path / "log",
            extra_args=arguments,
            load_models=["ddtree"],
        ) as triton:
            codec = TextCodec.from_folder(observability_pair.target)
            reference: Any = None  # no test here looks at tokens
            server = OracleServer(triton, "in_process", repository, codec, reference)
            trace_id, caller = ask(server)
            ours = [span for span in collector.wait_for(trace_id, REQUEST) if span.service == "ddtree"]
            report = triton.stop()
        spans = collector.wait_for(trace_id, TRITON_REQUEST if has_triton_tracing else REQUEST)
    assert (report.exit_code, report.forced) == (0, False)
    assert {span.name for span in ours} == {REQUEST, *STAGES}
    (request,) = (span for span in ours if span.name == REQUEST)
    assert {span.parent_id for span in ours if span is not request} == {request.span_id}
    assert request.attributes["ddtree.output_tokens"] == 24
    assert request.attributes["ddtree.outcome"] == "completed"
    parents = ancestors(spans, request)
    assert parents[-1] == caller
    # Triton's spans, none of ours, stand between the caller and us.
    assert (len(parents) > 1) == has_triton_tracing


def ancestors(spans: list[Span], span: Span) -> list[str]:
    """Ids of a span's parent, its parent, and so on, up to the one that nobody here made."""
    by_id = {each.span_id: each for each in spans if each.service != "ddtree"}
    chain = [span.parent_id]
    while chain[-1] in by_id:
        chain.append(by_id[chain[-1]].parent_id)
    return chain
