"""Small checks of configuration values that all say what was expected and what was found.

They know no file: whoever read it puts its name in front of an error.
"""

from __future__ import annotations

from math import isfinite

from ddtree.errors import CheckpointError


def require(rule: str, holds: bool, found: object) -> None:
    """Raise a CheckpointError unless the rule holds."""
    if not holds:
        raise CheckpointError(f"expected {rule}, found {found}")


def whole(name: str, value: object, least: int = 1) -> int:
    """Give a whole number of at least `least`; a bool or a float is none."""
    if type(value) is int and value >= least:
        return value
    raise CheckpointError(f"expected {name} to be an integer of {least} or more, found {value!r}")


def real(name: str, value: object) -> float:
    """Give a finite number; a bool is none."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value):
        return float(value)
    raise CheckpointError(f"expected {name} to be a number, found {value!r}")
