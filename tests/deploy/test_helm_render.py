"""Every example of the chart is linted, rendered by both Helms, and held to Kubernetes' own schemas."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.kube.admission import refusals
from tests.deploy.kube.helm import CHART, HELMS, HelmError, Rendering, ci_names, helm, values_path
from tests.deploy.kube.schemas import UnknownKindError, schemas

VERSIONS = ("1.27", "1.30", "1.33", "1.37")
IMAGE_VOLUMES_SINCE = 31


def wrong(version: str, manifest: Mapping[str, Any]) -> list[str]:
    return schemas(version).errors(manifest) or refusals(manifest)


@pytest.mark.parametrize("which", HELMS)
def test_the_chart_and_every_example_lint_without_a_warning(which: str) -> None:
    # One call for all: lint takes any number of charts, but only one set of values.
    for name in ci_names():
        report = helm(which, "lint", "--strict", str(CHART), "--values", str(values_path(name)))
        assert "1 chart(s) linted, 0 chart(s) failed" in report
        assert "[WARNING]" not in report
    assert "0 chart(s) failed" in helm(which, "lint", "--strict", str(CHART))


@pytest.mark.parametrize("name", ci_names())
def test_both_helms_render_the_same_objects(name: str) -> None:
    assert Rendering(name, helm="helm3").manifests() == Rendering(name).manifests()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ci_names())
def test_every_object_is_what_this_kubernetes_takes(name: str, version: str) -> None:
    rendering = Rendering(name, kube_version=version)
    if name == "oci-image" and int(version.split(".")[1]) < IMAGE_VOLUMES_SINCE:
        with pytest.raises(HelmError, match=r"needs Kubernetes 1\.31"):
            rendering.text()
        return
    manifests = rendering.manifests()
    assert {each["kind"] for each in manifests} >= {"Service", "ConfigMap"}
    problems = {
        f"{each['kind']} {each['metadata']['name']}": found
        for each in manifests
        if (found := wrong(version, each))
    }
    assert not problems


def test_an_unknown_field_is_found() -> None:
    deployment = Rendering().only("Deployment")
    assert not wrong("1.33", deployment)
    deployment["spec"]["template"]["spec"]["containers"][0]["imagePolicy"] = "Always"
    assert "imagePolicy" in str(wrong("1.33", deployment))


def test_an_unknown_field_of_a_custom_kind_is_found() -> None:
    monitor = Rendering("monitoring").only("PodMonitor")
    assert not wrong("1.33", monitor)
    monitor["spec"]["podMetricsEndpoints"][0]["intervall"] = "5s"
    assert "intervall" in str(wrong("1.33", monitor))


def test_a_bad_pod_in_a_leader_worker_set_is_found() -> None:
    group = Rendering("leader-worker-set").only("LeaderWorkerSet")
    assert not wrong("1.33", group)
    group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["comand"] = ["x"]
    assert "comand" in str(wrong("1.33", group))


def test_a_kind_without_a_schema_is_an_error() -> None:
    manifest = {"apiVersion": "autoscaling/v2beta2", "kind": "HorizontalPodAutoscaler", "metadata": {}}
    with pytest.raises(UnknownKindError, match=r"unknown in Kubernetes 1\.33"):
        wrong("1.33", manifest)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("monitoring", {"PodMonitor", "PrometheusRule"}),
        ("keda", {"ScaledObject"}),
        ("gateway", {"GRPCRoute"}),
    ],
)
def test_what_the_cluster_does_not_know_is_left_out_and_said(name: str, kinds: set[str]) -> None:
    with_apis = {each["kind"] for each in Rendering(name).manifests()}
    without = {each["kind"] for each in Rendering(name, apis=()).manifests()}
    assert with_apis - without == kinds
    notes = helm(
        "helm4", "install", "rel", str(CHART), "--dry-run=client", "--values", str(values_path(name))
    )
    assert notes.count("LEFT OUT") == len(kinds)
    assert all(kind in notes.split("NOTES:")[1] for kind in kinds)


def test_a_kind_can_be_assumed_without_asking_a_cluster() -> None:
    settings = ("assumeApis={keda.sh/v1alpha1/ScaledObject}",)
    assert Rendering("keda", settings, apis=()).only("ScaledObject")


@pytest.mark.parametrize("name", [name for name in ci_names() if name != "minimal"])
def test_every_example_changes_what_is_rendered(name: str) -> None:
    assert Rendering(name).manifests() != Rendering().manifests()


def test_the_package_leaves_the_examples_out_and_still_renders(tmp_path: Path) -> None:
    helm("helm4", "package", str(CHART), "--destination", str(tmp_path))
    (package,) = tmp_path.glob("ddtree-*.tgz")
    with tarfile.open(package) as archive:
        names = archive.getnames()
    assert [name for name in names if name.startswith("ddtree/dashboards/")]
    assert not [name for name in names if name.startswith("ddtree/ci/") or "__pycache__" in name]
    assert Rendering(chart=package).manifests() == Rendering().manifests()
