"""A receiver of OTLP spans over HTTP: what a tracing backend would get."""

from __future__ import annotations

import gzip
import json
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

_ARRIVAL_S = 20.0


@dataclass(frozen=True)
class Span:
    """One span."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]


class Collector:
    """Listens on a free port of loopback, as a context manager."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._lock = threading.Lock()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                is_json = self.headers.get("Content-Type", "").startswith("application/json")
                collector.take(_from_json(body) if is_json else _from_protobuf(body))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take(self, spans: list[Span]) -> None:
        """Keep what a server sent."""
        with self._lock:
            self._spans += spans

    def wait_for(self, trace_id: str, name: str) -> list[Span]:
        """All spans of a trace, once one of this name is there."""
        deadline = time.monotonic() + _ARRIVAL_S
        while time.monotonic() < deadline:
            with self._lock:
                spans = [span for span in self._spans if span.trace_id == trace_id]
            if any(span.name == name for span in spans):
                return spans
            time.sleep(0.1)
        raise AssertionError(f"no span {name} of trace {trace_id} within {_ARRIVAL_S:g} s: {self._spans}")


def _from_protobuf(body: bytes) -> list[Span]:
    """What OpenTelemetry's Python exporter sends."""
    spans = []
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        about = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                values = {
                    pair.key: getattr(pair.value, str(pair.value.WhichOneof("value")))
                    for pair in span.attributes
                }
                spans.append(Span(about.get("service.name", ""), span.name, *ids, values))
    return spans


def _from_json(body: bytes) -> list[Span]:
    """What Triton's C++ exporter sends; attributes are not read."""
    spans = []
    for resource in json.loads(body)["resourceSpans"]:
        pairs = resource.get("resource", {}).get("attributes", [])
        about = {pair["key"]: pair["value"].get("stringValue", "") for pair in pairs}
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                ids = (span["traceId"], span["spanId"], span.get("parentSpanId", ""))
                spans.append(Span(about.get("service.name", ""), span["name"], *ids, {}))
    return spans
