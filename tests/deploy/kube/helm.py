"""The real helm as a Python call: render a chart, or run any command. Knows no Kubernetes."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.kube.tools import ROOT

CHART = ROOT / "deploy" / "helm" / "ddtree"
CI_VALUES = tuple(sorted((CHART / "ci").glob("*-values.yaml")))
NAMESPACE = "inference"
OPTIONAL_APIS = (
    "monitoring.coreos.com/v1/PodMonitor",
    "monitoring.coreos.com/v1/PrometheusRule",
    "keda.sh/v1alpha1/ScaledObject",
    "gateway.networking.k8s.io/v1/GRPCRoute",
)
_TIMEOUT_S = 120

Manifest = dict[str, Any]


@dataclass(frozen=True)
class HelmError(Exception):
    """helm ended with an error."""

    message: str


def run(binary: Path, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output. Raises HelmError."""
    result = subprocess.run(
        [str(binary), *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=env
    )
    if result.returncode:
        raise HelmError(result.stderr or result.stdout)
    return result.stdout


def template(
    helm: Path,
    *values: Path,
    chart: Path = CHART,
    settings: Sequence[str] = (),
    apis: Sequence[str] = OPTIONAL_APIS,
    kube_version: str = "1.33",
    release: str = "rel",
) -> list[Manifest]:
    """The objects that a chart renders to. Raises HelmError."""
    arguments = ["template", release, str(chart), "--namespace", NAMESPACE, "--kube-version", kube_version]
    for path in values:
        arguments += ["--values", str(path)]
    for setting in settings:
        arguments += ["--set", setting]
    for api in apis:
        arguments += ["--api-versions", api]
    return parse(run(helm, *arguments))


def parse(text: str) -> list[Manifest]:
    """The objects in a stream of YAML documents."""
    return [document for document in yaml.safe_load_all(text) if document]


def only(manifests: Sequence[Manifest], kind: str, suffix: str = "") -> Manifest:
    """The one object of a kind whose name ends so. Raises AssertionError when there is not exactly one."""
    found = [each for each in manifests if each["kind"] == kind and each["metadata"]["name"].endswith(suffix)]
    assert len(found) == 1, f"{len(found)} objects {kind} *{suffix}"
    return found[0]
