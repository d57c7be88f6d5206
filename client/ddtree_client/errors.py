"""The exceptions a caller of the client can meet, and the one place where a status becomes an exception.

A decoupled Triton model cannot send a gRPC status with an error: the stream carries text only, and the server
of this project starts that text with the status name (``INVALID_ARGUMENT: max_tokens must be …``). Failures
of the transport do have a status. Both end here, as the same exceptions. This module does not know tensors,
gRPC objects or the CLI.
"""

from __future__ import annotations

import re


class DDTreeClientError(Exception):
    """Base of everything this package raises.

    ``code`` is the gRPC status name, e.g. ``INVALID_ARGUMENT``; ``message`` is one line that says what to
    change.
    """

    code = "UNKNOWN"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code


class InvalidRequestError(DDTreeClientError):
    """The request breaks a rule, found here before sending or by the server. Sending it again cannot help."""

    code = "INVALID_ARGUMENT"


class NotFoundError(DDTreeClientError):
    """The server runs, but not the model that was asked for."""

    code = "NOT_FOUND"


class ServerUnavailableError(DDTreeClientError):
    """No server answers, the connection broke, or the server is not ready yet."""

    code = "UNAVAILABLE"


class OverloadedError(DDTreeClientError):
    """The server refuses new work for lack of memory or queue space. Try again later."""

    code = "RESOURCE_EXHAUSTED"


class DeadlineExceededError(DDTreeClientError):
    """The answer was not complete in time. The server has been told to stop working on it."""

    code = "DEADLINE_EXCEEDED"


class RequestCancelledError(DDTreeClientError):
    """The request was cancelled by somebody else than the reader of the stream."""

    code = "CANCELLED"


class IncompleteAnswerError(DDTreeClientError):
    """The answer is not complete: not read to its end, cancelled, or the stream was closed too early."""

    code = "ABORTED"


class InternalServerError(DDTreeClientError):
    """The server failed in a way that the request is not to blame for. Its log says more."""

    code = "INTERNAL"


_BY_CODE: dict[str, type[DDTreeClientError]] = {
    "INVALID_ARGUMENT": InvalidRequestError,
    "OUT_OF_RANGE": InvalidRequestError,
    "FAILED_PRECONDITION": InvalidRequestError,
    "UNIMPLEMENTED": InvalidRequestError,
    "NOT_FOUND": NotFoundError,
    "UNAVAILABLE": ServerUnavailableError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "CANCELLED": RequestCancelledError,
    "ABORTED": IncompleteAnswerError,
    "INTERNAL": InternalServerError,
    "UNKNOWN": InternalServerError,
}

_CODED_TEXT = re.compile(rf"\b(?P<code>{'|'.join(_BY_CODE)}): (?P<message>.+)", re.DOTALL)

# Triton's own refusals carry no code: they are recognised by the wording of its core.
_TRITON_TEXTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"unknown model|failed to find model|is not found"), "NOT_FOUND"),
    (re.compile(r"is not ready|not healthy|no available versions"), "UNAVAILABLE"),
    (re.compile(r"maximum queue size|queue_size"), "RESOURCE_EXHAUSTED"),
    (re.compile(r"batch-size must be|unexpected inference input|unexpected shape"), "INVALID_ARGUMENT"),
    (re.compile(r"data-type is|expected \d+ inputs"), "INVALID_ARGUMENT"),
)

_REQUEST_ID_PREFIX = re.compile(r"^\[request id: [^\]]*\]\s*")
_NEVER_CONNECTED = re.compile(r"failed to connect|errors resolving|DNS|http1|handshake", re.IGNORECASE)


def error_from_text(text: str) -> DDTreeClientError:
    """The exception for the error text of a stream response: of our server, or of Triton itself."""
    text = _REQUEST_ID_PREFIX.sub("", text.strip())
    coded = _CODED_TEXT.search(text)
    if coded is not None:
        code = coded["code"]
        return _BY_CODE[code](coded["message"].strip(), code=code)
    for pattern, code in _TRITON_TEXTS:
        if pattern.search(text):
            return _BY_CODE[code](text, code=code)
    return InternalServerError(text or "the server reported an error without a text; its log says more")


def error_from_status(
    code: str, details: str, *, address: str, deadline_s: float | None = None
) -> DDTreeClientError:
    """The exception for a call that ended with gRPC status ``code``; ``deadline_s`` is what was asked for."""
    details = " ".join(details.split())
    if code == "UNAVAILABLE":
        return ServerUnavailableError(_unavailable_message(details, address))
    if code == "DEADLINE_EXCEEDED" and deadline_s is not None:
        return DeadlineExceededError(
            f"no complete answer from {address} within {deadline_s:g} s; allow more time or fewer tokens"
        )
    if code == "CANCELLED":
        return RequestCancelledError(f"the request to {address} was cancelled: {details}")
    kind = _BY_CODE.get(code, InternalServerError)
    return kind(f"{details} (from {address})", code=code)


def _unavailable_message(details: str, address: str) -> str:
    if _NEVER_CONNECTED.search(details):
        return (
            f"no Triton server answers gRPC at {address} ({_short_reason(details)}); start one "
            "with `make serve`, or name a running one as HOST:PORT of its gRPC port (8001 by default)"
        )
    return f"the server at {address} is unavailable: {details}"


def _short_reason(details: str) -> str:
    """The last, most specific part of gRPC's nested text, e.g. ``Connection refused (111)``."""
    last = details.rsplit(": ", 1)[-1].strip(" ;,")
    return last if len(last) <= 80 else last[:77] + "…"
