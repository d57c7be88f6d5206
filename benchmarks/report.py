"""Writes what came out: single runs as they come, the result file at the end, and a table for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.contenders import Contender
from benchmarks.evaluation import Run, Runs, Spread, describe, summarise

if TYPE_CHECKING:
    from typing_extensions import Self


class PartialResults:
    """A file of single runs beside the result; what is left of a benchmark that did not end."""

    def __init__(self, result: Path) -> None:
        self.path = result.with_suffix(".jsonl.tmp")
        result.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w", encoding="utf-8")

    def add(self, run: Run) -> None:
        """Append a run; it is on disk when this returns."""
        line = {
            "repeat": run.turn.repeat,
            "prompt": run.turn.prompt,
            "contender": run.turn.contender.name,
            **run.answer.to_json(),
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; the file stays only if the benchmark failed."""
        self._file.close()
        if error is None:
            self.path.unlink()


def result_of(runs: Runs, **facts: Any) -> dict[str, Any]:
    """The whole result file; `facts` are what does not follow from the runs (machine, settings, …)."""
    return {
        **facts,
        "summary": summarise(runs),
        "contenders": {each.name: describe(runs, each) for each in runs.contenders},
    }


def write_result(result: Mapping[str, Any], path: Path) -> None:
    """Write the result file, all or nothing."""
    work = path.with_suffix(".json.tmp")
    work.write_text(json.dumps(_rounded(result), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    work.replace(path)


def _rounded(value: Any) -> Any:
    """The same with floats of four digits after the point: more would claim a precision nobody measured."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, (list, tuple)) else value


def contender_table(runs: Runs) -> Table:
    """One line per contender: medians, and quartiles of the speed."""
    table = Table(
        title="Decoding one sequence at a time (medians over prompts and repeats; τ: acceptance length)"
    )
    table.add_column("contender")
    for column in ("tokens/s", "quartiles", "end to end", "τ", "nodes", "round ms", "= transformers"):
        table.add_column(column, justify="right")
    before: Contender | None = None
    for each in sorted(runs.contenders, key=lambda contender: contender.is_ours):
        if before is not None and each.player != before.player and each.is_ours:
            table.add_section()
        before = each
        table.add_row(each.title, *_cells(runs, each))
    return table


def _cells(runs: Runs, each: Contender) -> list[str]:
    speed = runs.spread(each, lambda answer: answer.tokens_per_s)
    same = runs.agreement(each)
    return [
        _median(speed, ".1f"),
        f"{speed.q1:.1f} – {speed.q3:.1f}" if speed else "–",
        _median(runs.spread(each, lambda answer: answer.end_to_end_tokens_per_s), ".1f"),
        _median(runs.spread(each, lambda answer: answer.acceptance_length), ".2f"),
        _median(runs.spread(each, lambda answer: answer.nodes), ".1f"),
        _median(runs.spread(each, lambda answer: answer.round_ms), ".1f"),
        f"{same['prompts']} of {same['of']}" if same else "–",
    ]


def _median(spread: Spread | None, form: str) -> str:
    return format(spread.median, form) if spread else "–"


def stage_table(runs: Runs) -> Table | None:
    """Where a round's time goes in process; None when nothing ran there."""
    described = {
        each: describe(runs, each) for each in runs.contenders if each.player == "in-process" and each.is_ours
    }
    if not described:
        return None
    stages = ("draft", "build_tree", "verify", "cache_commit", "commit")
    table = Table(title="A round in process, ms (medians; cache_commit is part of verify)")
    table.add_column("")
    for column in (*stages, "round", "hops: BLS", "hops: in_process"):
        table.add_column(column, justify="right")
    for each, facts in described.items():
        hops = (
            describe(runs, Contender(player, each.draft_mode, each.tree_budget))["hop_ms"]
            for player in ("grpc", "grpc-in-process")
        )
        round_ms = facts["round_ms"]
        table.add_row(
            each.way.replace("-", " "),
            *(_number(facts["stage_ms"].get(stage)) for stage in stages),
            _number(round_ms["median"] if round_ms else None),
            *(_number(hop) for hop in hops),
        )
    return table


def summary_table(result: Mapping[str, Any]) -> Table:
    """The summary, one ratio a line."""
    table = Table(title="Summary (ratios of medians)")
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in result["summary"].items():
        shown = f"{value:.2f}" if isinstance(value, float) else "–" if value is None else str(value)
        table.add_row(name, shown)
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
