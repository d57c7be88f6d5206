"""The trace that a request belongs to, as Triton knows it.

Triton's own tracing in OpenTelemetry mode puts its span between the caller and us and hands the context on
(tried with 24.10, gRPC and HTTP). Without it, a server whose `--grpc-header-forward-pattern` fits
`traceparent` gives us the caller's header as a parameter of the request; HTTP's `generate` forwards none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_HEADERS = ("traceparent", "tracestate")


def trace_context_of(request: Any) -> Mapping[str, str]:
    """W3C headers of a Triton request; empty when it belongs to no trace."""
    trace = request.trace()
    context = trace.get_context() if trace is not None else None
    carrier = json.loads(context or request.parameters() or "{}")
    return {name: carrier[name] for name in _HEADERS if isinstance(carrier.get(name), str)}
