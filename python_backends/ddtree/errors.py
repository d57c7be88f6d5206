"""The exceptions of the library, each with the gRPC status it becomes.

Callers' mistakes and states of the service are exceptions of this tree; broken invariants of our own are
asserts. This module knows neither Triton nor gRPC: `code` is a word that the edge translates once.
"""

from __future__ import annotations

from typing import ClassVar


class DDTreeError(Exception):
    """Base of every error that may be shown to a caller; `str(error)` is the whole message."""

    code: ClassVar[str] = "INTERNAL"

    def __str__(self) -> str:
        """Give the message with its status word in front, the form that crosses a gRPC stream."""
        return f"{self.code}: {super().__str__()}"


class InvalidArgument(DDTreeError):
    """A request asks for something it may not have: the caller must change the request."""

    code = "INVALID_ARGUMENT"

    @classmethod
    def of(cls, field: str, rule: str, got: object, way_out: str) -> InvalidArgument:
        """Word the error as field, rule, value and way out."""
        return cls(f"{field} {rule}, got {got!r}; {way_out}")


class ResourceExhausted(DDTreeError):
    """The service is full: the same request may succeed later."""

    code = "RESOURCE_EXHAUSTED"


class Unavailable(DDTreeError):
    """A stage cannot be reached or keeps losing its sessions: retry later."""

    code = "UNAVAILABLE"


class Cancelled(DDTreeError):
    """The caller went away or asked to stop."""

    code = "CANCELLED"


class CheckpointError(DDTreeError):
    """A checkpoint folder is missing, incomplete or does not fit its partner; raised at load only."""

    code = "FAILED_PRECONDITION"


class ConfigError(DDTreeError):
    """A setting of the deployment breaks a rule; raised at load only."""

    code = "FAILED_PRECONDITION"
