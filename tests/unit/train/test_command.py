"""The command from a target to an evaluated drafter, and a training that is stopped in between."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddtree.models.draft_checkpoint import open_checkpoint
from ddtree.train.checkpoints import read_draft
from ddtree.train.cli import main
from tests.fakes.tiny_models import MASK_ID

Run = Callable[..., int]
STEPS = 40
NEW = ("--layers", "2", "--block-size", "8", "--taps", "0", "1", "--mask-token-id", str(MASK_ID))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command")
    (folder / "prompts.jsonl").write_text('"How many?"\n{"turns": ["What is it all about?"]}\n')
    return folder


@pytest.fixture(scope="module")
def corpus(target_folder: Path, folder: Path) -> Path:
    for tokens in ("1500", "300"):  # the second goes on in the same folder
        arguments = ["--slots", "32", "--max-length", "80", "--max-prompt", "40", "--max-answer", "32"]
        arguments += ["--prompts", str(folder / "prompts.jsonl"), "--answer-tokens", tokens]
        assert main(["generate", *_where(target_folder), "--corpus", str(folder / "corpus"), *arguments]) == 0
    return folder / "corpus"


@pytest.fixture(scope="module")
def train(target_folder: Path, corpus: Path) -> Run:
    def run(output: Path, *more: str) -> int:
        arguments = ["--steps", str(STEPS), *NEW, "--sequences", "8", "--anchors", "4", *more]
        arguments += ["--corpus", str(corpus), "--output", str(output), "--log-seconds", "0"]
        return main(["train", *_where(target_folder), *arguments])

    return run


def _where(target_folder: Path) -> list[str]:
    return ["--target", str(target_folder), "--device", "cpu"]


def test_from_a_target_to_an_evaluated_drafter(
    train: Run, target_folder: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = str(folder / "prompts.jsonl")
    assert train(folder / "run", "--keep-out", prompts) == 0
    assert "left out because their prompt overlaps" in capsys.readouterr().out
    log = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == STEPS
    assert log[-1]["held_out_loss"] < log[0]["held_out_loss"] - 1
    assert log[-1]["held_out_chain"] >= 1

    draft = folder / "draft"
    assert main(["export", "--training", str(folder / "run"), "--output", str(draft)]) == 0
    assert open_checkpoint(draft).config.block_size == 8

    result = folder / "result.json"
    arguments = [
        "--draft",
        str(draft),
        "--prompts",
        prompts,
        "--temperatures",
        "0",
        "1",
        "--max-answer",
        "24",
    ]
    assert main(["evaluate", *_where(target_folder), *arguments, "--result", str(result)]) == 0
    rows = json.loads(result.read_text())["draft"]["prompts"]
    assert set(rows) == {"T=0", "T=1"}
    for row in rows.values():
        assert 1 <= row["chain"] <= row["tree64"] <= 8
        assert row["answers"] == 2

    picture = folder / "training.png"
    assert main(["plot", str(folder / "run" / "log.jsonl"), str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_stopped_training_ends_where_an_uninterrupted_one_does(train: Run, folder: Path) -> None:
    assert train(folder / "straight") == 0
    for _ in range(3):
        assert train(folder / "stopped", "--pause-after", "0") == 0
    paused = torch.load(folder / "stopped" / "state.pt", weights_only=True)["step"]
    assert train(folder / "stopped") == 0
    straight, stopped = (
        read_draft(folder / name / "draft")[0].state_dict() for name in ("straight", "stopped")
    )
    assert paused == 3, "one step a run"
    for name, weight in straight.items():
        torch.testing.assert_close(stopped[name], weight, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["generate", "--corpus", "c"], "--answer-tokens or --minutes must be given"),
        (["train", "--corpus", "c", "--output", "o"], "--steps or --minutes must be given"),
        (
            ["train", "--corpus", "nowhere", "--output", "o", "--steps", "1", *NEW],
            "must hold shards",
        ),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    command: list[str], message: str, target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command[0], *_where(target_folder), *command[1:]]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
