"""Structured logs: one JSON object a line, with request ids, and never a word of what callers say or get.

What an exception says may quote a prompt, so a record shows an exception's type and the places it passed, not
its message; code that knows a message to be harmless puts it into the record's own. Settings come from the
environment: DDTREE_LOG_LEVEL (debug, info, warning, error) and DDTREE_LOG_FORMAT (json, text).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from ddtree.errors import ConfigError

_ROOT = "ddtree"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_FORMATS = ("json", "text")
_MOST_PLACES = 12  # of an exception's way, the innermost ones
# What every record has; the rest of its attributes are the fields that the caller added.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(
    component: str, environment: Mapping[str, str] | None = None, stream: TextIO | None = None
) -> None:
    """Let the library log to `stream` (stderr, which Triton hands on); a second call replaces the first.

    Args:
        component: who speaks, a Triton model's name.
        environment: where level and format are read.
        stream: where the lines go.

    Raises:
        ConfigError: level or format is unknown.
    """
    environment = os.environ if environment is None else environment
    level = _choice(environment, "DDTREE_LOG_LEVEL", "info", tuple(_LEVELS))
    style = _choice(environment, "DDTREE_LOG_FORMAT", "json", _FORMATS)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(component) if style == "json" else TextFormatter(component))
    logger = logging.getLogger(_ROOT)
    logger.handlers = [handler]
    logger.setLevel(_LEVELS[level])
    logger.propagate = False


def _choice(environment: Mapping[str, str], name: str, default: str, allowed: tuple[str, ...]) -> str:
    value = environment.get(name, "").strip().lower() or default
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return value


def fields_of(record: logging.LogRecord, component: str) -> dict[str, Any]:
    """Give what a record says, as values that JSON has."""
    when = datetime.fromtimestamp(record.created, timezone.utc)
    fields: dict[str, Any] = {
        "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "component": component,
        "logger": record.name,
        "message": record.getMessage(),
    }
    fields |= {name: value for name, value in vars(record).items() if name not in _OWN and value != ""}
    if record.exc_info and record.exc_info[1] is not None:
        fields["error"] = _describe(record.exc_info[1])
    return fields


def _describe(error: BaseException) -> dict[str, Any]:
    """Type and way of an exception, and of what caused it, without their messages."""
    frames = traceback.extract_tb(error.__traceback__)[-_MOST_PLACES:]
    places = [f"{_short(frame.filename)}:{frame.lineno} {frame.name}" for frame in frames]
    described: dict[str, Any] = {"type": type(error).__name__, "at": places}
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        described["caused_by"] = _describe(cause)
    return described


def _short(path: str) -> str:
    """A file's place within its package's folder."""
    parts = Path(path).parts
    return "/".join(parts[parts.index("site-packages") + 1 :] if "site-packages" in parts else parts[-2:])


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        """Give the line."""
        return json.dumps(fields_of(record, self._component), ensure_ascii=False, default=str)


class TextFormatter(JsonFormatter):
    """The same for people."""

    def format(self, record: logging.LogRecord) -> str:
        """Give the line."""
        fields = fields_of(record, self._component)
        head = [fields.pop(name) for name in ("time", "level", "component", "logger", "message")]
        error = fields.pop("error", None)
        tail = [f"{name}={value}" for name, value in fields.items()]
        if error is not None:
            tail.append(f"error={json.dumps(error)}")
        return " ".join([head[0], head[1].upper(), head[2], f"{head[3]}: {head[4]}", *tail])
