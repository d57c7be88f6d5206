"""Draws a dashboard as Grafana would lay it out, from the answers of a real Prometheus."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.dates as mdates
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter

from tests.deploy.prometheus.panels import Answered

_COLUMNS = 24
_CHARACTERS = 190  # of the legend's letters in the whole width
_COLORS = ["#73bf69", "#f2cc0c", "#5794f2", "#ff780a", "#f2495c", "#b877d9", "#56d9d6", "#c4a57b", "#96d98d",
           "#ffb357", "#8ab8ff", "#e02f44", "#a352cc", "#37872d", "#fade2a", "#c0d8ff"]  # fmt: skip
_NAMED = {"red": "#f2495c", "orange": "#ff9830", "blue": "#5794f2", "green": "#73bf69"}
_BACK, _PANEL, _TEXT, _GRID = "#111217", "#181b1f", "#ccccdc", "#2c3038"


def draw(
    title: str, rows: Sequence[tuple[str, int]], answered: Sequence[Answered], path: Path, about: str
) -> None:
    """Write the picture; `about` says below the title where the numbers come from."""
    bottom = max(each.panel.place[1] + each.panel.place[3] for each in answered)
    figure = plt.figure(figsize=(15, bottom * 0.36 + 0.8), facecolor=_BACK)
    height = bottom + 2.2
    figure.text(0.012, 1 - 0.75 / height, title, color="white", fontsize=17, weight="bold", va="center")
    figure.text(0.988, 1 - 0.75 / height, about, color="#8e8e9c", fontsize=9.5, va="center", ha="right")
    for name, y in rows:
        figure.text(0.012, 1 - (y + 2.0) / height, f"▾ {name}", color=_TEXT, fontsize=12, va="center")
    for each in answered:
        x, y, w, h = each.panel.place
        box = (x / _COLUMNS + 0.006, 1 - (y + h + 1.45) / height, w / _COLUMNS - 0.012, (h - 0.3) / height)
        _draw_panel(figure, each, box)
    figure.savefig(path, dpi=110, facecolor=_BACK)
    plt.close(figure)


def _draw_panel(figure: Any, each: Answered, box: tuple[float, float, float, float]) -> None:
    left, bottom, width, height = box
    back = figure.add_axes(box, facecolor=_PANEL)
    back.set(xticks=[], yticks=[])
    for spine in back.spines.values():
        spine.set_color(_GRID)
    back.text(0.012 / width, 0.94, each.panel.title, color="white", fontsize=10.5, weight="bold", va="center")
    if each.panel.kind == "stat":
        _stat(back, each)
        return
    is_heatmap = each.panel.kind == "heatmap"
    legend = [] if is_heatmap else _legend_rows(each, width)
    below = 0.13 + 0.075 * len(legend)
    place = (left + 0.036, bottom + height * below, width - 0.046, height * (0.87 - below))
    axes = figure.add_axes(place, facecolor=_PANEL)
    if is_heatmap:
        _heatmap(axes, each)
    else:
        _lines(axes, each)
        _legend(back, legend, width)
    axes.tick_params(colors=_TEXT, labelsize=8, length=0)
    if not is_heatmap:
        axes.grid(color=_GRID, linewidth=0.6)
    axes.xaxis.set_major_locator(mdates.AutoDateLocator(maxticks=6))  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_formatter(mdates.DateFormatter("%H:%M:%S"))  # type: ignore[no-untyped-call]
    for spine in axes.spines.values():
        spine.set_visible(False)


def _lines(axes: Any, each: Answered) -> None:
    moments = sorted({time for _, line in each.series for time in line.times})
    times = np.array(moments) / 86400
    base = np.zeros(len(moments))
    top = 0.0
    for number, (_, line) in enumerate(each.series):
        color = _COLORS[number % len(_COLORS)]
        known = dict(zip(line.times, line.values, strict=True))
        values = np.array([known.get(moment, math.nan) for moment in moments])
        if each.panel.is_stacked and not np.nan_to_num(values).any():
            continue  # its line would only cover the one below
        if each.panel.is_stacked:
            values = base + np.nan_to_num(values)
            axes.fill_between(times, base, values, color=color, alpha=0.45, linewidth=0)
            base = values
        elif len(each.series) == 1:
            axes.fill_between(times, 0, values, color=color, alpha=0.12, linewidth=0)
        axes.plot(times, values, color=color, linewidth=1.3)
        top = max([top, *values[np.isfinite(values)]])
    lowest, highest = each.panel.bounds
    if lowest is not None:
        axes.set_ylim(bottom=lowest)
    if highest is not None:
        top = min(highest, max(top * 1.15, 0.05)) if each.panel.unit == "percentunit" else highest
        axes.set_ylim(top=top)
    elif top > 0:
        axes.set_ylim(top=top * 1.12)
    for value, color in each.panel.thresholds:
        if value <= axes.get_ylim()[1]:
            axes.axhline(value, color=_NAMED[color], linestyle="--", linewidth=1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: readable(value, each.panel.unit)))


def _legend_rows(each: Answered, width: float) -> list[list[tuple[str, str]]]:
    """Names with their largest values and colors, as many in a row as there is room for."""
    rows: list[list[tuple[str, str]]] = [[]]
    for number, (name, line) in enumerate(each.series):
        largest = readable(max(line.numbers), each.panel.unit) if line.numbers else "–"
        entry = (f"{name}  {largest}", _COLORS[number % len(_COLORS)])
        if sum(len(text) + 5 for text, _ in [*rows[-1], entry]) > width * _CHARACTERS and rows[-1]:
            rows.append([])
        rows[-1].append(entry)
    return rows


def _legend(back: Any, rows: list[list[tuple[str, str]]], width: float) -> None:
    for number, row in enumerate(rows):
        x, y = 0.02, 0.045 + 0.075 * (len(rows) - 1 - number)
        for text, color in row:
            back.text(x, y, "▬", color=color, fontsize=8, va="center")
            back.text(x + 2.4 / (width * _CHARACTERS), y, text, color=_TEXT, fontsize=8, va="center")
            x += (len(text) + 5) / (width * _CHARACTERS)


def _stat(back: Any, each: Answered) -> None:
    rows = [(name, line.numbers[-1]) for name, line in each.series if line.numbers]
    for number, (name, value) in enumerate(rows):
        y = 0.8 - (number + 0.5) * 0.75 / len(rows)
        back.text(0.06, y, name, color=_TEXT, fontsize=9.5, va="center")
        back.text(0.94, y, readable(value, each.panel.unit), color="#73bf69", fontsize=17, weight="bold",
                  va="center", ha="right")  # fmt: skip


def _heatmap(axes: Any, each: Answered) -> None:
    """Cumulative buckets to cells: how many rounds a second had exactly so many tokens."""
    lines = sorted((float(line.labels["le"]), line) for _, line in each.series)
    times = np.array(lines[0][1].times) / 86400
    counts = np.diff([np.zeros(len(times)), *(np.nan_to_num(line.values) for _, line in lines)], axis=0)
    used = max((index for index, row in enumerate(counts) if row.max() > 0), default=0)
    edges = np.arange(used + 2)
    steps = np.append(times, times[-1] + (times[-1] - times[0]) / max(1, len(times) - 1))
    axes.pcolormesh(steps, edges, np.maximum(counts[: used + 1], 0), cmap="cividis")
    names = ["∞" if math.isinf(bound) else f"{bound:g}" for bound, _ in lines[: used + 1]]
    axes.set_yticks(edges[:-1] + 0.5, names)


def readable(value: float, unit: str) -> str:
    """A number as Grafana would write it."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s" and value:
        return f"{value * 1e3:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"
    suffix = " /s" if unit == "reqps" else ""
    return f"{value / 1000:.3g} k{suffix}" if abs(value) >= 1000 else f"{value:.3g}{suffix}"
