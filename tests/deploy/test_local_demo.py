"""`make demo`, the first thing anybody runs: on a real server, with the demo pair."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.triton, pytest.mark.demo]


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddtree_local.demo", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.usefixtures("demo_target")
def test_every_question_is_answered_in_every_mode_and_compared(project_root: Path) -> None:
    questions = ["How much is 2 + 3?", "Why?"]
    asked = [argument for each in questions for argument in ("--prompt", each)]
    done = run(*asked, "--max-tokens", "12", folder=project_root)
    assert done.returncode == 0, done.stderr
    for question in questions:
        assert f"> {question}\n\n" in done.stdout
        row = next(line for line in done.stdout.splitlines() if line.startswith(f"│ {question} "))
        plain, chain, chain_length, tree, tree_length, ratio = map(float, re.findall(r"\d+\.\d+", row))
        assert min(plain, chain, tree) > 0
        assert ratio == pytest.approx(tree / plain, abs=0.05 * (1 + ratio) / plain + 0.01)  # as printed
        assert min(chain_length, tree_length) >= 1
    assert "token for token" in done.stdout or "near-tie" in done.stdout


def test_what_it_cannot_do_is_said_before_anything_is_started(project_root: Path) -> None:
    done = run("--max-tokens", "1", folder=project_root)
    assert done.returncode == 2
    assert "--max-tokens" in done.stderr
