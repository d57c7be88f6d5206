"""`ddtree inspect` and `ddtree doctor` beside the serving library and without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddtree_client.cli import cli

# None in sys.modules is Python's way of saying that a module is not to be had.
_ALONE = "import sys; sys.modules['ddtree'] = None; from ddtree_client.cli import main; main()"


@pytest.mark.parametrize("command", ["inspect", "doctor"])
def test_the_serving_library_answers(tmp_path: Path, command: str) -> None:
    done = CliRunner().invoke(cli, [command, str(tmp_path), str(tmp_path), "--json"])
    assert done.exit_code == 1, "an empty folder is no checkpoint"
    helped = CliRunner().invoke(cli, [command, "--help"])
    assert helped.exit_code == 0


@pytest.mark.parametrize("command", ["inspect", "doctor"])
def test_without_the_serving_library_one_line_says_how_to_get_it(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ALONE, command, "target", "draft"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "pip install ddtree-serving" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
