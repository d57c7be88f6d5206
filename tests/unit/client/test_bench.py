"""Numbers of a benchmark, and the prompts and variants it takes."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from rich.console import Console

from ddtree_client.bench import Report, Sample, Variant, percentile, report
from ddtree_client.cli_bench import read_prompts, report_object, report_table, variants
from ddtree_client.types import Stats


def sample(ttft_s: float = 0.1, output_tokens: int = 11, rounds: int = 5, gap_s: float = 0.01) -> Sample:
    stats = Stats(
        input_tokens=3,
        output_tokens=output_tokens,
        rounds=rounds,
        accepted_draft_tokens=output_tokens - 1 - rounds if rounds else 0,
        draft_tokens=rounds * 16,
        first_chunk_tokens=1,
        time_to_first_token_s=ttft_s,
        total_s=ttft_s + (output_tokens - 1) * gap_s,
    )
    return Sample(stats, (gap_s,) * (output_tokens - 1))


@pytest.mark.parametrize(
    ("percent", "expected"), [(1, 1.0), (50, 2.0), (51, 3.0), (75, 3.0), (95, 4.0), (100, 4.0)]
)
def test_percentile_is_one_of_the_values(percent: int, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == expected


def test_percentile_of_nothing() -> None:
    assert percentile([], 50) is None


def test_acceptance_length_weighs_rounds_not_requests() -> None:
    samples = [sample(output_tokens=11, rounds=5), sample(output_tokens=31, rounds=5)]
    made = report(Variant("tree", 16), samples, (), wall_s=2.0)
    assert made.acceptance_length == (10 + 30) / 10
    assert made.tokens_per_second == 42 / 2.0
    assert made.request_tokens_per_second == pytest.approx(100)
    assert made.inter_token_p50_s == 0.01


def test_requests_without_rounds_do_not_count_for_acceptance() -> None:
    made = report(Variant("tree"), [sample(), sample(output_tokens=1, rounds=0)], (), wall_s=1.0)
    assert made.acceptance_length == 10 / 5


def test_failed_requests_are_counted() -> None:
    made = report(Variant("off"), [sample()], ("UNAVAILABLE: x",), wall_s=1.0)
    assert (made.requests, made.errors) == (2, ("UNAVAILABLE: x",))
    nothing = report(Variant("off"), [], ("UNAVAILABLE: x",), wall_s=1.0)
    assert (nothing.ttft_p95_s, nothing.acceptance_length, nothing.tokens_per_second) == (None, None, 0.0)


def test_tree_is_measured_once_per_budget() -> None:
    labels = [each.label for each in variants(("off", "tree", "chain", "tree"), (8, -1))]
    assert labels == ["off", "tree 8", "tree auto", "chain"]
    assert variants(("tree",), ()) == (Variant("tree", None),)


def test_prompts_in_three_forms(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"one ü"\n\n{"prompt": "two"}\n{"turns": ["three", "later"]}\n', encoding="utf-8")
    assert read_prompts(path) == ("one ü", "two", "three")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"one"\nnot json\n', "line 2: not JSON"),
        ('{"question": "x"}\n', "line 1: needs a prompt"),
        ('{"turns": []}\n', "line 1: needs a prompt"),
        ("\n", "has no prompts"),
    ],
)
def test_a_bad_prompts_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(click.BadParameter, match=message):
        read_prompts(path)


def rendered(reports: list[Report], width: int) -> str:
    console = Console(width=width, record=True, file=None)
    with console.capture() as capture:
        console.print(report_table(reports, 2))
    return capture.get()


def test_table_fits_eighty_columns_and_compares_with_off() -> None:
    off = report(Variant("off"), [sample(12.345, gap_s=0.1234)] * 5, (), wall_s=10.0)
    tree = report(Variant("tree", 1024), [sample(12.345, gap_s=0.1234)] * 5, (), wall_s=4.0)
    text = rendered([off, tree], 80)
    assert "…" not in text
    assert "2.50 ×" in text
    assert "12345/12345" in text
    assert "123.4/123.4" in text
    assert "tree 1024" in text


def test_what_is_missing_is_a_dash() -> None:
    text = rendered([report(Variant("tree"), [], ("x",), wall_s=1.0)], 80)
    assert "–/–" in text


def test_report_for_programs() -> None:
    values = report_object(report(Variant("tree", 16), [sample()], (), wall_s=1.0))
    assert (values["label"], values["draft_mode"], values["tree_budget"]) == ("tree 16", "tree", 16)
    assert values["acceptance_rate"] == 5 / 80
    assert values["errors"] == []
