"""Every panel parses, and answers with data from a real Prometheus on a real Triton under load."""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from ddtree.metrics import Metrics, Tally
from tests.deploy.conftest import Observed
from tests.deploy.prometheus.drawing import draw
from tests.deploy.prometheus.panels import Answered, Panel, ask, load, metric_names, panels, rows

DASHBOARDS = ("serving", "speculation")
GENERATOR = Path(__file__).parents[2] / "deploy" / "helm" / "dashboards.py"
OBSERVABILITY = Path(__file__).parents[2] / "docs" / "OBSERVABILITY.md"

all_panels = [
    pytest.param(panel, id=panel.title) for name in DASHBOARDS for panel in panels(load(name), "5s")
]


def published_names() -> set[str]:
    """Every name on the metrics port."""
    names = set()
    for family in Metrics().families():
        names.add(family.name)
        if family.buckets or any(isinstance(series, Tally) for _, series in family.items()):
            names |= {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
    return names


def test_the_files_are_what_their_sources_say() -> None:
    spec = importlib.util.spec_from_file_location("dashboards", GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written: dict[Path, str] = module.files()
    assert sorted(path.stem for path in written) == sorted(DASHBOARDS)
    for path, text in written.items():
        assert path.read_text() == text, (
            f"{path.name} is not up to date; run python deploy/helm/dashboards.py"
        )


def test_every_number_is_described() -> None:
    said = OBSERVABILITY.read_text()
    assert not [family.name for family in Metrics().families() if f"`{family.name}`" not in said]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_what_grafana_needs_is_there(name: str) -> None:
    dashboard = load(name)
    assert dashboard["uid"] == f"ddtree-{name}"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not taken & cells, panel["title"]
        taken |= cells
        references = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(references)) == len(references)
        assert panel["type"] == "row" or (references and panel["description"])
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert list(variables) == ["datasource", "model", "instance"]
    assert [y for _, y in rows(dashboard)] == sorted(y for _, y in rows(dashboard))


def test_both_dashboards_have_the_panels_that_were_asked_for() -> None:
    titles = {panel.title for name in DASHBOARDS for panel in panels(load(name), "5s")}
    assert len(titles) == len(all_panels) == 29
    wanted = {"Time to first token", "Inter-token time", "Error ratio", "Places taken", "Acceptance length",
              "Accepted at least to a depth", "Tree size", "Budget", "Time of a round", "KV pages",
              "Tokens per second, and without drafts"}  # fmt: skip
    assert wanted <= titles


@pytest.mark.parametrize("panel", all_panels)
def test_every_query_parses_and_asks_for_numbers_that_exist(panel: Panel) -> None:
    for query in panel.queries:
        promql_parser.parse(query.promql)
    names = metric_names([query.promql for query in panel.queries])
    assert names
    assert names <= published_names()
    assert not any(name.startswith("nv_") for name in names)


@pytest.mark.triton
@pytest.mark.parametrize("panel", all_panels)
def test_every_panel_answers_with_data(observed: Observed, panel: Panel) -> None:
    answered = ask(observed.prometheus, panel, observed.start, observed.end, step=1.0)
    for query in panel.queries:
        assert any(query.name(line) == name for name, line in answered.series), f"nothing for {query.promql}"
    numbers = [number for _, line in answered.series for number in line.numbers]
    assert numbers
    assert all(number >= 0 for number in numbers) or panel.bounds[0] is None
    assert max(numbers) > 0


@pytest.mark.triton
@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_dashboard_can_be_drawn(observed: Observed, name: str, tmp_path: Path) -> None:
    dashboard = load(name)
    answered: list[Answered] = [
        ask(observed.prometheus, panel, observed.start, observed.end, step=1.0)
        for panel in panels(dashboard, "5s")
    ]
    picture = tmp_path / f"{name}.png"
    draw(dashboard["title"], rows(dashboard), answered, picture, "half a minute of a test's load")
    assert picture.stat().st_size > 50_000


def test_panels_without_data_are_found(observed: Observed) -> None:
    broken: Any = load("serving")
    first = next(panel for panel in broken["panels"] if panel["type"] != "row")
    first["targets"][0]["expr"] = first["targets"][0]["expr"].replace("requests", "no_such")
    panel = next(panels(broken, "5s"))
    assert not metric_names([panel.queries[0].promql]) <= published_names()
    assert not ask(observed.prometheus, panel, observed.start, observed.end, step=1.0).series


def test_the_places_of_a_dashboards_rows_are_in_order() -> None:
    for name in DASHBOARDS:
        assert all(above[1] < below[1] for above, below in pairwise(rows(load(name))))
