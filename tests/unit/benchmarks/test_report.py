"""Files of a benchmark: partial results, the result, the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks import chart
from benchmarks.contenders import PLAYERS, Turn, all_contenders
from benchmarks.evaluation import Run, Runs
from benchmarks.measurement import Answer
from benchmarks.report import PartialResults, contender_table, result_of, stage_table, write_result

_MACHINE = {"cpu": "A CPU", "cores": 2, "torch": "2", "transformers": "5", "date": "2030-01-02T03:04:05"}
_SETTINGS = {
    "prompts": 1, "repeats": 1, "max_tokens": 8, "threads": 2, "target": "t", "draft": "d",
    "dtype": "float32",
}  # fmt: skip


def _runs() -> list[Run]:
    answer = Answer(tuple(range(9)), 1, 0.1, 0.4, rounds=4, nodes=8.0, stage_ms={"verify": 1 / 3})
    return [Run(Turn(0, 0, contender), answer) for contender in all_contenders(PLAYERS, (8, 16))]


def _result() -> dict[str, Any]:
    return result_of(Runs(_runs()), machine=_MACHINE, settings=_SETTINGS)


def test_partial_results_are_written_as_they_come_and_removed_at_the_end(tmp_path: Path) -> None:
    result = tmp_path / "new" / "cpu.json"
    with PartialResults(result) as partial:
        for run in _runs():
            partial.add(run)
        lines = partial.path.read_text().splitlines()
    assert [json.loads(line)["contender"] for line in lines] == [run.turn.contender.name for run in _runs()]
    assert not partial.path.exists()


def test_partial_results_of_a_failed_benchmark_stay(tmp_path: Path) -> None:
    def fail_after_one_run() -> None:
        with PartialResults(tmp_path / "cpu.json") as partial:
            partial.add(_runs()[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_after_one_run()
    assert len((tmp_path / "cpu.jsonl.tmp").read_text().splitlines()) == 1


def test_the_result_file_is_rounded_json_and_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    path.write_text("old")
    write_result(_result(), path)
    read = json.loads(path.read_text())
    assert read["machine"] == _MACHINE
    assert read["contenders"]["in-process/tree-8"]["stage_ms"] == {"verify": 0.3333}
    assert read["summary"]["tree_over_plain"] == 1.0
    assert [file.name for file in tmp_path.iterdir()] == ["cpu.json"]


def test_tables_have_a_line_for_everybody() -> None:
    runs = Runs(_runs())
    assert contender_table(runs).row_count == len(runs.contenders)
    stages = stage_table(runs)
    assert stages is not None
    assert stages.row_count == sum(each.player == "in-process" for each in runs.contenders)
    assert stage_table(Runs()) is None


@pytest.mark.parametrize("kept", ["in-process", "transformers", "grpc"])
def test_a_result_of_one_player_can_be_drawn_too(tmp_path: Path, kept: str) -> None:
    result = _result()
    result["contenders"] = {
        name: facts for name, facts in result["contenders"].items() if name.startswith(kept)
    }
    chart.draw(result, tmp_path / "cpu.png")
    with Image.open(tmp_path / "cpu.png") as picture:
        assert picture.format == "PNG"
        assert picture.width > 1000
