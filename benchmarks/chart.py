"""Draws a result file: decoding speed and acceptance length against the budget, with what they compare to.

Reads only the result's numbers, so an old file can be drawn again: `python -m benchmarks.chart cpu.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import matplotlib as mpl
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart with every kind of colour vision.
_BLUE, _ORANGE, _GREEN, _PINK, _GREY, _SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#555555", "#56B4E9"


@dataclass(frozen=True)
class _Line:
    """A tree contender over its budgets."""

    player: str
    label: str
    colour: str
    marker: str


@dataclass(frozen=True)
class _Reference:
    """A contender without a budget: a horizontal line."""

    name: str
    label: str
    colour: str
    style: str


@dataclass(frozen=True)
class _Panel:
    """One quantity against the budget."""

    quantity: str
    budgets: Sequence[int | str]
    lines: Sequence[_Line]
    references: Sequence[_Reference]


_LINES = (
    _Line("in-process", "tree, in process", _BLUE, "o"),
    _Line("grpc", "tree, gRPC (BLS)", _ORANGE, "s"),
    _Line("grpc-in-process", "tree, gRPC (in_process topology)", _SKY, "^"),
)
_REFERENCES = (
    _Reference("in-process/chain", "chain", _GREEN, "--"),
    _Reference("in-process/plain", "plain", _GREY, "--"),
    _Reference("dflash", "dflash 0.1.0", _PINK, ":"),
    _Reference("transformers", "transformers", "#000000", ":"),
)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a result as a PNG."""
    budgets = _budgets(result)
    with mpl.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9.5, 9), dpi=140, layout="constrained")
        speed, accepted = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        _draw_panel(speed, _Panel("tokens_per_s", budgets, _LINES, _REFERENCES), result)
        # transformers, as plain decoding, emits one token a round: one line is enough.
        _draw_panel(accepted, _Panel("acceptance_length", budgets, _LINES[:1], _REFERENCES[:-1]), result)
        speed.set_ylabel("tokens per second, decoding")
        accepted.set_ylabel("acceptance length, tokens per round")
        accepted.set_xlabel("budget, draft nodes")
        accepted.set_xticks(range(len(budgets)), [str(budget) for budget in budgets])
        accepted.set_xlim(-0.45, len(budgets) - 0.7 + 1.05)
        if speed.get_legend_handles_labels()[0]:
            speed.legend(loc="upper center", bbox_to_anchor=(0.42, 1.12), ncols=3, frameon=False)
        figure.suptitle(_title(result), x=0.02, ha="left", fontweight="bold")
        figure.supxlabel(_caption(result), x=0.02, ha="left", fontsize=8.5, color="#444444")
        figure.savefig(path)


def _budgets(result: Mapping[str, Any]) -> list[int | str]:
    found = {
        facts["tree_budget"] for facts in result["contenders"].values() if facts["tree_budget"] is not None
    }
    sizes: list[int | str] = [*sorted(budget for budget in found if isinstance(budget, int))]
    return [*sizes, "auto"] if "auto" in found else sizes


def _draw_panel(axes: Axes, panel: _Panel, result: Mapping[str, Any]) -> None:
    contenders, quantity = result["contenders"], panel.quantity
    top = 0.0
    for index, line in enumerate(panel.lines):
        # Beside one another: bars on the same spot could not be told apart.
        shift = (index - (len(panel.lines) - 1) / 2) * 0.09
        points = [
            (place + shift, facts[quantity], budget)
            for place, budget in enumerate(panel.budgets)
            if (facts := contenders.get(f"{line.player}/tree-{budget}")) and facts[quantity]
        ]
        _draw_points(axes, [point for point in points if point[2] != "auto"], line, label=line.label)
        # Not a size: it does not belong to the line.
        _draw_points(axes, [point for point in points if point[2] == "auto"], line, label=None)
        top = max([top, *(spread["q3"] for _, spread, _ in points)])
        if index == 0:  # the numbers of one line; of all they would cover one another
            _write_values(axes, [(place, spread["median"]) for place, spread, _ in points], line.colour)
    shown = [
        (reference, contenders[reference.name][quantity])
        for reference in panel.references
        if reference.name in contenders and contenders[reference.name][quantity]
    ]
    top = max([top, *(spread["median"] for _, spread in shown)])
    axes.set_ylim(0, top * 1.1 or 1)
    _draw_references(axes, shown, right=len(panel.budgets) - 0.55, least_gap=top * 0.07)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def _write_values(axes: Axes, points: Sequence[tuple[float, float]], colour: str) -> None:
    before = 0.0
    for place, value in points:
        # On the side of the marker where the line from the point before does not run.
        down = value < before
        axes.annotate(
            _shown(value), (place, value), (-6, -3 if down else 3), textcoords="offset points",
            ha="right", va="top" if down else "bottom", fontsize=9.5, color=colour, zorder=4,
            path_effects=[patheffects.withStroke(linewidth=3, foreground="white")],
        )  # fmt: skip
        before = value


def _shown(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _draw_points(
    axes: Axes, points: Sequence[tuple[float, Mapping[str, float], int | str]], line: _Line, label: str | None
) -> None:
    if not points:
        return
    medians = [spread["median"] for _, spread, _ in points]
    below = [spread["median"] - spread["q1"] for _, spread, _ in points]
    above = [spread["q3"] - spread["median"] for _, spread, _ in points]
    axes.errorbar(
        [place for place, _, _ in points],
        medians,
        yerr=[below, above],
        color=line.colour,
        marker=line.marker,
        markersize=7,
        linewidth=2,
        elinewidth=1.2,
        capsize=4,
        label=label,
        zorder=3,
    )


def _draw_references(
    axes: Axes, shown: Sequence[tuple[_Reference, Mapping[str, float]]], right: float, least_gap: float
) -> None:
    """Horizontal lines with their names at the right end, moved apart where they would overlap."""
    at = -least_gap
    for reference, spread in sorted(shown, key=lambda each: each[1]["median"]):
        value = spread["median"]
        axes.hlines(
            value, -0.45, right, color=reference.colour, linestyle=reference.style, linewidth=1.6, zorder=2
        )
        at = max(value, at + least_gap)
        axes.annotate(
            f"{reference.label}  {_shown(value)}",
            xy=(right, value),
            xytext=(right + 0.05, at),
            color=reference.colour,
            va="center",
            fontsize=10,
        )


def _title(result: Mapping[str, Any]) -> str:
    return f"DDTree on {result['machine']['cores']} CPU cores, {result['settings']['dtype']}, one sequence"


def _caption(result: Mapping[str, Any]) -> str:
    machine, settings = result["machine"], result["settings"]
    return (
        f"Medians with quartile bars over {settings['prompts']} prompts × {settings['repeats']} repeats, "
        f"at most {settings['max_tokens']} tokens, greedy. Target {settings['target']}, "
        f"drafter {settings['draft']}.\n"
        f"{machine['cpu']}, {settings['threads']} threads, torch {machine['torch']}, "
        f"transformers {machine['transformers']}; {machine['date'][:10]}."
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("result", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(*, result: Path) -> None:
    """Draw RESULT, a JSON file of the benchmark, into a PNG beside it."""
    draw(json.loads(result.read_text(encoding="utf-8")), result.with_suffix(".png"))


if __name__ == "__main__":
    main()
