"""The command on a toy target: what arms train on and with, what is measured, what is shared."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddtree.train.ablation_arms import Arm, Choices, make_arms
from ddtree.train.ablation_bench import ArmBench, Study
from ddtree.train.cli import main
from ddtree.train.corpus import Corpus, pack
from ddtree.train.loss import position_weights
from ddtree.train.optimizers import Muon
from ddtree.train.train import few_batches
from tests.fakes.tiny_models import MASK_ID

STEPS = 3
SETS = ("words", "code")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of two sets, and a corpus of which two of five answers are greedy."""
    folder = tmp_path_factory.mktemp("ablation")
    (folder / "words.jsonl").write_text('"How many?"\n"What is it?"\n"Not asked"\n')
    (folder / "code.jsonl").write_text('"def f"\n"import it"\n')
    random = np.random.default_rng(0)
    rows = [random.integers(30, 120, random.integers(20, 60)) for _ in range(200)]
    temperatures = [0.0 if number % 5 < 2 else 0.8 for number in range(200)]
    Corpus(folder / "corpus").append(pack(rows, [8] * 200, temperatures, [0] * 200, [True] * 200, 272))
    return folder


@pytest.fixture(scope="module")
def study(folder: Path, target_folder: Path) -> Study:
    return Study(
        target=target_folder, corpus=folder / "corpus", output=folder / "bench",
        prompts={name: folder / f"{name}.jsonl" for name in SETS},
        base=Choices(taps=(0, 1), layers=2, block_size=8), mask_token_id=MASK_ID, device="cpu", dtype="auto",
        gpus=1, jobs=1, sequences=8, anchors=4, rate=1e-3, held_out=20, limit=2, max_answer=12,
        compiled=False, steps=STEPS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def bench(study: Study) -> ArmBench:
    return ArmBench.open(study, 0)


@pytest.fixture(scope="module")
def arms(bench: ArmBench) -> dict[str, Arm]:
    return {arm.name: arm for arm in make_arms(bench.study.base, bench.sizes())}


@pytest.fixture(scope="module")
def command(folder: Path, target_folder: Path) -> Callable[..., int]:
    def run(*more: str, steps: int = STEPS) -> int:
        arguments = ["ablate", "--target", str(target_folder), "--device", "cpu"]
        arguments += ["--corpus", str(folder / "corpus"), "--output", str(folder / "run"), "--limit", "2"]
        arguments += ["--steps", str(steps), "--layers", "2", "--block-size", "8", "--sequences", "8"]
        arguments += ["--anchors", "4", "--mask-token-id", str(MASK_ID), "--max-answer", "12"]
        for name in SETS:
            arguments += ["--prompts", f"{name}={folder / name}.jsonl"]
        return main([*arguments, *more])

    return run


def test_arms_train_on_the_share_and_the_kind_of_answers_they_name(
    bench: ArmBench, arms: dict[str, Arm]
) -> None:
    whole, longest = bench.training.answer_tokens, 52
    for name, share in (("baseline", 1), ("data-1/2", 1 / 2), ("data-1/8", 1 / 8), ("answers-drawn", 1 / 2)):
        tokens = bench.sequences_of(arms[name].choices).answer_tokens
        assert share * whole - 1 <= tokens < share * whole + longest
    greedy, drawn = (
        set(bench.sequences_of(arms[f"answers-{kind}"].choices).temperatures.tolist())
        for kind in ("greedy", "drawn")
    )
    assert greedy == {0.0}
    assert 0.0 not in drawn
    assert len(set(bench.sequences_of(arms["data-1/2"].choices).temperatures.tolist())) == 2
    assert set(bench.held_out.temperatures.tolist()) > {0.0}, "held out are both, for all arms"


def test_arms_train_with_what_they_name(bench: ArmBench, arms: dict[str, Arm], tmp_path: Path) -> None:
    trainers = {name: bench.trainer_of(arm.choices, tmp_path) for name, arm in arms.items()}
    config = {name: trainer.draft.config for name, trainer in trainers.items()}
    base = trainers["baseline"].draft.state_dict()
    assert config["taps-1"].target_layer_ids == (2,)
    assert config["taps-late"].target_layer_ids == (1, 2)
    assert [len(config[name].layers) for name in ("baseline", "layers-1", "layers-3-thin")] == [2, 1, 3]
    assert config["layers-3-thin"].intermediate_size == 32
    assert config["block-4"].block_size == trainers["block-4"].settings.shape.block_size == 4
    for name, decay in (("baseline", 7.0), ("decay-3", 3.0), ("decay-none", 0.0)):
        assert trainers[name].settings.weight_decay_positions == decay
    has_muon = {name: any(isinstance(o, Muon) for o in one._optimizers) for name, one in trainers.items()}
    assert [name for name, has_it in has_muon.items() if not has_it] == ["adamw"]
    same = {
        name: all(torch.equal(base[key], weight) for key, weight in trainers[name].draft.state_dict().items())
        for name in ("adamw", "decay-3", "data-1/2", "seed")
    }
    assert same == {"adamw": True, "decay-3": True, "data-1/2": True, "seed": False}


@pytest.mark.parametrize("name", ["decay-none", "seed"])
def test_an_arm_is_measured_as_the_baseline_is(
    bench: ArmBench, arms: dict[str, Arm], name: str, tmp_path: Path
) -> None:
    arm = arms[name]
    result = replace(bench, study=replace(bench.study, output=tmp_path)).run(arm)
    assert (result.steps, result.blocks) == (STEPS, STEPS * 8 * 4)
    assert result.answer_tokens == bench.training.answer_tokens
    trainer = bench.trainer_of(arm.choices, arm.folder_in(tmp_path))
    assert trainer.resume()
    as_baseline = bench.trainer_of(bench.study.base, tmp_path).settings
    weights = position_weights(7, 7.0, torch.device("cpu"))
    for sequences, loss in (
        (bench.training, result.training_loss),
        (bench.held_out, result.held_out_loss),
    ):
        scores = trainer.scores_of(few_batches(sequences, as_baseline), weights)
        assert loss == pytest.approx(scores.loss, rel=1e-6)
    assert set(result.sets) == set(SETS)
    assert all(1 <= row["chain"] <= row["tree64"] <= 8 for row in result.sets.values())


def test_the_targets_answers_are_made_once_for_all(bench: ArmBench, study: Study) -> None:
    first = bench.answers("words")
    assert len(first) == study.limit
    kept = Corpus(study.output / "answers" / "words")
    before = [path.stat().st_mtime_ns for path in kept.shards]
    again = ArmBench.open(study, 1).answers("words")
    assert all(torch.equal(one.ids, other.ids) for one, other in zip(first, again, strict=True))
    assert [one.answer_start for one in first] == [one.answer_start for one in again]
    assert [path.stat().st_mtime_ns for path in kept.shards] == before
    assert len(before) == 1


def test_minutes_become_steps_of_the_baseline(bench: ArmBench, tmp_path: Path) -> None:
    few, many = (bench.steps_in(seconds, tmp_path / str(seconds), timed=0.2) for seconds in (1, 100))
    assert many > 20 * few > 0


def test_the_command_compares_arms_and_goes_on_where_it_was(
    command: Callable[..., int], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--arms", "adamw") == 0
    assert "] 2/2 adamw: loss" in capsys.readouterr().out
    first = json.loads((folder / "run" / "ablation.json").read_text())["arms"]
    assert list(first) == ["baseline", "adamw"]
    assert first["adamw"]["held_out_loss"] != first["baseline"]["held_out_loss"]

    assert command("--arms", "answers-greedy") == 0
    output = capsys.readouterr().out
    assert "3 arms of 3 steps, 1 of them already have results" in output
    assert "baseline: loss" not in output
    then = json.loads((folder / "run" / "ablation.json").read_text())["arms"]
    assert {name: then[name] for name in first} == first
    assert list(then) == ["baseline", "adamw", "data-1/2", "answers-greedy"]
    report = (folder / "run" / "ablation.md").read_text()
    assert (
        f"for {STEPS} steps of 8 sequences\nwith 4 blocks each: 96 blocks of 8,\n672 draft positions"
        in report
    )
    assert [line.split(" | ")[0] for line in report.splitlines() if line.startswith("| ")][2:] == [
        "| baseline", "| data-1/2", "| answers-greedy", "| adamw",
    ]  # fmt: skip
    assert "Without a result in this folder: seed, " in report
    assert (folder / "run" / "ablation.png").read_bytes().startswith(b"\x89PNG")
    assert not (folder / "run" / "errors.log").exists()


def test_what_ends_a_run_is_kept_and_what_only_ends_its_picture_ends_no_run(
    command: Callable[..., int], tmp_path: Path
) -> None:
    (tmp_path / "ablation.png").mkdir()
    more = ["--arms", "baseline", "--output", str(tmp_path)]
    assert command(*more, steps=1) == 0
    assert "1 steps of 8 sequences" in (tmp_path / "ablation.md").read_text()
    assert command(*more, steps=2) == 2
    errors = (tmp_path / "errors.log").read_text()
    assert errors.count("Traceback (most recent call last)") == 2
    assert "no picture: IsADirectoryError" in errors
    assert "the run ended: InvalidArgument: INVALID_ARGUMENT: ablation steps must be 1 as in" in errors


def test_a_run_that_ended_among_answers_goes_on_with_them_and_with_no_others(
    command: Callable[..., int], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second set has no prompts at first; then the same command, mended, keeps what the first gave."""
    (later := tmp_path / "later.jsonl").touch()
    more = ["--arms", "baseline", "--output", str(tmp_path), "--prompts", f"code={later}"]

    def refused(*others: str) -> str:
        assert command(*more, *others, steps=1) == 2
        return capsys.readouterr().err

    assert "--prompts must hold prompts" in refused()
    (first,) = tmp_path.glob("answers/*/shard-*.npz")
    made = first.stat().st_mtime_ns
    later.write_text((folder / "code.jsonl").read_text())
    assert "answers max_answer must be 12 as in" in refused("--max-answer", "13")
    assert "answers to prompts words must be" in refused("--prompts", f"words={later}")
    assert command(*more, steps=1) == 0
    assert first.stat().st_mtime_ns == made

    assert "ablation limit must be 2 as in" in refused("--limit", "1", "--prompts", f"third={later}")
    assert "ablation prompts must be" in refused("--prompts", f"third={later}")
    assert sorted(path.name for path in (tmp_path / "answers").iterdir()) == [
        "code",
        "settings.json",
        "words",
    ]
    assert first.stat().st_mtime_ns == made


@pytest.mark.parametrize("name", ["thesis.txt", "settings.json"])
def test_answers_that_are_no_ablations_are_left_alone(
    command: Callable[..., int], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / name).write_text('{"years": "of work"}')
    assert command("--output", str(tmp_path)) == 2
    assert "--output must have no folder 'answers' other than an ablation's" in capsys.readouterr().err
    left = {path.name: path.read_text() for path in (tmp_path / "answers").iterdir()}
    assert left == {name: '{"years": "of work"}'}


def test_a_compiled_arm_compiles_layers_to_train_with_and_leaves_the_target_as_it_was(
    bench: ArmBench, arms: dict[str, Arm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: dict[str, list[bool]] = {}

    def compile_of(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        calls = compiled.setdefault(function.__qualname__, [])

        def call(*args: Any, **options: Any) -> Any:
            calls.append(torch.is_grad_enabled())
            return function(*args, **options)

        return call

    monkeypatch.setattr(torch, "compile", compile_of)
    study = replace(bench.study, output=tmp_path, compiled=True)
    result = replace(bench, study=study).run(arms["baseline"])
    plain = replace(bench, study=replace(study, output=tmp_path / "plain", compiled=False)).run(
        arms["baseline"]
    )
    assert compiled["Layer.forward"] == [True] * 2 * STEPS, "two layers, and none to measure"
    assert compiled["LlamaDecoderLayer.forward"] == [False] * 2 * STEPS, "two up to the last tap, likewise"
    assert all("forward" not in vars(layer) for layer in bench.model.get_decoder().layers)
    assert (result.training_loss, result.sets) == (plain.training_loss, plain.sets)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--minutes-each", "1"], "--steps or --minutes-each must be given, not both"),
        (["--arms", "no-such"], "--arms must name arms, got 'no-such'"),
        (["--jobs-per-gpu", "0"], "--jobs-per-gpu must be 1 or more, got 0"),
        (["--steps", "0"], "--steps must be 1 or more, got 0"),
        (["--held-out", "0"], "--held-out must be 1 or more, got 0"),
        (["--block-size", "1"], "--block-size must be 2 or more, got 1"),
        (["--rate", "nan"], "--rate must be above 0 and finite, got nan"),
        (["--prompts", "other=not-there.jsonl"], "--prompts must name files, got 'not-there.jsonl'"),
        (["--decay", "-1"], "decay must be 0 or more, got -1.0"),
        (["--decay", "nan"], "decay must be 0 or more, got nan"),
        (["--muon-rate", "nan"], "muon_rate must be 0 or more, got nan"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    command: Callable[..., int], more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*more) == 2
    assert message in capsys.readouterr().err


def test_train_takes_a_share_of_one_kind_of_answers(
    bench: ArmBench, target_folder: Path, folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["train", "--target", str(target_folder), "--device", "cpu", "--steps", "1", "--layers", "1"]
    arguments += ["--corpus", str(folder / "corpus"), "--taps", "0", "--mask-token-id", str(MASK_ID)]
    arguments += ["--held-out", "20", "--answers", "greedy", "--data-share", "0.5", "--decay", "0"]
    arguments += ["--intermediate-size", "16"]
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    lengths = bench.training.lengths - bench.training.answer_starts
    greedy = int(lengths[bench.training.temperatures == 0].sum())
    tokens = int(capsys.readouterr().out.split(" answer tokens")[0].split()[-1])
    assert greedy / 2 - 1 <= tokens < greedy / 2 + 52
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["intermediate_size"] == 16
    assert main([*arguments, "--data-share", "1.5", "--output", str(tmp_path)]) == 2
    assert "--data-share must be above 0 and at most 1, got 1.5" in capsys.readouterr().err
