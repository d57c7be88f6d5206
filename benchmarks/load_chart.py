"""Draws a load run: tokens a second and the wait for them against the number of streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_STYLES = {"tree": ("#0072B2", "o"), "plain": ("#D55E00", "s")}  # Okabe and Ito's colours


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the picture.

    Args:
        rows: of `benchmarks.load.run_load`.
        path: where it goes, PNG.
    """
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9.5, 3.2), dpi=150, layout="constrained")
        speed, first, gap = figure.subplots(1, 3)
        _panel(speed, rows, ("tokens_per_second",), 1.0, "tokens per second, all streams")
        _panel(first, rows, ("ttft_p50_s", "ttft_p95_s"), 1e3, "first token, ms (p50, p95)")
        _panel(gap, rows, ("inter_token_p50_s", "inter_token_p95_s"), 1e3, "per token, ms (p50, p95)")
        speed.legend(frameon=False)
        figure.savefig(path)


def _panel(
    axes: Axes, rows: Sequence[Mapping[str, Any]], quantities: Sequence[str], scale: float, title: str
) -> None:
    streams = [row["streams"] for row in rows]
    for name, (colour, marker) in _STYLES.items():
        for quantity, line in zip(quantities, ("-", ":"), strict=False):
            values = [(row[name][quantity] or 0.0) * scale for row in rows]
            label = name if line == "-" else None
            axes.plot(streams, values, line, color=colour, marker=marker, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(streams, [str(each) for each in streams])
    axes.set_xlabel("streams")
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left")
