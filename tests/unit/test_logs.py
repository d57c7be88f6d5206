"""Log lines: what they say, what they never say, and how they are switched."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from ddtree import logs
from ddtree.errors import ConfigError
from ddtree.events import Emitted, RequestArrived, RequestEnded, RequestWatch, SequenceQueued
from ddtree.live import DraftContext, Live
from ddtree.params import GenerationParams
from ddtree.request_log import RequestLog
from ddtree.sequence import Sequence
from ddtree.text import TextCodec
from tests.fakes import tokenizers
from tests.fakes.collecting_sink import CollectingSink

LOG = logging.getLogger("ddtree.some.part")
PROMPT = "my diagnosis is hereditary"


@pytest.fixture(autouse=True)
def own_logger() -> Iterator[None]:
    """Give the library's logger back as it was."""
    logger = logging.getLogger("ddtree")
    before = (logger.handlers, logger.level, logger.propagate)
    yield
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def configured(**environment: str) -> io.StringIO:
    stream = io.StringIO()
    logs.configure(
        "target_verifier", {f"DDTREE_LOG_{name.upper()}": v for name, v in environment.items()}, stream
    )
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_an_object_with_who_when_what_and_the_ids() -> None:
    stream = configured()
    LOG.warning("lost %d sessions", 3, extra={"request_id": "r-1", "session_id": 7, "cause": ""})
    (line,) = lines(stream)
    assert datetime.fromisoformat(line.pop("time").replace("Z", "+00:00")).tzinfo is not None
    assert line == {
        "level": "warning",
        "component": "target_verifier",
        "logger": "ddtree.some.part",
        "message": "lost 3 sessions",
        "request_id": "r-1",
        "session_id": 7,
    }


@pytest.mark.parametrize("form", ["json", "text"])
def test_an_exception_is_told_without_its_message_and_its_causes_too(form: str) -> None:
    stream = configured(format=form, level="debug")

    def inner() -> None:
        raise KeyError(PROMPT)

    try:
        try:
            inner()
        except KeyError as error:
            raise ValueError(f"cannot tokenise {PROMPT!r}") from error
    except ValueError:
        LOG.exception("a request failed", extra={"request_id": "r-1"})
    said = stream.getvalue()
    assert PROMPT not in said
    assert "diagnosis" not in said
    assert said.count("\n") == 1
    assert "ValueError" in said
    assert "KeyError" in said
    assert "unit/test_logs.py" in said
    assert "inner" in said
    assert "r-1" in said


def test_lines_of_odd_values_and_newlines_stay_one_line() -> None:
    stream = configured()
    LOG.error("two\nlines", extra={"request_id": 'quote " and\n', "folder": object()})
    (line,) = lines(stream)
    assert line["message"] == "two\nlines"
    assert line["folder"].startswith("<object")


def test_text_for_people() -> None:
    stream = configured(format="text")
    LOG.info("loaded %s", "x", extra={"session_id": 5})
    assert " INFO target_verifier ddtree.some.part: loaded x session_id=5\n" in stream.getvalue()


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("", ["info", "warning", "error"]),
        ("debug", ["debug", "info", "warning", "error"]),
        ("ERROR", ["error"]),
    ],
)
def test_level(level: str, expected: list[str]) -> None:
    stream = configured(level=level)
    for name in ("debug", "info", "warning", "error"):
        getattr(LOG, name)("said")
    assert [line["level"] for line in lines(stream)] == expected


@pytest.mark.parametrize(
    ("name", "rule"), [("level", "debug, info, warning, error"), ("format", "json, text")]
)
def test_what_is_unknown_is_refused(name: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=f"DDTREE_LOG_{name.upper()} must be one of {rule}, got 'loud'"):
        configured(**{name: "loud"})


def test_configured_twice_says_it_once() -> None:
    first = configured()
    second = configured()
    LOG.info("said")
    assert (first.getvalue(), len(lines(second))) == ("", 1)


# --- the line of a request


CODEC = TextCodec(tokenizers.byte_level(), stop_ids=frozenset({1}))


def letters(text: str) -> list[int]:
    return [token for letter in text for token in CODEC.encode(letter)]


def some_live(request: RequestWatch) -> Live:
    params = GenerationParams(tuple(letters(PROMPT)), max_tokens=8)
    sequence = Sequence(params, 3, CODEC)
    done: Any = None
    return Live(sequence, CollectingSink(), done, DraftContext(is_wanted=True), node_cap=4, request=request)


def test_a_request_leaves_one_line_with_what_it_took() -> None:
    stream, log, request = configured(level="debug"), RequestLog(), RequestWatch("r-9")
    live = some_live(request)
    log(RequestArrived(request))
    log(SequenceQueued(live))
    log(Emitted(live, live.sequence.append(letters("se"), None)))
    log(Emitted(live, live.sequence.append(letters("cret"), 4)))
    log(RequestEnded(request, "cancelled", "client_gone"))
    (line,) = lines(stream)
    assert line["message"] == "a request ended"
    assert (line["request_id"], line["outcome"], line["cause"]) == ("r-9", "cancelled", "client_gone")
    assert (line["output_tokens"], line["rounds"], line["draft_tokens"], line["accepted_tokens"]) == (
        6,
        1,
        4,
        3,
    )
    assert line["prompt_tokens"] == len(PROMPT)
    assert 0 <= line["first_token_seconds"] <= line["seconds"]
    assert "secret" not in stream.getvalue()
    assert PROMPT not in stream.getvalue()


@pytest.mark.parametrize(
    ("outcome", "level"),
    [("completed", "info"), ("invalid", "info"), ("overloaded", "warning"), ("unavailable", "warning"),
     ("failed", "error")],
)  # fmt: skip
def test_how_bad_an_end_is(outcome: Any, level: str) -> None:
    stream, log, request = configured(), RequestLog(), RequestWatch()
    log(RequestArrived(request))
    log(RequestEnded(request, outcome, error="told"))
    (line,) = lines(stream)
    assert (line["level"], line["reason"]) == (level, "told")
    assert "request_id" not in line
    assert "first_token_seconds" not in line
