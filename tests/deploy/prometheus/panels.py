"""The chart's dashboards as tests see them: panels, their queries in plain PromQL, and pictures of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.deploy.prometheus.server import Line, Prometheus

FOLDER = Path(__file__).parents[3] / "deploy" / "helm" / "ddtree" / "dashboards"
_VARIABLES = {"$model": ".*", "$instance": ".*"}


@dataclass(frozen=True)
class Query:
    """One query of a panel, without Grafana's variables."""

    promql: str
    legend: str

    def name(self, line: Line) -> str:
        """What the legend says of a series."""
        return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: line.labels.get(match[1], ""), self.legend)


@dataclass(frozen=True)
class Panel:
    """One panel."""

    title: str
    kind: str
    place: tuple[int, int, int, int]  # x, y, width, height in Grafana's grid
    unit: str
    is_stacked: bool
    bounds: tuple[float | None, float | None]
    thresholds: tuple[tuple[float, str], ...]
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Answered:
    """A panel with the series it shows."""

    panel: Panel
    series: tuple[tuple[str, Line], ...]


def load(name: str) -> dict[str, Any]:
    """A dashboard's JSON."""
    dashboard: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return dashboard


def rows(dashboard: dict[str, Any]) -> list[tuple[str, int]]:
    """Titles of the rows and where they stand."""
    return [
        (panel["title"], panel["gridPos"]["y"]) for panel in dashboard["panels"] if panel["type"] == "row"
    ]


def panels(dashboard: dict[str, Any], rate_interval: str) -> Iterator[Panel]:
    """Its panels, with `rate_interval` where Grafana puts its own."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            continue
        defaults, place = panel["fieldConfig"]["defaults"], panel["gridPos"]
        steps = [(step["value"], step["color"]) for step in defaults["thresholds"]["steps"]]
        queries = [(_plain(one["expr"], rate_interval), one["legendFormat"]) for one in panel["targets"]]
        yield Panel(
            title=panel["title"],
            kind=panel["type"],
            place=(place["x"], place["y"], place["w"], place["h"]),
            unit=defaults["unit"],
            is_stacked=defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal",
            bounds=(defaults.get("min"), defaults.get("max")),
            thresholds=tuple((value, color) for value, color in steps if value is not None),
            queries=tuple(Query(*one) for one in queries),
        )


def _plain(expression: str, rate_interval: str) -> str:
    for variable, value in {**_VARIABLES, "$__rate_interval": rate_interval}.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression, f"an unknown variable in {expression}"
    return expression


def ask(prometheus: Prometheus, panel: Panel, start: float, end: float, step: float) -> Answered:
    """Ask every query of a panel."""
    series = [
        (query.name(line), line)
        for query in panel.queries
        for line in prometheus.range(query.promql, start, end, step)
    ]
    return Answered(panel, tuple(series))


def metric_names(expressions: Sequence[str]) -> set[str]:
    """Names of metrics in PromQL; recorded ones have colons."""
    return {name for each in expressions for name in re.findall(r"\b(?:ddtree|nv)[_:][a-z0-9_:]+", each)}
