"""What stands before the endpoints: bearer keys, the limit of bodies, and the count of what was answered.

Plain ASGI, since streams pass through. Knows no request's meaning, and never logs a key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ddtree_gateway.errors import ApiError
from ddtree_gateway.settings import SettingsError

_LOG = logging.getLogger(__name__)
_PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/models")


class ApiKeys:
    """The keys in a file, one a line, `#` begins a comment; read again when the file changes.

    Raises:
        SettingsError: the file cannot be read or holds no key.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._mark()
        self._digests = self._read()

    def tenant(self, key: str) -> bytes | None:
        """The digest of one of the keys, None for any other; the time does not say how nearly it is one."""
        self._refresh()
        digest = _digest(key)
        # Every key is compared: which one fits, and after how many, must not show.
        is_known = sum([hmac.compare_digest(digest, each) for each in self._digests]) > 0
        return digest if is_known else None

    def _refresh(self) -> None:
        mark = self._mark()
        if mark == self._seen:
            return
        self._seen = mark
        try:
            self._digests = self._read()
            _LOG.info("%s was read again: %d keys", self._path, len(self._digests))
        except SettingsError as error:  # nobody is let in by accident, and nobody is locked out
            _LOG.error("%s; the keys of before stay", error)

    def _mark(self) -> tuple[int, int, int]:
        try:
            status = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return (status.st_mtime_ns, status.st_size, status.st_ino)

    def _read(self) -> tuple[bytes, ...]:
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
            raise SettingsError(
                f"api_keys: {self._path} cannot be read ({reason}); give a text file"
            ) from None
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not keys:
            raise SettingsError(f"api_keys: {self._path} holds no key; write one on each line")
        return tuple(_digest(key) for key in keys)


class Guard:
    """The outermost part of the service."""

    def __init__(
        self, app: ASGIApp, *, keys: ApiKeys | None, max_body_bytes: int, registry: CollectorRegistry
    ) -> None:
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._requests = Counter(
            "ddtree_gateway_requests",
            "HTTP requests by path and status",
            ("path", "status"),
            registry=registry,
        )
        self._in_flight = Gauge(
            "ddtree_gateway_requests_in_flight", "HTTP requests under way", registry=registry
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = str(scope["path"])
        status = 499  # the caller left before there was an answer

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._in_flight.inc()
        try:
            refusal = self._refusal(scope, path)
            if refusal is not None:
                await _refuse(refusal, scope, receive, counted)
            else:
                await self._serve(scope, receive, counted)
        finally:
            self._in_flight.dec()
            label = path if path in _PATHS else "other"
            self._requests.labels(label, str(status)).inc()

    def _refusal(self, scope: Scope, path: str) -> ApiError | None:
        headers = dict(scope["headers"])
        if self._keys is not None and path.startswith("/v1"):
            scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
            tenant = self._keys.tenant(key.strip()) if scheme.lower() == "bearer" else None
            scope.setdefault("state", {})["tenant"] = tenant
            if tenant is None:
                return ApiError(
                    401,
                    "a valid key is needed; send it as `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            return self._too_large()
        return None

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the small body first: frameworks turn what `receive` raises into errors of theirs."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return  # left before it was all there
            body += message.get("body", b"")
            if len(body) > self._max_body_bytes:  # sent in pieces without saying how long it is
                await _refuse(self._too_large(), scope, receive, send)
                return
            if not message.get("more_body", False):
                break
        waiting: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        await self._app(scope, replay, send)

    def _too_large(self) -> ApiError:
        message = f"the body may have {self._max_body_bytes} bytes at most; shorten the request"
        return ApiError(413, message, code="request_too_large")


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    headers: dict[str, Any] = {**error.headers, "connection": "close"}  # the rest of the body is not read
    await JSONResponse(error.body, error.status, headers=headers)(scope, receive, send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="replace")).digest()
