"""What a gateway is told at its start. Plain data, checked where it is built; reads no file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddtree_client.types import Tls


class SettingsError(Exception):
    """A setting breaks a rule; the message says which and what to change."""


@dataclass(frozen=True)
class Settings:
    """One gateway.

    Raises:
        SettingsError: names the setting, its rule, the value and the way out.
    """

    endpoints: tuple[str, ...]  # HOST:PORT of Triton's gRPC port, each
    model: str = "ddtree"  # Triton's name of the model
    served_names: tuple[str, ...] = ()  # what requests may call it; empty: `model`
    api_keys: Path | None = None  # one key a line; None lets everybody in
    tls: Tls | None = None  # towards Triton
    default_max_tokens: int = 512  # of a chat that names no limit; the completions API says 16
    max_body_bytes: int = 4 * 1024 * 1024
    request_timeout_s: float = 600.0  # the longest deadline, and that of requests without one
    check_interval_s: float = 2.0  # between two looks at an endpoint's health

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise SettingsError("endpoints needs at least one Triton, got none; give HOST:PORT")
        for name in ("default_max_tokens", "max_body_bytes", "request_timeout_s", "check_interval_s"):
            value = getattr(self, name)
            if value <= 0:
                raise SettingsError(f"{name} must be above 0, got {value!r}; leave it out for the default")

    @property
    def names(self) -> tuple[str, ...]:
        """The names requests may use; the first one is the name in answers to none."""
        return self.served_names or (self.model,)
