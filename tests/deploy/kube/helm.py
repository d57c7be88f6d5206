"""The real helm as Python calls: render a chart, lint it, or run any command. Knows no Kubernetes."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.kube.tools import ROOT, deploy_tools

CHART = ROOT / "deploy" / "helm" / "ddtree"
CI_VALUES = tuple(sorted((CHART / "ci").glob("*-values.yaml")))
HELMS = ("helm3", "helm4")
NAMESPACE = "inference"
RELEASE = "rel"
OPTIONAL_APIS = (
    "monitoring.coreos.com/v1/PodMonitor",
    "monitoring.coreos.com/v1/PrometheusRule",
    "keda.sh/v1alpha1/ScaledObject",
    "gateway.networking.k8s.io/v1/GRPCRoute",
)
_TIMEOUT_S = 120

Manifest = dict[str, Any]


class HelmError(Exception):
    """helm ended with an error."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def run(binary: Path, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output. Raises HelmError."""
    result = subprocess.run(
        [str(binary), *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=env
    )
    if result.returncode:
        raise HelmError(result.stderr or result.stdout)
    return result.stdout


def helm(which: str, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    """Run "helm3" or "helm4". Raises HelmError."""
    return run(getattr(deploy_tools(), which), *arguments, env=env)


@dataclass(frozen=True)
class Rendering:
    """What is rendered, and how. `values` is a name in ci/ without its ending."""

    values: str = "minimal"
    settings: tuple[str, ...] = ()
    helm: str = "helm4"
    apis: tuple[str, ...] = OPTIONAL_APIS
    kube_version: str = "1.33"
    chart: Path = CHART

    def text(self) -> str:
        """What it prints. Raises HelmError."""
        return _render(self)

    def manifests(self) -> list[Manifest]:
        """The objects, the caller's to change. Raises HelmError."""
        return copy.deepcopy(_parse(self))

    def only(self, kind: str, suffix: str = "") -> Manifest:
        """The one object of a kind whose name ends so. Raises AssertionError unless there is one."""
        found = [
            each
            for each in self.manifests()
            if each["kind"] == kind and each["metadata"]["name"].endswith(suffix)
        ]
        assert len(found) == 1, f"{self.values}: {len(found)} objects {kind} *{suffix}"
        return found[0]

    def pod(self) -> Manifest:
        """The specification of the serving pod."""
        spec = self.only("Deployment")["spec"]["template"]["spec"]
        assert isinstance(spec, dict)
        return spec

    def server(self) -> Manifest:
        """The serving container."""
        container = self.pod()["containers"][0]
        assert isinstance(container, dict)
        return container


def values_path(name: str) -> Path:
    """A file in ci/ by its name without the ending."""
    return CHART / "ci" / f"{name}-values.yaml"


def ci_names() -> list[str]:
    """Every file in ci/, by that name."""
    return [path.name.removesuffix("-values.yaml") for path in CI_VALUES]


@cache
def _render(what: Rendering) -> str:
    arguments: list[str] = ["--namespace", NAMESPACE, "--kube-version", what.kube_version]
    arguments += ["--values", str(values_path(what.values))]
    arguments += _flags("--set", what.settings) + _flags("--api-versions", what.apis)
    return helm(what.helm, "template", RELEASE, str(what.chart), *arguments)


@cache
def _parse(what: Rendering) -> list[Manifest]:
    return [document for document in yaml.load_all(what.text(), Loader=yaml.CSafeLoader) if document]


def _flags(name: str, values: Sequence[str]) -> list[str]:
    return [part for value in values for part in (name, value)]


def containers(pod: Manifest) -> Iterator[Manifest]:
    """Every container of a pod, those that run before the others included."""
    yield from pod.get("initContainers", ())
    yield from pod["containers"]


def environment(container: Manifest) -> dict[str, str]:
    """The variables that have a value."""
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
