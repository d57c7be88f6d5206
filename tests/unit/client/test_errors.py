"""Error texts and gRPC statuses become one tree of exceptions."""

from __future__ import annotations

import pytest

from ddtree_client.errors import (
    DDTreeClientError,
    DeadlineExceededError,
    InternalServerError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestCancelledError,
    ServerUnavailableError,
    error_from_status,
    error_from_text,
)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("INVALID_ARGUMENT: top_p is 2; send 1", InvalidRequestError, "top_p is 2; send 1"),
        ("[request id: 7f] NOT_FOUND: no such session", NotFoundError, "no such session"),
        ("Failed to process, message: UNAVAILABLE: loading\n", ServerUnavailableError, "loading"),
        ("RESOURCE_EXHAUSTED: INTERNAL: is a word", OverloadedError, "INTERNAL: is a word"),
        ("FAILED_PRECONDITION: sampling is off", InvalidRequestError, "sampling is off"),
        ("CANCELLED: by stop", RequestCancelledError, "by stop"),
        ("DEADLINE_EXCEEDED: 3 s", DeadlineExceededError, "3 s"),
        ("INTERNAL: two\nlines", InternalServerError, "two\nlines"),
        ("NOT_AN_INTERNAL: thing", InternalServerError, "NOT_AN_INTERNAL: thing"),
        ("", InternalServerError, "the server reported an error without a text; its log says more"),
    ],
)
def test_our_servers_text(text: str, kind: type[DDTreeClientError], message: str) -> None:
    error = error_from_text(text)
    assert type(error) is kind
    assert error.message == str(error) == message


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("inference request batch-size must be <= 8 for 'ddtree'", InvalidRequestError),
        ("unexpected inference input 'top', allowed inputs are: …", InvalidRequestError),
        ("Request for unknown model: 'x' is not found", NotFoundError),
        ("Stub process 'ddtree_0_0' is not healthy.", ServerUnavailableError),
        ("Model 'drafter' is not ready", ServerUnavailableError),
        ("Exceeds maximum queue size", OverloadedError),
    ],
)
def test_tritons_own_text(text: str, kind: type[DDTreeClientError]) -> None:
    error = error_from_text(f"[request id: a1] {text}")
    assert type(error) is kind
    assert error.message == text


def test_the_code_is_kept_when_several_share_an_exception() -> None:
    assert error_from_text("FAILED_PRECONDITION: x").code == "FAILED_PRECONDITION"
    assert error_from_status("UNIMPLEMENTED", "x", address="a:1").code == "UNIMPLEMENTED"


@pytest.mark.parametrize(
    "details",
    [
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused (111)",
        "errors resolving nowhere:8001: [field:hostname lookup error: Domain name not found]",
    ],
)
def test_an_unreachable_server_is_one_line_with_the_way_out(details: str) -> None:
    error = error_from_status("UNAVAILABLE", details, address="nowhere:8001")
    assert type(error) is ServerUnavailableError
    assert error.message.startswith("no Triton server answers gRPC at nowhere:8001 (")
    assert "`make serve`" in error.message
    assert "\n" not in error.message


def test_a_broken_connection_is_not_called_a_missing_server() -> None:
    error = error_from_status("UNAVAILABLE", "Socket closed", address="here:8001")
    assert type(error) is ServerUnavailableError
    assert error.message == "the server at here:8001 is unavailable: Socket closed"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("DEADLINE_EXCEEDED", DeadlineExceededError),
        ("CANCELLED", RequestCancelledError),
        ("RESOURCE_EXHAUSTED", OverloadedError),
        ("UNAUTHENTICATED", InternalServerError),
    ],
)
def test_status(code: str, kind: type[DDTreeClientError]) -> None:
    error = error_from_status(code, "details", address="here:8001", deadline_s=2.5)
    assert type(error) is kind
    assert error.code == code
    assert "here:8001" in error.message
