"""What can go wrong when a local Triton server is set up, each as one line a person can act on.

Knows nothing of the causes: whoever raises one of these writes the line.
"""

from __future__ import annotations


class LocalTritonError(Exception):
    """Base of every error of this package; its text is one line."""


class PrerequisiteError(LocalTritonError):
    """This machine lacks something that the server from the wheel needs."""


class PortInUseError(LocalTritonError):
    """A port that was asked for is taken."""


class ServerStartError(LocalTritonError):
    """The server ended, or did not become ready in time; the text holds the decisive line of its log."""


class DemoTargetError(LocalTritonError):
    """The demo target could not be brought or converted."""
