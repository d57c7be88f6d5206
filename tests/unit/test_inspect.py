"""What is told of a pair of folders, with what is wrong with it, and what decoding with it shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from ddtree import inspect_command
from ddtree.config import ServingConfig
from ddtree.doctor import Diagnosis, examine
from ddtree.inspection import Report, inspect_pair
from ddtree.models.pairing import Verdict
from ddtree.rehearsal import known_in_a_row
from tests.fakes.copying_pair import make_copying_draft, make_copying_target
from tests.fakes.hybrid_families import make_hybrid
from tests.fakes.random_draft import write_dflash2, write_draft, write_speculators
from tests.fakes.target_families import LAYERS, make_family
from tests.fakes.tiny_models import MASK_ID, VOCAB_SIZE

TAPS = {"mask_token_id": MASK_ID, "target_layer_ids": [0, 1, 2]}
FITTING: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "num_target_layers": LAYERS, "dflash_config": TAPS}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("target"), "qwen3")


def broken(report: Report) -> list[str]:
    return [line.detail for line in report.lines if line.verdict is Verdict.BROKEN]


def warnings(report: Report) -> list[str]:
    return [line.detail for line in report.lines if line.verdict is Verdict.WARNING]


def test_a_pair_that_fits(target: Path, tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    report = inspect_pair(target, write_draft(tmp_path, **FITTING, **rope))
    assert report.is_usable
    assert {line.verdict for line in report.lines} == {Verdict.OK}
    assert report.target["attention"] == "4 full"
    assert report.target["heads"] == "4 query, 2 KV of 8"
    assert report.target["tensors"] == "47 (47 F32)"
    assert report.draft["block"] == "6, drafts 5 positions"
    assert report.draft["attention"] == "3 in both directions, full"
    assert (report.draft["taps"], report.draft["mask token"]) == ("0, 1, 2", str(MASK_ID))
    # 4 layers × (keys and values of 2 × 8) and a feature of 32 values; 3 layers × keys and values of 2 × 12.
    assert report.memory["a token in the verifier"].startswith(f"{_kib((4 * 2 * 2 * 8 + 32) * 4)} ")
    assert report.memory["a token in the drafter"] == _kib(3 * 2 * 2 * 12 * 4)
    half = inspect_pair(target, tmp_path, dtype="bfloat16")
    assert half.memory["a token in the drafter"] == f"{3 * 2 * 2 * 12 * 2} B"


def _kib(count: int) -> str:
    return f"{count / 1024:.1f} KiB" if count >= 1024 else f"{count} B"


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("gemma3", "2 full, 2 with a window of 8"),
        ("gpt-oss", "2 full, 2 with a window of 8"),
        ("qwen2", "4 full"),
    ],
)
def test_attention_of_a_target_is_told(tmp_path: Path, family: str, attention: str) -> None:
    report = inspect_pair(make_family(tmp_path, family), tmp_path)
    assert report.target["attention"] == attention


def test_what_recurrent_layers_need_is_told(tmp_path: Path) -> None:
    """Three of four layers keep a state: pages are of the fourth alone."""
    report = inspect_pair(make_hybrid(tmp_path / "target", "qwen3.5"), write_draft(tmp_path, **FITTING))
    assert broken(report) == []
    assert report.target["layers"] == "4"
    assert report.target["attention"] == "1 full; 3 recurrent (Gated DeltaNet)"
    assert report.memory["a token in the verifier"].startswith(f"{_kib((2 * 2 * 8 + 32) * 4)} ")
    channels = 2 * 2 * 8 + 4 * 6
    state, row = 3 * (4 * 8 * 6 + 3 * channels) * 4, 3 * (2 * 8 + 4 * 7 + channels) * 4
    assert report.memory["a sequence's recurrent state"].startswith(f"{_kib(state)} ")
    assert report.memory["a staged node's stash"].startswith(f"{_kib(row)} ")
    assert report.memory["state_cache_mib, at least"] == "1 (one sequence, 256 nodes)"


def test_what_other_drafts_are_is_told(target: Path, tmp_path: Path) -> None:
    two = inspect_pair(target, write_dflash2(tmp_path / "two", **FITTING))
    assert two.draft["format"] == "DFlash 2, 5 candidates scored given their parent"
    assert two.draft["attention"] == "3 in both directions, with a window of 9"
    own = inspect_pair(
        target,
        write_speculators(
            tmp_path / "own",
            mask_token_id=MASK_ID,
            aux_hidden_state_layer_ids=[1, 2, 3],
            transformer_layer_config={"vocab_size": VOCAB_SIZE},
        ),
    )
    assert (own.draft["format"], own.draft["output head"]) == ("DFlash v1, speculators", "its own, 20 tokens")
    assert own.draft["taps"] == "0, 1, 2"
    assert broken(two) == broken(own) == []


def _drop_shard(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop("norm.weight")
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16}, "expected the target's hidden_size 32, found 16"),
        ({"num_target_layers": 9}, "expected num_target_layers 4, the target's layer count, found 9"),
        ({"dflash_config": {**TAPS, "mask_token_id": 272}}, "below the target's vocabulary of 272"),
        ({"dflash_config": {**TAPS, "mask_token_id": 257}}, "than the target's padding and end tokens [257]"),
        ({"dflash_config": {**TAPS, "target_layer_ids": [0, 1, 4]}}, "target_layer_ids between 0 and 3"),
    ],
)  # fmt: skip
def test_each_broken_rule_is_told(
    target: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    report = inspect_pair(target, write_draft(tmp_path, **{**FITTING, **changes}))
    assert not report.is_usable
    assert any(message in detail for detail in broken(report))
    assert all("\n" not in detail for detail in broken(report))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json: expected a draft checkpoint's conf"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"1234"), "expected a safetensors file"),
        (_drop_shard, "found 1 of them missing: norm.weight [32]"),
    ],
)
def test_a_draft_folder_that_is_not_whole(
    target: Path, tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    folder = write_draft(tmp_path, **FITTING)
    change(folder)
    report = inspect_pair(target, folder)
    assert any(message in detail for detail in broken(report))
    assert report.target, "the other side is told all the same"
    assert not report.draft


def test_swapped_folders_and_a_missing_tokenizer_are_told(target: Path, tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", **FITTING)
    swapped = broken(inspect_pair(draft, target))
    assert sum("were target and draft swapped?" in detail for detail in swapped) == 2
    speculators = write_speculators(tmp_path / "speculators", architectures=["DFlashSpeculator"])
    assert any(
        "were target and draft swapped?" in detail for detail in broken(inspect_pair(speculators, draft))
    )
    bare = make_family(tmp_path / "bare", "llama")
    (bare / "tokenizer.json").unlink()
    assert any("expected the tokenizer's file" in detail for detail in broken(inspect_pair(bare, draft)))


def test_what_is_unusual_is_a_warning(target: Path, tmp_path: Path) -> None:
    """A rope base other than the target's, and a mask that is a word."""
    report = inspect_pair(
        target, write_draft(tmp_path, **{**FITTING, "dflash_config": {**TAPS, "mask_token_id": 65}})
    )
    assert report.is_usable
    base, mask = warnings(report)
    assert "expected the target's rope_theta 10000, found 5000" in base
    assert "it is " in mask
    assert "correct mask_token_id" in mask


def test_the_command_prints_and_exits(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_draft(tmp_path / "good", **FITTING)
    assert inspect_command.main([str(target), str(good)]) == 0
    said = capsys.readouterr().out
    assert "This pair can be served." in said
    assert "warning expected" not in said
    assert any(line.split() == ["hidden", "size", "32", "32"] for line in said.splitlines())
    bad = write_draft(tmp_path / "bad", **{**FITTING, "num_target_layers": 9})
    assert inspect_command.main([str(target), str(bad), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["usable"] is False
    assert any(check["verdict"] == "broken" and "found 9" in check["detail"] for check in told["checks"])
    assert inspect_command.main([str(target), str(bad), "--decode"]) == 1
    assert "Nothing was decoded" in capsys.readouterr().out


@pytest.fixture(scope="module")
def copying_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_copying_target(tmp_path_factory.mktemp("copying"))


def diagnose(target: Path, draft: Path) -> Diagnosis:
    config = ServingConfig(
        target, draft, dtype="float32", kv_cache_mib=4, draft_kv_cache_mib=4, page_size=16, max_nodes=32
    )
    return examine(config, prompts=("aaaa", "eeeeee"), max_tokens=31)


def test_a_draft_that_knows_its_target_is_well(copying_target: Path, tmp_path: Path) -> None:
    diagnosis = diagnose(copying_target, make_copying_draft(tmp_path))
    assert not diagnosis.is_sick
    assert diagnosis.acceptance_length == 6.0, "every draft accepted: a block of 6 gives 6 tokens a round"
    assert diagnosis.tokens == 62
    assert diagnosis.trials == ()


def test_taps_counted_from_another_layer_are_found_out(copying_target: Path, tmp_path: Path) -> None:
    """Nothing fails with them; the draft is only never right."""
    for taps, right in (([0], "[1]"), ([2], "[1]")):
        diagnosis = diagnose(copying_target, make_copying_draft(tmp_path / str(taps), target_layer_ids=taps))
        assert diagnosis.is_sick
        assert f"target_layer_ids must be {right}" in diagnosis.finding
        assert max(trial.acceptance_length for trial in diagnosis.trials) == 6.0


def test_a_damaged_draft_is_sick_of_nothing_known(copying_target: Path, tmp_path: Path) -> None:
    diagnosis = diagnose(copying_target, make_copying_draft(tmp_path, is_damaged=True))
    assert diagnosis.is_sick
    assert diagnosis.acceptance_length == pytest.approx(1.0, abs=0.05)
    assert "no known misreading explains it" in diagnosis.finding
    assert len(diagnosis.trials) >= 4


def test_only_guesses_before_the_first_wrong_one_count() -> None:
    assert known_in_a_row([1, 2, 9, 4], [1, 2, 3, 4, 5]) == 2
    assert known_in_a_row([1, 2], [1, 2, 3]) == known_in_a_row([1, 2, 3], [1, 2]) == 2
    assert known_in_a_row([9], [1]) == known_in_a_row([], [1]) == 0


def test_the_command_decodes_when_asked(
    copying_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = make_copying_draft(tmp_path, target_layer_ids=[2])
    assert inspect_command.main([str(copying_target), str(draft), "--decode", "--max-tokens", "12"]) == 1
    said = capsys.readouterr().out
    assert "tried taps one layer earlier: " in said
    assert "Acceptance is sick" in said
