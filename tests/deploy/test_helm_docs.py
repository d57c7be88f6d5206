"""What docs/OPERATIONS.md says about the chart: its commands work, its numbers are the code's."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

import pytest
import torch
import yaml

from ddtree.kv_cache import CacheShape, KvPool
from tests.deploy.kube.admission import refusals
from tests.deploy.kube.helm import CHART, HELMS, helm
from tests.deploy.kube.schemas import schemas
from tests.deploy.kube.tools import ROOT

# The runbooks that follow are about alerts.
TEXT = (ROOT / "docs" / "OPERATIONS.md").read_text().split("\n## When it burns")[0]
COMPARED = (ROOT / "docs" / "CHARTS_COMPARED.md").read_text()
PAGE_SIZE = 64


def commands() -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line.strip()]


def with_program(name: str, *verbs: str) -> list[list[str]]:
    return [command for command in commands() if command[: 1 + len(verbs)] == [name, *verbs]]


def settings(command: Sequence[str]) -> list[str]:
    return [word for at, word in enumerate(command) if "--set" in (word, command[at - 1])]


def test_installing_takes_five_commands() -> None:
    section = TEXT.split("## Install in five commands")[1].split("\n## ")[0]
    block = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)[0]
    assert [line.split()[0] for line in block.splitlines()] == [
        "docker",
        "kubectl",
        "kubectl",
        "helm",
        "helm",
    ]


@pytest.mark.parametrize("which", HELMS)
def test_the_install_command_renders_what_kubernetes_takes(which: str) -> None:
    (command,) = with_program("helm", "install")
    chart = ROOT / command[3]
    assert chart == CHART
    text = helm(which, "template", command[2], str(chart), "--namespace", "inference", *settings(command))
    manifests = [document for document in yaml.safe_load_all(text) if document]
    assert [schemas("1.33").errors(each) + refusals(each) for each in manifests] == [[]] * len(manifests)
    assert "registry.example.com/ddtree:0.1.0" in text


@pytest.mark.parametrize("which", HELMS)
def test_every_flag_of_helm_exists(which: str) -> None:
    known = {verb: helm(which, verb, "--help") for verb in ("install", "upgrade", "rollback", "test")}
    for command in with_program("helm"):
        for word in command:
            if word.startswith("--"):
                assert f"{word} " in known[command[1]], word


def test_the_build_command_names_the_dockerfile() -> None:
    (command,) = with_program("docker", "build")
    assert (ROOT / command[command.index("-f") + 1]).is_file()
    tag = command[command.index("-t") + 1]
    assert tag.endswith(f":{yaml.safe_load((CHART / 'Chart.yaml').read_text())['appVersion']}")


def test_every_value_that_is_named_exists() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    named = re.findall(r"`([a-zA-Z]+(?:\.[a-zA-Z*]+)+)`", TEXT)
    checked = 0
    for path in named:
        keys = path.split(".")
        if keys[0] not in values:
            continue  # a file, a metric, a field of Kubernetes
        place = values
        for key in keys:
            if key == "*":
                break
            assert key in place, path
            place = place[key]
        checked += 1
    assert checked > 15


def test_the_table_of_capacity_is_the_caches_own() -> None:
    section = TEXT.split("## Capacity planning")[1].split("\n## ")[0]
    rows = re.findall(r"^\|[^|\n]*\|((?: [\d.]+ \|){6})$", section, re.MULTILINE)
    assert len(rows) == 4
    for row in rows:
        *shape, kib, tokens = (float(cell) for cell in row.split("|")[:-1])
        layers, kv_heads, head_dim, feature = map(int, shape)
        cache = CacheShape(layers, kv_heads, head_dim, feature)
        assert round(cache.bytes_per_slot / 1024, 1) == kib
        # Allocated on no device: only the number of pages is asked for.
        pool = KvPool(cache, budget_bytes=4096 * 2**20, page_size=PAGE_SIZE, device=torch.device("meta"))
        assert pool.num_pages * PAGE_SIZE == tokens


def test_every_link_leads_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT):
        assert (ROOT / "docs" / link).exists(), link
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= anchors


def test_the_comparison_is_full_and_names_tests_that_are_there() -> None:
    rows = [
        line.split("|")[1:-1] for line in COMPARED.split("## What people")[0].splitlines() if line[:1] == "|"
    ]
    head, _, *rest = rows
    assert len(head) == 10
    assert len(rest) > 25
    for row in rest:
        assert len(row) == len(head), row[0]
        assert all(cell.strip() for cell in row), row[0]
        for name in re.findall(r"`(test_\w+)`", row[-1]):
            assert (ROOT / "tests" / "deploy" / f"{name}.py").is_file(), name
