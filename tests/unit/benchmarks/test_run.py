"""The whole benchmark on checkpoints that take no time, without a server."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.run import main
from tests.fakes.tiny_models import make_draft, make_target


def test_a_quick_run_in_process(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["hello"]}\n{"turns": ["not reached"]}\n')
    out = tmp_path / "results" / "cpu.json"
    arguments = [
        "--quick", "--only", "in-process", "--dtype", "float32", "--prompts", str(prompts), "--out", str(out),
        "--target", str(make_target(tmp_path / "target")), "--draft", str(make_draft(tmp_path / "draft")),
    ]  # fmt: skip
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == 0, outcome.output
    result = json.loads(out.read_text())
    assert set(result["contenders"]) == {
        "in-process/plain", "in-process/chain", "in-process/tree-8", "in-process/tree-auto"
    }  # fmt: skip
    for facts in result["contenders"].values():
        assert facts["runs"] == 1
        assert 1 < facts["tokens"] <= 8
        assert facts["tokens_per_s"]["median"] > 0
        assert set(facts["stage_ms"]) == {"draft", "build_tree", "verify", "cache_commit", "commit"}
    assert result["summary"]["best_budget"] == 8
    assert result["summary"]["tree_over_plain"] > 0
    assert result["summary"]["tree_over_transformers"] is None
    assert result["settings"]["prompts"] == 1
    assert sorted(file.name for file in out.parent.iterdir()) == ["cpu.json", "cpu.png"]


def test_a_wrong_prompt_file_is_one_line(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("no json\n")
    target = make_target(tmp_path / "target")
    outcome = CliRunner().invoke(main, ["--target", str(target), "--prompts", str(prompts)])
    assert outcome.exit_code == 1
    assert outcome.output.startswith("Error: --prompts: line 1 is no JSON")
    assert len(outcome.output.splitlines()) == 1
