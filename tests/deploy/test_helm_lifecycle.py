"""The real helm against our API server: install, upgrade, test, rollback, uninstall, and what is refused."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.deploy.kube import helm as helm_calls
from tests.deploy.kube.api_server import serve
from tests.deploy.kube.cluster import Cluster
from tests.deploy.kube.helm import CHART, HELMS, NAMESPACE, HelmError, Manifest, values_path
from tests.deploy.kube.schemas import schemas
from tests.deploy.kube.tools import deploy_tools

WAIT = ("--wait", "--timeout", "60s")


@dataclass(frozen=True)
class Release:
    """One Helm, talking to one cluster."""

    which: str
    cluster: Cluster
    env: dict[str, str]

    def helm(self, command: str, *arguments: str, namespace: str = NAMESPACE) -> str:
        return helm_calls.helm(self.which, command, *arguments, "--namespace", namespace, env=self.env)

    def bring(self, command: str, name: str, *arguments: str, chart: Path = CHART) -> str:
        """Install or upgrade with an example's values."""
        return self.helm(command, "rel", str(chart), "--values", str(values_path(name)), *arguments)

    def kubectl(self, *arguments: str) -> str:
        return helm_calls.run(deploy_tools().kubectl, *arguments, "--namespace", NAMESPACE, env=self.env)

    def names(self, kind: str) -> list[str]:
        return [each["metadata"]["name"] for each in self.cluster.of_kind(kind)]

    def template(self) -> Manifest:
        """What a pod is made from: another one rolls the pods."""
        (deployment,) = self.cluster.of_kind("Deployment")
        template = deployment["spec"]["template"]
        assert isinstance(template, dict)
        return template


def started(which: str, folder: Path, *, with_custom: bool) -> Iterator[Release]:
    namespaces = ["default", NAMESPACE, "monitoring"]
    cluster = Cluster(schemas("1.33"), with_custom=with_custom, namespaces=namespaces)
    with serve(cluster, folder) as kubeconfig:
        env = {"KUBECONFIG": str(kubeconfig), "HOME": str(folder), "PATH": "/usr/bin:/bin"}
        yield Release(which, cluster, env)


@pytest.fixture(params=HELMS)
def release(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Release]:
    yield from started(request.param, tmp_path, with_custom=True)


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Release]:
    """A cluster without any custom kind."""
    yield from started("helm4", tmp_path, with_custom=False)


def test_a_release_lives_and_leaves_nothing_but_the_checkpoints(release: Release) -> None:
    release.bring("install", "hugging-face-job", *WAIT)
    first = release.template()
    jobs = release.names("Job")
    release.bring("upgrade", "hugging-face-job", "--set", "checkpoints.huggingFace.targetRevision=v2", *WAIT)
    second = release.template()
    assert second != first
    # The Job's pod cannot be changed: the new revision came as a new Job, and the old one is gone.
    assert len(jobs) == len(release.names("Job")) == 1
    assert release.names("Job") != jobs
    release.helm("test", "rel", "--timeout", "60s")
    assert "rel-ddtree-test-generate" in release.names("Pod")
    release.helm("rollback", "rel", "1", *WAIT)
    assert release.template() == first
    assert release.names("Job") == jobs
    history = yaml.safe_load(release.helm("history", "rel", "--output", "yaml"))
    assert [each["status"] for each in history] == ["superseded", "superseded", "deployed"]
    release.helm("uninstall", "rel", *WAIT)
    left = [
        (kind.kind, each["metadata"]["name"])
        for kind in release.cluster.types
        for each in release.cluster.objects(kind, NAMESPACE)
    ]
    # The downloads outlive the release on purpose; Helm never removes the pod of a test.
    assert left == [("Pod", "rel-ddtree-test-generate"), ("PersistentVolumeClaim", "rel-ddtree-checkpoints")]


def test_monitoring_and_scaling_come_and_go_with_their_values(release: Release) -> None:
    release.bring("install", "monitoring")
    assert release.names("PodMonitor") == release.names("PrometheusRule") == ["rel-ddtree"]
    boards = [
        each
        for each in release.cluster.of_kind("ConfigMap")
        if "grafana_dashboard" in each["metadata"]["labels"]
    ]
    assert {each["metadata"]["namespace"] for each in boards} == {"monitoring"}
    release.bring("upgrade", "keda")
    assert release.names("ScaledObject") == ["rel-ddtree"]
    assert not release.names("PodMonitor")
    assert not release.names("PrometheusRule")
    # Somebody scales; the next upgrade leaves that alone.
    kind = next(each for each in release.cluster.types if each.kind == "Deployment")
    scale = {"spec": {"replicas": 5}}
    release.cluster.patch(kind, NAMESPACE, "rel-ddtree", scale, "application/merge-patch+json", dry_run=False)
    release.bring("upgrade", "hpa")
    assert release.names("HorizontalPodAutoscaler") == ["rel-ddtree"]
    (deployment,) = release.cluster.of_kind("Deployment")
    assert deployment["spec"]["replicas"] == 5


def test_a_cluster_without_the_operators_gets_the_rest(bare: Release) -> None:
    notes = bare.bring("install", "monitoring")
    assert notes.count("LEFT OUT") == 2
    assert bare.names("Deployment") == ["rel-ddtree"]


def test_a_group_over_nodes_installs(bare: Release, tmp_path: Path) -> None:
    with pytest.raises(HelmError, match="LeaderWorkerSet"):
        bare.bring("install", "leader-worker-set")
    folder = tmp_path / "custom"
    folder.mkdir()
    for release in started("helm4", folder, with_custom=True):
        release.helm("install", "rel", str(CHART), "--values", str(values_path("leader-worker-set")))
        assert release.names("LeaderWorkerSet") == ["rel-ddtree"]


def test_a_renewed_certificate_rolls_the_pods_at_the_next_upgrade(release: Release) -> None:
    secret = {"metadata": {"name": "ddtree-tls"}, "data": {"tls.crt": base64.b64encode(b"one").decode()}}
    kind = next(each for each in release.cluster.types if each.kind == "Secret")
    release.cluster.create(kind, NAMESPACE, secret)
    release.bring("install", "tls")
    first = release.template()
    release.bring("upgrade", "tls")
    assert release.template() == first
    renewed = {"data": {"tls.crt": base64.b64encode(b"two").decode()}}
    release.cluster.patch(
        kind, NAMESPACE, "ddtree-tls", renewed, "application/merge-patch+json", dry_run=False
    )
    release.bring("upgrade", "tls")
    changed = release.template()
    assert changed["spec"] == first["spec"]
    assert changed["metadata"]["annotations"] != first["metadata"]["annotations"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("imagePullPolicy:", "imagePullPolize:", "imagePullPolize"),
        ("name: triton", "name: Triton_Server", "no name of a container"),
        ("mountPath: /dev/shm", "mountPath: /tmp", "is there 2 times"),
        ("- name: shm\n    mountPath", "- name: shmem\n    mountPath", "'shmem' is no volume of the pod"),
        ("command: [/bin/sh, /etc/ddtree/start.sh]", "command: /etc/ddtree/start.sh", "is not of type"),
    ],
)
def test_the_api_server_refuses_a_chart_with_a_mistake(
    release: Release, tmp_path: Path, old: str, new: str, message: str
) -> None:
    chart = tmp_path / "ddtree"
    shutil.copytree(CHART, chart)
    container = chart / "templates" / "_container.tpl"
    text = container.read_text()
    assert old in text
    container.write_text(text.replace(old, new, 1))
    with pytest.raises(HelmError, match=message):
        release.bring("install", "minimal", chart=chart)


def test_a_missing_namespace_and_a_taken_name_are_refused(release: Release) -> None:
    with pytest.raises(HelmError, match="not found"):
        release.helm(
            "install", "rel", str(CHART), "--values", str(values_path("minimal")), namespace="nowhere"
        )
    service = {"metadata": {"name": "rel-ddtree"}, "spec": {"ports": [{"name": "p", "port": 80}]}}
    kind = next(each for each in release.cluster.types if each.kind == "Service")
    release.cluster.create(kind, NAMESPACE, service)
    with pytest.raises(HelmError, match="rel-ddtree"):
        release.bring("install", "minimal")


def test_kubectl_reads_applies_and_is_refused(release: Release, tmp_path: Path) -> None:
    release.bring("install", "minimal")
    assert "deployment.apps/rel-ddtree" in release.kubectl("get", "deployments", "--output", "name")
    deployment = yaml.safe_load(release.kubectl("get", "deployment", "rel-ddtree", "--output", "yaml"))
    assert deployment["spec"]["template"] == release.template()
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "site"}, "data": {"a": "1"}}
    path = tmp_path / "site.yaml"
    path.write_text(yaml.safe_dump(config))
    release.kubectl("apply", "--filename", str(path))
    assert "site" in release.names("ConfigMap")
    path.write_text(yaml.safe_dump({**config, "daata": {}}))
    with pytest.raises(HelmError, match="daata"):
        release.kubectl("apply", "--filename", str(path))
