"""Writes the chart's dashboards from the YAML in dashboards/: `python deploy/helm/dashboards.py`.

The sources say what a panel is about and how to ask Prometheus; whatever else Grafana wants is the same
for all panels and stands here once. A test holds the JSON in the chart to what this writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

SOURCES = Path(__file__).parent / "dashboards"
CHART_FOLDER = Path(__file__).parent / "ddtree" / "dashboards"
_FILTER = 'model=~"$model", instance=~"$instance"'
_RANGE = "$__rate_interval"
_DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_QUANTILE = "histogram_quantile({q}, sum by (le) (rate({name}_bucket{{$f}}[$r])))"
_ROW_WIDTH, _PANEL_WIDTH, _PANEL_HEIGHT = 24, 8, 8


def render(source: Mapping[str, Any]) -> dict[str, Any]:
    """A dashboard as Grafana reads it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in source["rows"]:
        place = {"h": 1, "w": _ROW_WIDTH, "x": 0, "y": top}
        panels.append(
            {"type": "row", "title": row["title"], "collapsed": False, "panels": [], "gridPos": place}
        )
        left, top = 0, top + 1
        for panel in row["panels"]:
            width = panel.get("width", _PANEL_WIDTH)
            if left + width > _ROW_WIDTH:
                left, top = 0, top + _PANEL_HEIGHT
            panels.append(_panel(panel) | {"gridPos": {"h": _PANEL_HEIGHT, "w": width, "x": left, "y": top}})
            left += width
        top += _PANEL_HEIGHT
    for number, each in enumerate(panels, start=1):
        each["id"] = number
    link = {
        "type": "dashboards",
        "title": "DDTree",
        "tags": ["ddtree"],
        "includeVars": True,
        "keepTime": True,
    }
    return {
        "uid": source["uid"],
        "title": source["title"],
        "description": source["about"],
        "tags": ["ddtree", "triton"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [link],
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    queries = {
        "model": "label_values(ddtree_build_info, model)",
        "instance": 'label_values(ddtree_build_info{model=~"$model"}, instance)',
    }
    return [
        source | {"current": {}, "hide": 0, "refresh": 1, "regex": ""},
        *(
            {
                "name": name,
                "label": {"model": "Model", "instance": "Server"}[name],
                "type": "query",
                "datasource": _DATA_SOURCE,
                "definition": query,
                "query": {"query": query, "refId": "variable"},
                "refresh": 2,
                "sort": 1,
                "hide": 0,
                "multi": True,
                "includeAll": True,
                "allValue": ".*",
                "current": {"text": "All", "value": "$__all"},
            }
            for name, query in queries.items()
        ),
    ]


def _panel(panel: Mapping[str, Any]) -> dict[str, Any]:
    kind = panel.get("kind", "timeseries")
    queries = dict(panel.get("queries", {}))
    if "quantiles" in panel:
        queries |= {
            f"p{q:.0%}"[:-1]: _QUANTILE.format(q=q, name=panel["quantiles"]) for q in (0.5, 0.9, 0.99)
        }
    return {
        "type": kind,
        "title": panel["title"],
        "description": panel["shows"],
        "datasource": _DATA_SOURCE,
        "fieldConfig": {"defaults": _field_defaults(panel, kind), "overrides": []},
        "options": _options(kind),
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _DATA_SOURCE,
                "expr": query.replace("$f", _FILTER).replace("$r]", f"{_RANGE}]"),
                "legendFormat": legend,
                "range": kind != "stat",
                "instant": kind == "stat",
                "format": "heatmap" if kind == "heatmap" else "time_series",
                "editorMode": "code",
            }
            for number, (legend, query) in enumerate(queries.items())
        ],
    }


def _field_defaults(panel: Mapping[str, Any], kind: str) -> dict[str, Any]:
    thresholds = panel.get("thresholds", {})
    steps = [{"color": "green", "value": None}]
    steps += [{"color": color, "value": value} for value, color in thresholds.items()]
    defaults: dict[str, Any] = {
        "unit": panel.get("unit", "short"),
        "color": {"mode": "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    bounds = {"min": panel.get("lowest", 0), "max": panel.get("highest")}
    defaults |= {name: value for name, value in bounds.items() if value is not None}
    if kind == "timeseries":
        is_stacked = panel.get("stacked", False)
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if is_stacked else 8,
            "showPoints": "never",
            "spanNulls": True,
            "stacking": {"mode": "normal" if is_stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "line" if thresholds else "off"},
        }
    return defaults


def _options(kind: str) -> dict[str, Any]:
    if kind == "stat":
        reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {
            "colorMode": "value",
            "graphMode": "none",
            "textMode": "value_and_name",
            "reduceOptions": reduced,
        }
    if kind == "heatmap":
        color = {"mode": "scheme", "scheme": "Blues", "steps": 64}
        axis = {"unit": "short", "decimals": 0}
        return {"calculate": False, "yAxis": axis, "cellGap": 1, "color": color, "legend": {"show": True}}
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def files() -> dict[Path, str]:
    """What the chart's files should say."""
    rendered = {
        path.stem: render(yaml.safe_load(path.read_text())) for path in sorted(SOURCES.glob("*.yaml"))
    }
    return {
        CHART_FOLDER / f"{name}.json": json.dumps(dashboard, indent=1, ensure_ascii=False) + "\n"
        for name, dashboard in rendered.items()
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
