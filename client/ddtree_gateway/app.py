"""The service: its paths, and the parts behind them put together. Wiring only."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import GaugeMetricFamily
from starlette.exceptions import HTTPException

from ddtree_client.metrics import ClientMetrics
from ddtree_gateway.answers import ChatWriter, CompletionWriter
from ddtree_gateway.endpoints import Endpoints
from ddtree_gateway.errors import ApiError
from ddtree_gateway.generation import Generation
from ddtree_gateway.guard import ApiKeys, Guard
from ddtree_gateway.options import chat_order, completion_order
from ddtree_gateway.schema import ChatRequest, CompletionRequest
from ddtree_gateway.settings import Settings
from ddtree_gateway.streaming import GenerationResponse
from ddtree_gateway.tenancy import apart

_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request breaks a rule; `error.param` names the parameter."},
    401: {"description": "No valid key."},
    404: {"description": "No such model."},
    413: {"description": "The body is too large."},
    429: {"description": "The servers are full; see `Retry-After`."},
    503: {"description": "No server is ready; see `Retry-After`."},
    504: {"description": "No answer within the deadline."},
}


def create_app(settings: Settings) -> FastAPI:
    """Make the service.

    Raises:
        SettingsError: a setting cannot be used.
    """
    keys = None if settings.api_keys is None else ApiKeys(settings.api_keys)
    metrics = ClientMetrics()
    endpoints = Endpoints(settings)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await endpoints.start()
        try:
            yield
        finally:
            await endpoints.stop()

    # No pages of documentation: they would load scripts from elsewhere.
    app = FastAPI(title="DDTree gateway", version="0.1.0", lifespan=lifespan, docs_url=None, redoc_url=None)
    metrics.registry.register(_EndpointNumbers(endpoints))
    _add_generation(app, settings, endpoints, metrics)
    _add_models(app, settings)
    _add_operation(app, endpoints, metrics)
    _add_errors(app)
    app.add_middleware(Guard, keys=keys, max_body_bytes=settings.max_body_bytes, registry=metrics.registry)
    return app


def _add_generation(app: FastAPI, settings: Settings, endpoints: Endpoints, metrics: ClientMetrics) -> None:
    @app.post("/v1/chat/completions", responses=_ERRORS, response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        order = apart(chat_order(body, settings), _tenant(request))
        return GenerationResponse(order, Generation(order, endpoints, metrics), ChatWriter)

    @app.post("/v1/completions", responses=_ERRORS, response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        order = apart(completion_order(body, settings), _tenant(request))
        return GenerationResponse(order, Generation(order, endpoints, metrics), CompletionWriter)


def _tenant(request: Request) -> bytes | None:
    """The digest of the caller's key, as the guard noted it."""
    tenant: bytes | None = getattr(request.state, "tenant", None)
    return tenant


def _add_models(app: FastAPI, settings: Settings) -> None:
    started = int(time.time())

    def entry(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": started, "owned_by": "ddtree"}

    @app.get("/v1/models", response_model=None)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry(name) for name in settings.names]}

    @app.get("/v1/models/{model:path}", responses={404: _ERRORS[404]}, response_model=None)
    async def model(model: str) -> dict[str, Any]:
        if model not in settings.names:
            message = f"there is no model {model!r} here; there is {', '.join(settings.names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return entry(model)


def _add_operation(app: FastAPI, endpoints: Endpoints, metrics: ClientMetrics) -> None:
    @app.get("/health", responses={503: _ERRORS[503]}, response_model=None)
    async def health() -> JSONResponse:
        servers = [
            {"address": each.client.address, "ready": each.is_ready, "in_flight": each.in_flight}
            for each in endpoints.all
        ]
        status = 200 if endpoints.is_ready else 503
        return JSONResponse(
            {"status": "ok" if endpoints.is_ready else "unavailable", "servers": servers}, status
        )

    @app.get("/live", response_model=None)
    async def live() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", response_model=None)
    async def numbers() -> Response:
        return PlainTextResponse(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError), "registered for nothing else"
        return JSONResponse(error.body, error.status, headers=dict(error.headers))

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError), "registered for nothing else"
        wrong = _as_api_error(error)
        return JSONResponse(wrong.body, wrong.status)

    @app.exception_handler(HTTPException)
    async def http(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException), "registered for nothing else"
        answer = ApiError(error.status_code, str(error.detail))
        return JSONResponse(answer.body, answer.status, headers=error.headers)


def _as_api_error(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong, without the value: it may be anything, and long."""
    first = error.errors()[0]
    # ("body", "temperature") or, of a union, ("body", "prompt", "list[str]", 0, …): the kind is no name.
    where = [part for part in first["loc"][1:] if isinstance(part, int) or part.isidentifier()]
    param = str(where[0]) if where else None
    if first["type"] == "extra_forbidden":
        return ApiError(
            400, f"{param} is no parameter of this endpoint", param=param, code="unknown_parameter"
        )
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is no JSON", code="invalid_json")
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".")
    return ApiError(400, f"{place or 'the body'}: {first['msg']}", param=param, code="invalid_value")


class _EndpointNumbers:
    """Gauges of the servers, read when somebody asks."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints

    def collect(self) -> list[GaugeMetricFamily]:
        """Give the families, for prometheus-client."""
        ready = GaugeMetricFamily(
            "ddtree_gateway_endpoint_ready", "1 when the server takes requests", labels=["endpoint"]
        )
        busy = GaugeMetricFamily(
            "ddtree_gateway_endpoint_in_flight", "Requests this gateway has there", labels=["endpoint"]
        )
        for endpoint in self._endpoints.all:
            ready.add_metric([endpoint.client.address], float(endpoint.is_ready))
            busy.add_metric([endpoint.client.address], float(endpoint.in_flight))
        return [ready, busy]
