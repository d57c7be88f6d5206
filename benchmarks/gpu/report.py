"""The result file, complete after every section, and the tables for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.gpu.figures import summarise, table
from benchmarks.gpu.setting import found
from benchmarks.report import write_result

_SAME = ("card", "driver", "torch", "triton", "transformers")


class Results:
    """What has been measured; whatever is added is on disk when `add` returns."""

    def __init__(self, path: Path, machine: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Go on with what the file has of the same card and versions, measured in the same sizes."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        old = _read(path)
        is_same = all(found(old, "machine", name) == machine.get(name) for name in _SAME)
        is_same = is_same and found(old, "settings", "is_tiny") == settings["is_tiny"]
        self.sections: dict[str, Any] = dict(found(old, "sections") or {}) if is_same else {}
        self._facts = {"machine": dict(machine), "settings": dict(settings)}

    @property
    def result(self) -> dict[str, Any]:
        """The whole file."""
        return {
            **self._facts,
            "summary": summarise(self.sections),
            "table": table(self.sections),
            "sections": self.sections,
        }

    def add(self, section: str, facts: Mapping[str, Any]) -> None:
        """Put a section in, in place of an older one."""
        self.sections[section] = dict(facts)
        write_result(self.result, self.path)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def figure_table(result: Mapping[str, Any]) -> Table:
    """What was asked and what came out."""
    shown = Table(title=f"{result['machine']['card']}, torch {result['machine']['torch']}")
    shown.add_column("")
    for column in ("measured", "must", "aim", "reached"):
        shown.add_column(column, justify="right")
    for row in result["table"]:
        sign = "≥" if row["more_is_better"] else "≤"
        value = "–" if row["value"] is None else f"{row['value']:.2f} {row['unit']}"
        shown.add_row(
            row["title"], value, f"{sign} {row['must']:g}", f"{sign} {row['aim']:g}", row["reached"]
        )
    return shown


def stage_tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Every row of every shape: a column for each way, and the memory's limit."""
    for section in ("stages", "hybrid"):
        facts = found(result, "sections", section)
        for context in (found(facts, "contexts") or {}).values():
            yield _stage_table(str(facts["shape"]), context)


def _stage_table(shape: str, context: Mapping[str, Any]) -> Table:
    ways: Mapping[str, Mapping[str, Any]] = context["ways"]
    shown = Table(title=f"{shape}, context {context['tokens']}: ms, median (p10 – p90)")
    shown.add_column("")
    for title in (*ways, "memory limit"):
        shown.add_column(title, justify="right")
    verified = [("verify", rows) for rows in _verified(ways)]
    rows: list[tuple[str, ...]] = [
        ("plain",),
        ("plain_with_host",),
        *verified,
        ("draft",),
        ("build",),
        ("round",),
    ]
    for path in rows:
        cells = [found(way, *path) for way in ways.values()]
        if any(cells):
            limit = found(context, "limit_ms", path[0])
            shown.add_row(
                " ".join(path).replace("_", " "), *map(_cell, cells), "" if limit is None else f"{limit:.2f}"
            )
    shares = [found(way, "same_tokens") for way in ways.values()]
    shown.add_row("same tokens", *("–" if share is None else f"{share:.0%}" for share in shares), "")
    return shown


def _verified(ways: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return sorted({rows for way in ways.values() for rows in way.get("verify", {})}, key=int)


def _cell(timing: Mapping[str, float] | None) -> str:
    if timing is None:
        return "–"
    return f"{timing['ms']:.2f} ({timing['p10']:.2f} – {timing['p90']:.2f})"


def batch_table(result: Mapping[str, Any]) -> Table | None:
    """Tokens per second of the demo pair in batches; None when they did not run."""
    rows = [row for row in found(result, "sections", "demo", "batches") or [] if "tokens_per_s" in row]
    if not rows:
        return None
    shown = Table(title="Demo pair in batches, tokens/s of all sequences together")
    shown.add_column("batch", justify="right")
    for column in ("tree", "chain", "plain", "tree / plain"):
        shown.add_column(column, justify="right")
    for row in rows:
        speeds = (f"{row['tokens_per_s'][mode]:.0f}" for mode in ("tree", "chain", "off"))
        shown.add_row(str(row["batch"]), *speeds, f"{row['tree_over_plain']:.2f}")
    return shown


def exact_table(result: Mapping[str, Any]) -> Table | None:
    """What was compared and how far it was off; None when nothing was."""
    facts = found(result, "sections", "exact")
    if not facts or "prompts" not in facts:
        return None
    shown = Table(
        title="Against other ways to the same answer: ppm of the largest value that float32 is off by"
    )
    shown.add_column("")
    shown.add_column("compared", justify="right")
    shown.add_column("outcome", justify="right")
    gap = facts.get("greedy_largest_gap_millionths")
    rows = (
        ("greedy", "greedy tokens = transformers' generate", "greedy_of", _share(facts, gap)),
        ("steps", "captured steps = general way", "steps_captured", _number(facts.get("steps_off_ppm"))),
        ("steps", "node = its path as a prompt", "nodes_read", _number(facts.get("nodes_off_ppm"))),
        ("rounds", "caches after rounds = reading at once", "rounds", _number(facts.get("caches_off_ppm"))),
        ("bfloat16", "tokens per round on one text, bfloat16 – float32", "replay_prompts", _replayed(facts)),
    )
    for part, title, count, outcome in rows:
        why = facts.get(f"{part}_error")
        if why is None and count in ("steps_captured", "rounds"):
            why = facts.get(f"{part}_skipped")
        shown.add_row(title, str(facts.get(count, "–")), outcome if why is None else str(why))
    return shown


def _share(facts: Mapping[str, Any], gap: float | None) -> str:
    same = f"{facts.get('greedy_same', '–')} the same"
    return same if gap is None else f"{same}; others where two logits are at most {gap / 1e6:.2g} apart"


def _replayed(facts: Mapping[str, Any]) -> str:
    """The difference and its 95 % interval."""
    if "replay_difference" not in facts:
        return "–"
    both = (facts[f"replay_{name}_per_round"] for name in ("bfloat16", "float32"))
    bounds = (facts[f"replay_difference_{name}"] for name in ("low", "high"))
    lengths, (low, high) = " – ".join(f"{length:.2f}" for length in both), bounds
    return f"{lengths} = {facts['replay_difference']:+.3f} ({low:+.3f} to {high:+.3f})"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
