"""The alert rules, held by promtool: each fires and stays quiet when it should, and leads to a runbook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import RULES, Observed
from tests.deploy.prometheus.panels import metric_names
from tests.deploy.prometheus.server import promtool
from tests.deploy.test_dashboards import published_names

CASES = Path(__file__).parent / "prometheus" / "alerts.yml"
OPERATIONS = Path(__file__).parents[2] / "docs" / "OPERATIONS.md"
RULE_FILE: dict[str, Any] = yaml.safe_load(RULES.read_text())
ALL_RULES = [rule for group in RULE_FILE["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in ALL_RULES if "alert" in rule]
NAMES = sorted({rule["alert"] for rule in ALERTS})
WANTED = {"DDTreeNoAcceptance", "DDTreeKVExhausted", "DDTreeQueueGrows", "DDTreeFirstTokenBurn",
          "DDTreeStageDead", "DDTreeErrorRatio", "DDTreeRecoveryLoop"}  # fmt: skip


def run_cases(rules: dict[str, Any], folder: Path) -> tuple[int, str]:
    """Run the cases against other rules than the chart's."""
    cases = yaml.safe_load(CASES.read_text())
    (folder / "rules.yml").write_text(yaml.safe_dump(rules))
    (folder / "cases.yml").write_text(yaml.safe_dump(cases | {"rule_files": ["rules.yml"]}))
    ran = promtool("test", "rules", folder / "cases.yml")
    return ran.returncode, ran.stdout + ran.stderr


def with_expression(name: str, expression: str) -> dict[str, Any]:
    """The chart's rules with another expression of one alert."""
    rules: dict[str, Any] = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            if rule.get("alert") == name:
                rule["expr"] = expression
    return rules


def test_promtool_accepts_the_rules() -> None:
    ran = promtool("check", "rules", RULES)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{len(ALL_RULES)} rules found" in ran.stdout


def test_every_alert_fires_and_stays_quiet_in_the_cases() -> None:
    assert set(NAMES) >= WANTED
    ran = promtool("test", "rules", CASES)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    fires: set[str] = set()
    quiet: set[str] = set()
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        for expected in case["alert_rule_test"]:
            (fires if expected["exp_alerts"] else quiet).add(expected["alertname"])
    assert fires == quiet == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_cases_catch_an_alert_that_never_fires(name: str, tmp_path: Path) -> None:
    code, said = run_cases(with_expression(name, "vector(1) > 2"), tmp_path)
    assert code != 0
    assert name in said


@pytest.mark.parametrize("name", NAMES)
def test_the_cases_catch_an_alert_that_always_fires(name: str, tmp_path: Path) -> None:
    code, said = run_cases(with_expression(name, 'label_replace(vector(1), "model", "x", "", "")'), tmp_path)
    assert code != 0
    assert name in said


def test_only_numbers_that_exist_are_used() -> None:
    recorded = {rule["record"] for rule in ALL_RULES if "record" in rule}
    used = metric_names([rule["expr"] for rule in ALL_RULES])
    assert used <= published_names() | recorded
    assert recorded <= used | {"ddtree:acceptance_length:mean15m"}
    assert "nv_" not in " ".join(rule["expr"] for rule in ALL_RULES)


@pytest.mark.parametrize("name", NAMES)
def test_every_alert_says_how_bad_it_is_and_leads_to_its_runbook(name: str) -> None:
    headings = re.findall(r"^#+ (.+)$", OPERATIONS.read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
    for rule in (rule for rule in ALERTS if rule["alert"] == name):
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page == "docs/OPERATIONS.md"
        assert anchor == name.lower()
        assert anchor in anchors, f"{page} has no heading {name}"


@pytest.mark.triton
def test_the_rules_work_in_a_real_prometheus(observed: Observed) -> None:
    health = observed.prometheus.rules()
    assert set(health) == {rule.get("alert", rule.get("record")) for rule in ALL_RULES}
    assert set(health.values()) == {"ok"}
    (tau,) = observed.prometheus.now("ddtree:acceptance_length:mean15m")
    assert tau.values[0] > 1.2
    firing = {line.labels["alertname"] for line in observed.prometheus.now('ALERTS{alertstate="firing"}')}
    assert not firing
