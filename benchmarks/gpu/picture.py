"""Draws where the milliseconds of a round go, next to what reading its bytes once would take.

Reads only the result file, so an old one can be drawn again: `python -m benchmarks.gpu.picture gpu.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu.setting import found

# Okabe and Ito's colours, by part of a round.
_COLOURS = {
    "draft": "#0072B2",
    "build": "#CC79A7",
    "verify": "#D55E00",
    "settle": "#009E73",
    "host": "#999999",
}
_LABELS = {"settle": "walk and commit", "build": "tree building"}
_LEAST_SHOWN = 0.03  # of the longest bar: a narrower piece has no room for its number


@dataclass(frozen=True)
class _Bar:
    label: str
    parts: Mapping[str, float]
    total: float  # of a round as measured: less than its parts together where those overlap
    is_limit: bool = False

    @property
    def end(self) -> float:
        """Where the bar ends."""
        return sum(max(0.0, value) for value in self.parts.values())


def bars_of(result: Mapping[str, Any]) -> list[_Bar]:
    """A bar for each context and way, and one for the memory's limit; none without rounds."""
    bars = []
    for context in (found(result, "sections", "stages", "contexts") or {}).values():
        of_context = [
            _Bar(f"{name}, context {context['tokens']}", way["parts"], way["round"]["ms"])
            for name, way in context["ways"].items()
            if "parts" in way
        ]
        if of_context:
            limit = {name: float(context["limit_ms"][name]) for name in ("draft", "verify")}
            label = f"memory limit, context {context['tokens']}"
            bars += [*of_context, _Bar(label, limit, sum(limit.values()), is_limit=True)]
    return bars


def draw(result: Mapping[str, Any], path: Path) -> bool:
    """Write the PNG; says whether there was anything to draw.

    Raises:
        ImportError: there is no matplotlib here.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    bars = bars_of(result)
    if not bars:
        return False
    longest = max(bar.end for bar in bars)
    with mpl.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10.5, 1.9 + 0.55 * len(bars)), dpi=140, layout="constrained")
        axes = figure.subplots()
        for row, bar in enumerate(reversed(bars)):
            _draw_bar(axes, row, bar, longest)
        axes.set_yticks(range(len(bars)), [bar.label for bar in reversed(bars)])
        axes.set_xlim(0, longest * 1.1)
        axes.set_xlabel("milliseconds")
        handles = [mpl.patches.Patch(color=colour, label=_LABELS.get(name, name))
                   for name, colour in _COLOURS.items()]  # fmt: skip
        axes.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(handles), frameon=False
        )
        figure.suptitle(f"A round of 64 draft nodes, {found(result, 'sections', 'stages', 'shape')}",
                        x=0.02, ha="left", fontweight="bold")  # fmt: skip
        figure.supxlabel(_caption(result), x=0.02, ha="left", fontsize=8.5, color="#444444")
        figure.savefig(path)
    return True


def _draw_bar(axes: Any, row: int, bar: _Bar, longest: float) -> None:
    at = 0.0
    for name, colour in _COLOURS.items():
        width = max(0.0, bar.parts.get(name, 0.0))
        if not width:
            continue
        style = {"alpha": 0.45, "hatch": "//", "edgecolor": "white"} if bar.is_limit else {}
        axes.barh(row, width, left=at, height=0.62, color=colour, **style)
        if width >= _LEAST_SHOWN * longest:
            ink = "black" if bar.is_limit else "white"
            axes.text(at + width / 2, row, _shown(width), ha="center", va="center", fontsize=9, color=ink)
        at += width
    axes.text(at + longest * 0.01, row, f"{_shown(bar.total)} ms", va="center", fontsize=10)


def _shown(ms: float) -> str:
    return f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _caption(result: Mapping[str, Any]) -> str:
    machine, limits = result["machine"], found(result, "sections", "limits") or {}
    return (
        f"{machine['card']}, driver {machine.get('driver')}, torch {machine['torch']}, "
        f"triton {machine['triton']}, transformers {machine['transformers']}; {machine['date'][:10]}. "
        f"Random weights, one sequence, medians.\nMemory limit: weights and cache read once at "
        f"{limits.get('read_gb_s', 0):.0f} GB/s, the fastest read measured in the same run."
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("result", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(*, result: Path) -> None:
    """Draw RESULT, the benchmark's JSON file, into a PNG beside it."""
    draw(json.loads(result.read_text(encoding="utf-8")), result.with_suffix(".png"))


if __name__ == "__main__":
    main()
