"""Prompt files: what is taken, and what is said about the rest."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import prompts as prompts_module
from benchmarks.errors import BenchmarkError
from benchmarks.prompts import Prompt, parse_line, read_prompts


def test_the_own_prompts_are_three_of_each_kind() -> None:
    own = read_prompts(Path(prompts_module.__file__).parent / "prompts.jsonl")
    assert Counter(prompt.category for prompt in own) == {"math": 3, "chat": 3, "code": 3}
    assert len({prompt.text for prompt in own}) == 9


def test_other_keys_and_later_turns_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    line = json.dumps({"question_id": 7, "turns": ["first", "second"], "reference": ["x"]})
    file.write_text(f"{line}\n\n{line}\n", encoding="utf-8")
    assert read_prompts(file) == (Prompt("first", ""), Prompt("first", ""))
    assert read_prompts(file, limit=1) == (Prompt("first", ""),)


@pytest.mark.parametrize(
    "line",
    ['"only text"', "{}", '{"turns": []}', '{"turns": "text"}', '{"turns": [3]}', '{"turns": [" "]}', "{"],
)
def test_a_line_of_another_form_is_named(line: str) -> None:
    with pytest.raises(BenchmarkError, match=r"line 12 .*turns"):
        parse_line(line, 12)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(BenchmarkError, match="has no prompt"):
        read_prompts(empty)
    with pytest.raises(BenchmarkError, match="cannot be read"):
        read_prompts(tmp_path / "missing.jsonl")
