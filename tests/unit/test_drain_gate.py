"""The door that a file closes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree.drain_gate import DrainGate
from ddtree.errors import Unavailable


def test_the_gate_follows_the_file(tmp_path: Path) -> None:
    file = tmp_path / "drain"
    gate = DrainGate(file)
    gate.check()
    file.touch()
    with pytest.raises(Unavailable, match=r"^UNAVAILABLE: this server is draining .* retry in 1 s"):
        gate.check()
    file.unlink()
    gate.check()


def test_without_a_file_it_is_open() -> None:
    DrainGate(None).check()
