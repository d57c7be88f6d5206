"""Errors as the API words them: a status, and a body `{"error": {message, type, param, code}}`.

The one place where a client exception becomes an HTTP answer. Knows no framework.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ddtree_client.errors import DDTreeClientError

_STATUS: Final[Mapping[str, tuple[int, str]]] = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "NOT_FOUND": (404, "invalid_request_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "UNAVAILABLE": (503, "service_unavailable_error"),
    "CANCELLED": (503, "service_unavailable_error"),
    "ABORTED": (502, "server_error"),
    "DEADLINE_EXCEEDED": (504, "timeout_error"),
}
_CODES: Final[Mapping[int, str]] = {
    401: "invalid_api_key",
    404: "model_not_found",
    413: "request_too_large",
    429: "overloaded",
    503: "unavailable",
    504: "deadline_exceeded",
}
_WAIT: Final = re.compile(r"retry in (\d+(?:\.\d+)?) s\b")
_FIELD: Final = re.compile(r"^(?:row \d+: )?(?P<field>[a-z_]+(?:\[\d+\])?(?:\.[a-z_]+(?:\[\d+\])?)*) ")
_TOO_LONG: Final = re.compile(r"do not fit the context|cannot fit the context")
# The server's names of what the API calls otherwise.
_PARAMETERS: Final[Mapping[str, str]] = {
    "stop_words": "stop",
    "guided_json": "response_format",
    "num_return_sequences": "n",
    "return_log_probs": "logprobs",
    "num_top_log_probs": "top_logprobs",
    "text_input": "prompt",
    "input_ids": "prompt",
    "deadline_ms": "deadline",
}


@dataclass(eq=False)  # not frozen: Python writes to exceptions as they pass
class ApiError(Exception):
    """An answer that is an error."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer, or the data of an event."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def unsupported(param: str, reason: str) -> ApiError:
    """The refusal of a parameter that the API knows and this service does not."""
    return ApiError(400, f"{param} {reason}", param=param, code="unsupported_parameter")


def from_client(error: DDTreeClientError) -> ApiError:
    """The answer to a failure of the server, or of the way to it."""
    status, kind = _STATUS.get(error.code, (500, "server_error"))
    message, code, param = error.message, _CODES.get(status), None
    headers: dict[str, str] = {}
    if status == 400:
        param, code = _parameter(message), "invalid_value"
        if _TOO_LONG.search(message):
            code = "context_length_exceeded"
    if status in (429, 503):
        wait = _WAIT.search(message)
        # Whole seconds are the header's unit; an open end means: soon.
        headers["retry-after"] = str(max(1, round(float(wait[1])))) if wait else "1"
    return ApiError(status, message, kind, param, code, headers)


def _parameter(message: str) -> str | None:
    found = _FIELD.match(message)
    if found is None:
        return None
    whole = found["field"]
    first = re.split(r"[\[.]", whole, maxsplit=1)[0]
    if first not in _KNOWN and first not in _PARAMETERS:
        return None
    return _PARAMETERS.get(first, first) + whole[len(first) :]


# What a server's message may begin with besides the names above; other first words are prose.
_KNOWN: Final = frozenset(
    {
        "messages", "chat_template_kwargs", "max_tokens", "min_tokens", "draft_mode", "tree_budget",
        "stop_token_ids", "ignore_eos", "bad_words", "temperature", "top_k", "top_p", "min_p", "seed",
        "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "guided_regex",
        "guided_grammar", "guided_choice", "cache_salt",
    }
)  # fmt: skip
